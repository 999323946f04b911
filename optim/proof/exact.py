"""A parallel model against a dense one: the same norm, gradients and parameters, each piece where its spec says it lies.

    def check(topology):
        with ProcessGroupRegistry(topology) as registry:
            model, dense = ParallelMLP(registry).double(), DenseMLP().double()     # of the same weights
            assert_exact(lambda: backward(model), lambda: backward(dense), registry)

Every rank computes the dense step itself. A piece is compared with that part of the dense tensor which its spec says it is,
so that nothing is gathered but what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...parallel.interop.local_parameters import local_gradients, local_parameter, spec_of
from ...parallel.layout.regions import Region
from ...parallel.layout.spec import P
from ...parallel.mesh.agreement import gather_objects, on_all_ranks
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.text import named_ranks
from ..clip.functional import global_norm
from ..gradients.buckets import sync_gradients
from ..norm.measure import GradStats

# What a step returns: the model, of which gradients are compared; or the model and the norm of a step that was taken.
Step = Callable[[], "nn.Module | tuple[nn.Module, GradStats | Tensor | float]"]
Counterpart = str | tuple[str, Callable[[Tensor], Tensor]]
Names = Mapping[str, Counterpart] | Callable[[str], Counterpart]

MOST_LINES = 10
_ORDER = ("the gradient of", "the norm of the gradients", "parameter")
# Relative to the largest element of the dense tensor: some ten thousand roundings.
_RELATIVE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def assert_exact(
    parallel_step: Step,
    dense_step: Step,
    registry: ProcessGroupRegistry,
    *,
    names: Names | None = None,
    steps: int = 1,
    rtol: float | None = None,
    atol: float = 0.0,
) -> None:
    """Compare what a step of a parallel model computes with what the same step of a dense one does, on every rank.

    A step that returns its model has run backward: copies of its gradients are completed (by `sync_gradients`), their
    global norm is measured, and norm, gradients and parameters are compared. A step that returns ``(model, norm)`` has
    updated the model, and the norm (that of `GradStats`, if given these) and the new parameters are compared. Both steps
    return the same. A missing gradient is zeros.

    Args:
        parallel_step: Every rank's; the model's parameters are declared.
        dense_step: The same model on the whole batch, in float64 if the parallel one is.
        names: From the parallel model's names to the dense one's, where they differ: a mapping of those that do, or a
            function of all. A name may come with a function that makes the parallel model's full tensor of the dense one's,
            of its gradient as well, where that is stored otherwise: ``{"up.weight": ("fc1.weight", torch.t)}``.
        steps: How often both are called; they are compared after each.
        rtol: Allowed error, times the largest element of the dense tensor. By default by the parallel parameter's dtype:
            1e-10 in float64, 1e-4 in float32.
        atol: Is added to it.
    Raises:
        AssertionError: On every rank, the same text: each tensor that differs, on which ranks, where, by how much, and how
            much was allowed; and, where it is so, that it is a multiple of the dense one.
        ValueError: A name has no counterpart, a dense parameter none on any rank; an undeclared parameter.
        TypeError: A step returns something else.
    Collectives: those of the step, of `sync_gradients` and `global_norm`, and object all-gathers. Host reads: yes.
    """
    for number in range(1, steps + 1):
        (model, norm), (dense, dense_norm) = _outcome(parallel_step()), _outcome(dense_step())
        if (norm is None) is not (dense_norm is None):
            raise TypeError("one step returns its model and the other one model and norm; let both return the same")
        allowed = _Allowed(rtol, atol)
        pairs = _pairs(model, dense, registry, names)
        if norm is not None and dense_norm is not None:
            problems = _wrong_norm(norm, dense_norm, model, allowed)
        else:
            problems = _wrong_gradients(model, dense, pairs, registry, allowed)
        problems += [*_differences("parameter", [(each, each.param, each.dense) for each in pairs], registry, allowed)]
        found = [problem for of_rank in gather_objects(problems, registry) for problem in of_rank]
        if found:
            step = f" after step {number}" if steps > 1 else ""
            raise AssertionError(_told(found, len({problem.what for problem in found}), step))


@dataclass(frozen=True)
class _Pair:
    """A parameter of this rank (of a DTensor the local one), and its dense counterpart."""

    name: str
    param: Tensor
    spec: P
    dense: Tensor
    dense_gradient: Tensor


@dataclass(frozen=True)
class _Problem:
    """Something that differs on one rank; on all of them, if the rank is None."""

    kind: str
    name: str
    rank: int | None
    text: str
    error: float

    @property
    def what(self) -> str:
        return f"{self.kind} {self.name}".strip()


@dataclass(frozen=True)
class _Allowed:
    relative: float | None
    absolute: float

    def of(self, dtype: torch.dtype, largest: float) -> float:
        relative = _RELATIVE.get(dtype, 1e-4) if self.relative is None else self.relative
        return relative * largest + self.absolute


def _outcome(returned: object) -> tuple[nn.Module, float | None]:
    if isinstance(returned, nn.Module):
        return returned, None
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], nn.Module):
        model, norm = returned
        return model, float(norm.total_norm if isinstance(norm, GradStats) else norm)
    raise TypeError(f"a step returned {type(returned).__name__}; return the model, or the model and its step's norm")


def _pairs(model: nn.Module, dense: nn.Module, registry: ProcessGroupRegistry, names: Names | None) -> list[_Pair]:
    """Of each parameter of this rank. Raises ValueError, on every rank, unless each dense one has a counterpart."""
    there = dict(dense.named_parameters())

    def pair(name: str, param: Tensor) -> tuple[str, _Pair]:
        found = names(name) if callable(names) else (names or {}).get(name, name)
        dense_name, made = (found, None) if isinstance(found, str) else found
        if dense_name not in there:
            raise ValueError(
                f"{name} is {dense_name!r} in the dense model, whose parameters are {', '.join(there)}: say by names= "
                "which one it is"
            )
        counterpart = there[dense_name]
        gradient = torch.zeros_like(counterpart) if counterpart.grad is None else counterpart.grad
        tensors = [tensor.detach() if made is None else made(tensor.detach()) for tensor in (counterpart, gradient)]
        spec = spec_of(param, registry.topology)
        return dense_name, _Pair(name, local_parameter(param, registry.topology), spec, *tensors)

    def pairs() -> list[tuple[str, _Pair]]:
        unknown = [] if names is None or callable(names) else sorted({*names} - {*dict(model.named_parameters())})
        known = {name for of_rank in model_names for name in of_rank}
        if unknown := [name for name in unknown if name not in known]:
            raise ValueError(f"names= speaks of {', '.join(unknown)}, which no rank's model has; leave it out")
        return [pair(name, param) for name, param in model.named_parameters()]

    model_names = gather_objects([name for name, _ in model.named_parameters()], registry)
    found = on_all_ranks(pairs, registry)
    covered = {name for of_rank in gather_objects({name for name, _ in found}, registry) for name in of_rank}
    if missing := [name for name in there if name not in covered]:
        raise ValueError(
            f"no rank has a counterpart of the dense model's {', '.join(missing)}: say by names= which it is"
        )
    return [each for _, each in found]


def _wrong_norm(norm: float, dense_norm: float, model: nn.Module, allowed: _Allowed) -> list[_Problem]:
    dtype = next((param.dtype for param in model.parameters()), torch.float64)
    limit, error = allowed.of(dtype, abs(dense_norm)), abs(norm - dense_norm)
    if error <= limit or norm == dense_norm:  # both infinite
        return []
    text = f"{norm:.6g}, {dense_norm:.6g} in the dense model: off by {error:.2g}, allowed {limit:.2g}"
    return [_Problem("the norm of the gradients", "", None, text, error)]


def _wrong_gradients(
    model: nn.Module, dense: nn.Module, pairs: Sequence[_Pair], registry: ProcessGroupRegistry, allowed: _Allowed
) -> list[_Problem]:
    with _gradients_kept(model):
        sync_gradients(model.named_parameters(), registry)
        norm = float(global_norm(model.named_parameters(), registry).total_norm)
        gradients = local_gradients([*model.parameters()], registry.topology).gradients
        compared = [(each, grad, each.dense_gradient) for each, grad in zip(pairs, gradients, strict=True)]
        problems = [*_differences("the gradient of", compared, registry, allowed)]
    dense_gradients = [param.grad.double().norm() for param in dense.parameters() if param.grad is not None]
    dense_norm = float(torch.stack(dense_gradients).norm()) if dense_gradients else 0.0
    return problems + _wrong_norm(norm, dense_norm, model, allowed)


def _differences(
    kind: str,
    compared: Sequence[tuple[_Pair, Tensor | None, Tensor]],
    registry: ProcessGroupRegistry,
    allowed: _Allowed,
) -> Iterator[_Problem]:
    topology, coordinate, rank = registry.topology, registry.coordinate, registry.global_rank
    for each, given, dense in compared:
        if not each.spec.holds(coordinate, topology):
            continue
        try:
            region = Region.of_shard(dense.shape, each.param.shape, each.spec, topology, coordinate, each.name)
        except ValueError as problem:
            yield _Problem(kind, each.name, rank, str(problem), float("inf"))
            continue
        found = (torch.zeros_like(each.param) if given is None else given).detach().double()
        expected = region.of(dense).to(found.device, torch.float64)
        error = (found - expected).abs()
        limit = allowed.of(each.param.dtype, float(dense.abs().max()) if dense.numel() else 0.0)
        if not bool((error <= limit).all()):  # NaN is none of them
            yield _Problem(kind, each.name, rank, _wrong(found, expected, region, limit), float(error.max()))


def _wrong(found: Tensor, expected: Tensor, region: Region, limit: float) -> str:
    error = (found - expected).abs()
    at = int(error.nan_to_num(nan=torch.inf).argmax())
    index = [int(number) for number in torch.unravel_index(torch.tensor(at), found.shape)] if found.dim() else []
    text = (
        f"off by {float(error.flatten()[at]):.2g} at {index} of elements {region}, "
        f"{float(found.flatten()[at]):.6g} and in the dense model {float(expected.flatten()[at]):.6g}, allowed {limit:.2g}"
    )
    size = float((expected * expected).sum())
    factor = float((found * expected).sum()) / size if size else 0.0
    if not bool(found.any()):
        return f"{text}: it is zero"
    if bool(((found - factor * expected).abs() <= 10 * limit).all()):
        return f"{text}: it is {factor:.4f} times the dense one"
    return text


def _told(problems: Sequence[_Problem], number: int, step: str) -> str:
    by_tensor: dict[str, list[_Problem]] = {}
    for problem in problems:
        by_tensor.setdefault(problem.what, []).append(problem)
    lines = []
    # Gradients first: where one is wrong, so are the norm and the parameters.
    for what, of_ranks in sorted(by_tensor.items(), key=lambda item: _ORDER.index(item[1][0].kind))[:MOST_LINES]:
        worst = max(of_ranks, key=lambda problem: problem.error)
        ranks = sorted({problem.rank for problem in of_ranks if problem.rank is not None})
        where = f", {named_ranks(ranks)}" if ranks else ""
        most = f"rank {worst.rank}: " if len(ranks) > 1 else ""
        lines.append(f"{what}{where}: {most}{worst.text}")
    if number > MOST_LINES:
        lines.append(f"and {number - MOST_LINES} more")
    return "\n".join([f"{number} of the parallel model's differ from the dense one's{step}", *lines])


@contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    """Within it gradients are copies."""
    before = [(param, param.grad) for param in model.parameters()]
    for param, grad in before:
        param.grad = None if grad is None else grad.clone()
    try:
        yield
    finally:
        for param, grad in before:
            param.grad = grad
