"""`assert_exact`, which compares a parallel model with a dense model: gradient norm, gradients and parameters.

    def check(topology):
        with ProcessGroupRegistry(topology) as registry:
            model, dense = ParallelMLP(registry).double(), DenseMLP().double()     # with the same weights
            assert_exact(lambda: backward(model), lambda: backward(dense), registry)

Every rank computes the step of the dense model itself, and compares its shards with the same elements of the dense
tensors. So only names and texts about differences are gathered from all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...parallel.interop.local_parameters import local_gradients, local_parameter, spec_of
from ...parallel.layout.shard import Region
from ...parallel.layout.spec import P
from ...parallel.mesh.agreement import gather_objects, on_all_ranks
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.text import named_ranks
from ..clip.functional import global_norm
from ..gradients.buckets import sync_gradients
from ..norm.measure import GradStats

# A step runs backward and returns the model. Or it also updates the model, and returns (model, gradient norm).
Step = Callable[[], "nn.Module | tuple[nn.Module, GradStats | Tensor | float]"]
Counterpart = str | tuple[str, Callable[[Tensor], Tensor]]
Names = Mapping[str, Counterpart] | Callable[[str], Counterpart]

MOST_LINES = 10
_ORDER = ("the gradient of", "the norm of the gradients", "parameter")
# Allowed errors, relative to the largest element of the dense tensor. In float64, 1e-10 is 450,000 times the machine
# epsilon.
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
    """Raise AssertionError if a step of a parallel model differs from the same step of a dense model.

    Every rank must call it.

        def parallel_step():
            parallel(x).square().mean().backward()
            return parallel

        def dense_step():
            dense(x).square().mean().backward()
            return dense

        assert_exact(parallel_step, dense_step, registry)

    Steps have one of two forms, and both steps must have the same one:

    * A step runs forward and backward, and returns the model. `assert_exact` then reduces copies of the gradients with
      `sync_gradients`, measures the global norm, and compares norm, gradients and parameters. The gradients of the
      model are unchanged.
    * A step also updates the model, and returns ``(model, norm)``. The norm is a number, a tensor or a `GradStats`.
      `assert_exact` then compares the norms and the new parameters.

    A missing gradient counts as zeros.

    Args:
        parallel_step: Called on every rank. The parameters of its model must be declared.
        dense_step: The same step of the dense model on the full batch. Use the same dtype in both models, preferably
            float64.
        registry: The process groups of the mesh on which the parallel model's parameters were declared.
        names: Maps parameter names of the parallel model to names of the dense model: a dict of the names that differ,
            or a function that is called with every name. Instead of a name, the value may be a pair of a name and a
            function. The function converts the dense tensor and its gradient to the parallel model's full tensor, as in
            ``{"up.weight": ("fc1.weight", torch.t)}``. None (default): all names are equal.
        steps: Number of times that each step function is called. The models are compared after each call. Default: 1.
        rtol: Allowed error, relative to the largest absolute value in the dense tensor. For the norm, it is relative to
            the dense norm. None (default): 1e-10 for parallel parameters in float64, 1e-4 in float32, 1e-2 in float16,
            5e-2 in bfloat16.
        atol: Absolute error that is allowed in addition. Default: 0.

    Raises:
        AssertionError: On every rank: the norm or a tensor differs from the dense one by more than the allowed error,
            or a shard does not fit the dense tensor. The text is the same on every rank. It lists up to ten tensors (or
            the norm) with their ranks, the element with the largest error, and the factor if a tensor is a multiple of
            the dense one.
        ValueError: On every rank: a parameter has no dense counterpart, a dense parameter has no counterpart on any
            rank, ``names`` has a name that no rank's model has, or a parameter is not declared.
        TypeError: On this rank: a step returns neither a model nor a model and a norm, or the two steps return different
            forms.

    Collectives: per step, those of ``parallel_step`` and ``dense_step``, and a few object all-gathers. For steps that
        return a model only, also those of one `sync_gradients` and one `global_norm`.
    Host synchronization: yes.
    """
    for number in range(1, steps + 1):
        (model, norm), (dense, dense_norm) = _outcome(parallel_step()), _outcome(dense_step())
        if (norm is None) is not (dense_norm is None):
            raise TypeError(
                "one step returns its model and the other step a model and a norm; both must return the same form"
            )
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
            raise AssertionError(_summarize(found, step))


@dataclass(frozen=True)
class _Pair:
    """A parameter of this rank (for a DTensor, its local tensor), and the dense model's full parameter and gradient."""

    name: str
    dense_name: str
    param: Tensor
    spec: P
    dense: Tensor
    dense_gradient: Tensor


@dataclass(frozen=True)
class _Problem:
    """A difference from the dense model, found on ``rank``. None: the difference concerns the norm, not a single rank."""

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
    raise TypeError(f"a step returned {type(returned).__name__}; return the model, or (model, gradient norm)")


def _pairs(model: nn.Module, dense: nn.Module, registry: ProcessGroupRegistry, names: Names | None) -> list[_Pair]:
    """Return every parameter of this rank with its counterpart in the dense model. Every rank must call it.

    Raise ValueError on every rank if a parameter of one model has no counterpart in the other model, a parameter is not
    declared, or ``names`` has a name that no rank's model has.
    """
    there = dict(dense.named_parameters())

    def pair(name: str, param: Tensor) -> _Pair:
        found = names(name) if callable(names) else (names or {}).get(name, name)
        dense_name, made = (found, None) if isinstance(found, str) else found
        if dense_name not in there:
            raise ValueError(
                f"the dense model has no parameter {dense_name!r}, the counterpart of {name}; give the name of the "
                f"counterpart with names={{{name!r}: ...}}, one of {', '.join(there)}"
            )
        counterpart = there[dense_name]
        gradient = torch.zeros_like(counterpart) if counterpart.grad is None else counterpart.grad
        tensors = [tensor.detach() if made is None else made(tensor.detach()) for tensor in (counterpart, gradient)]
        spec = spec_of(param, registry.topology)
        return _Pair(name, dense_name, local_parameter(param, registry.topology), spec, *tensors)

    def pairs() -> list[_Pair]:
        given = () if names is None or callable(names) else names
        if unknown := sorted({*given}.difference(*model_names)):
            raise ValueError(
                f"names= contains {', '.join(unknown)}, which no rank's model has; give only names of parameters of the "
                "parallel model"
            )
        return [pair(name, param) for name, param in model.named_parameters()]

    model_names = gather_objects([name for name, _ in model.named_parameters()], registry)
    found = on_all_ranks(pairs, registry)
    covered = set().union(*gather_objects({each.dense_name for each in found}, registry))
    if missing := [name for name in there if name not in covered]:
        raise ValueError(
            f"no rank has a counterpart of the dense model's {', '.join(missing)}; give each a parameter of the "
            "parallel model with names={parallel name: dense name}"
        )
    return found


def _wrong_norm(norm: float, dense_norm: float, model: nn.Module, allowed: _Allowed) -> list[_Problem]:
    dtype = next((param.dtype for param in model.parameters()), torch.float64)
    limit, error = allowed.of(dtype, abs(dense_norm)), abs(norm - dense_norm)
    if error <= limit or norm == dense_norm:  # the norms are equal, but the error is NaN, if both are infinite
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
        if not bool((error <= limit).all()):  # also true for NaN
            yield _Problem(kind, each.name, rank, _wrong(found, expected, region, limit), float(error.max()))


def _wrong(found: Tensor, expected: Tensor, region: Region, limit: float) -> str:
    error = (found - expected).abs()
    at = int(error.nan_to_num(nan=torch.inf).argmax())
    index = [int(number) for number in torch.unravel_index(torch.tensor(at), found.shape)] if found.dim() else []
    text = (
        f"off by {float(error.flatten()[at]):.2g} at {index} of the shard {region} (offset+length): "
        f"{float(found.flatten()[at]):.6g} instead of the dense model's {float(expected.flatten()[at]):.6g}, "
        f"allowed {limit:.2g}"
    )
    size = float((expected * expected).sum())
    factor = float((found * expected).sum()) / size if size else 0.0
    if not bool(found.any()):
        return f"{text}: it is zero"
    if bool(((found - factor * expected).abs() <= 10 * limit).all()):
        return f"{text}: it is {factor:.4f} times the dense one"
    return text


def _summarize(problems: Sequence[_Problem], step: str) -> str:
    by_tensor: dict[str, list[_Problem]] = {}
    for problem in problems:
        by_tensor.setdefault(problem.what, []).append(problem)
    number, lines = len(by_tensor), []
    # Gradients come first: a wrong gradient also makes the norm and the parameters wrong.
    for what, of_ranks in sorted(by_tensor.items(), key=lambda item: _ORDER.index(item[1][0].kind))[:MOST_LINES]:
        worst = max(of_ranks, key=lambda problem: problem.error)
        ranks = sorted({problem.rank for problem in of_ranks if problem.rank is not None})
        where = f", {named_ranks(ranks)}" if ranks else ""
        most = f"rank {worst.rank}: " if len(ranks) > 1 else ""
        lines.append(f"{what}{where}: {most}{worst.text}")
    if number > MOST_LINES:
        lines.append(f"and {number - MOST_LINES} more")
    return "\n".join([f"values of the parallel model that differ from the dense model{step}: {number}", *lines])


@contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    """Replace the model's gradients by clones inside the context, and restore the originals afterwards."""
    before = [(param, param.grad) for param in model.parameters()]
    for param, grad in before:
        param.grad = None if grad is None else grad.clone()
    try:
        yield
    finally:
        for param, grad in before:
            param.grad = grad
