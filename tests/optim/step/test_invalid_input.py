"""Invalid input, which must raise a clear error and cause no hang."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from arguments import arguments
from meshstep.optim import (
    ParallelOptimizer,
    PerParameter,
    clip_grad_norm_,
    clip_grad_value_,
    global_norm,
    sync_gradients,
)
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from torch import Tensor, nn
from world import World


def parameter(spec: P | None, *shape: int, name: str = "weight", dtype: torch.dtype = torch.float32) -> nn.Parameter:
    param = nn.Parameter(torch.ones(shape, dtype=dtype))
    if spec is not None:
        annotate(param, spec, name)
    return param


def named_on_device(device: str) -> nn.Parameter:
    param = nn.Parameter(torch.ones(4, device=device))
    annotate(param, P(), "weight")
    return param


def on_last(usual: P, other: P | None) -> P | None:
    return other if dist.get_rank() == dist.get_world_size() - 1 else usual


def wrap(*params: nn.Parameter, **options: Any) -> Callable[[ProcessGroupRegistry], object]:
    return lambda registry: ParallelOptimizer(torch.optim.SGD(params, lr=1.0), registry, **arguments(**options))


# Each entry creates parameters on its rank and returns a call that must raise.
MISTAKES: dict[str, tuple[Callable[[], Callable[[ProcessGroupRegistry], object]], str]] = {
    "undeclared": (lambda: wrap(parameter(None, 4)), r"no spec for parameter 0 of group 0 \(shape \(4,?\)\).*declare"),
    "a foreign parameter": (
        lambda: wrap(parameter(P("tensor"), 4), parameter(P(), 4, name="bias"), parameter(None, 2, 2)),
        r"no spec for parameter 2 of group 0 \(shape \(2, 2\)\)",
    ),
    "undeclared on one rank": (lambda: wrap(parameter(on_last(P(), None), 4)), "no spec for parameter 0 of group 0"),
    "unknown axis": (
        lambda: wrap(parameter(P("rows"), 4)),
        "weight: .*names axis 'rows', but the axes are data, tensor",
    ),
    "another spec on one rank": (
        lambda: wrap(parameter(on_last(P("tensor"), P()), 4)),
        r"ranks 0 and 3 .* weight: rank 0 has \[weight: P\('tensor'\).*rank 3 has \[weight: P\(\)",
    ),
    "another shape on one rank": (
        lambda: wrap(parameter(P(), 4 + dist.get_rank() % 2)),
        r"rank 0 has \[weight: P\(\), shape \(4\).*rank 1 has \[weight: P\(\), shape \(5\).*; "
        "give weight the same spec, shape and dtype on both ranks",
    ),
    "another order on one rank": (
        lambda: wrap(*[parameter(P(), 4, name=n) for n in ("ab" if dist.get_rank() else "ba")]),
        r"first in b: rank 0 has \[b: .* rank 1 has \[a: ",
    ),
    "one parameter more on one rank": (
        lambda: wrap(*[parameter(P(), 4, name=n) for n in "abc"[: 2 + dist.get_rank() // 3]]),
        r"hold different parameters, first in c: rank 0 has \[no such parameter\], rank 3 has \[c: .*; declare the same "
        "parameters in the same order .* If the ranks are pipeline stages, give their mesh axis the role 'pipe'",
    ),
    "one parameter fewer on one rank": (
        lambda: wrap(*[parameter(P(), 4, name=n) for n in "abc"[: 3 - dist.get_rank() // 3]]),
        r"first in c: rank 0 has \[c: .* rank 3 has \[no such parameter\]",
    ),
    "held by a rank that does not own it": (
        lambda: wrap(parameter(P(owned={"tensor": 0}), 4)),
        r"weight: rank . at .* has this parameter, but P\(owned=.* places it on other ranks",
    ),
    "max_norm 0": (lambda: wrap(parameter(P(), 4), max_norm=0.0), "max_norm=0.0: give a finite number > 0"),
    "max_norm negative": (lambda: wrap(parameter(P(), 4), max_norm=-1.0), "max_norm=-1.0"),
    "max_norm NaN on one rank": (
        lambda: wrap(parameter(P(), 4), max_norm=float("nan") if dist.get_rank() == 1 else 1.0),
        "max_norm=nan: give a finite number > 0",
    ),
    "max_norm infinite": (lambda: wrap(parameter(P(), 4), max_norm=float("inf")), "max_norm=inf"),
    "max_norm of a group": (
        lambda: (
            lambda registry: ParallelOptimizer(
                torch.optim.SGD([{"params": [parameter(P(), 4)], "max_norm": -2}], lr=1.0), registry
            )
        ),
        r"max_norm of param group 0=-2\.0",
    ),
    "clip_value": (lambda: wrap(parameter(P(), 4), clip_value=-0.5), "clip_value=-0.5"),
    "two kinds of clipping": (
        lambda: (
            lambda registry: ParallelOptimizer(
                torch.optim.SGD([{"params": [parameter(P(), 4)], "max_norm": 2.0}], lr=1.0),
                registry,
                max_norm=PerParameter(1.0),
            )
        ),
        "give only one of them",
    ),
    "norm_type": (lambda: wrap(parameter(P(), 4), norm_type=0.5), "norm_type=0.5: give a number >= 1"),
    "on_nonfinite": (lambda: wrap(parameter(P(), 4), on_nonfinite="ignore"), "on_nonfinite='ignore'"),
    "reduction": (lambda: wrap(parameter(P(), 4), reduction="all"), "reduction='all'"),
    "complex parameter": (
        lambda: wrap(parameter(P(), 4, dtype=torch.complex64)),
        "weight is complex .*torch.view_as_complex in forward",
    ),
    "meta device": (
        lambda: wrap(parameter(P(), 4), nn.Parameter(torch.ones(4, device="meta"))),
        "parameter 1 of group 0 is on the meta device",
    ),
    "meta device on one rank": (
        lambda: wrap(named_on_device("meta" if dist.get_rank() == 3 else "cpu")),
        r"(^|: )weight is on the meta device and has no elements; call model.to_empty\(device=",
    ),
    "wrapped twice": (
        lambda: (
            lambda registry: ParallelOptimizer(
                ParallelOptimizer(torch.optim.SGD([parameter(P(), 4)]), registry), registry
            )
        ),
        "already",
    ),
}


def mistake(name: str) -> str:
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        attempt = MISTAKES[name][0]()
        try:
            attempt(registry)
        except (ValueError, TypeError) as error:
            dist.barrier()  # hangs if a rank is still in another collective
            return str(error)
        return "no error"


@pytest.mark.parametrize("name", MISTAKES)
def test_invalid_optimizer_construction_raises_on_every_rank(world: World, name: str) -> None:
    messages = world.run(4, mistake, name)
    for message in messages:
        assert re.search(MISTAKES[name][1], message), message


def sparse_gradient(step_of_mistake: int) -> tuple[list[str], bool]:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        weight, other = parameter(P("tensor"), 4), parameter(P(), 3, name="other")
        optimizer = ParallelOptimizer(torch.optim.SGD([weight, other], lr=1.0, fused=True), registry)
        found, unchanged = [], True
        for step in range(3):
            weight.grad, other.grad = torch.ones(4), torch.ones(3)
            if step == step_of_mistake and dist.get_rank() == 1:
                weight.grad = torch.ones(4).to_sparse()
            before = [weight.detach().clone(), other.detach().clone()]
            try:
                stats = optimizer.step()
                assert stats is not None
                found.append(f"stepped, found_inf={float(stats.found_inf):.0f}")
            except TypeError as error:
                found.append(str(error))
            if step == step_of_mistake:
                unchanged = torch.equal(before[0], weight) and torch.equal(before[1], other)
        return found, unchanged


def test_sparse_gradient_in_first_step_raises_on_every_rank(world: World) -> None:
    for found, unchanged in world.run(2, sparse_gradient, 0):
        assert "the gradient of weight is sparse" in found[0]
        assert unchanged
        assert found[1:] == ["stepped, found_inf=0"] * 2


def test_sparse_gradient_in_later_step_raises_on_its_rank_and_skips_step_elsewhere(world: World) -> None:
    (first, unchanged), (second, also_unchanged) = world.run(2, sparse_gradient, 1)
    assert unchanged
    assert also_unchanged
    assert first == ["stepped, found_inf=0", "stepped, found_inf=1", "stepped, found_inf=0"]
    assert "the gradient of weight is sparse" in second[1]


def standalone(name: str) -> tuple[str, bool]:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        partial, plain = parameter(P(partial="tensor"), 4), parameter(on_last(P("tensor"), None), 4)
        for param in (partial, plain):
            param.grad = torch.full_like(param, 10.0)

        def sum_twice() -> None:
            sync_gradients([partial], registry)
            sync_gradients([partial], registry)

        calls: dict[str, Callable[[], object]] = {
            "partial": lambda: clip_grad_norm_([partial], 1.0, registry),
            "partial by value": lambda: clip_grad_value_([partial], 1.0, registry),
            "undeclared on one rank": lambda: global_norm([plain], registry),
            "summed twice": sum_twice,
            "max_norm": lambda: clip_grad_norm_([partial], -1.0, registry),
            "clip_value": lambda: clip_grad_value_([partial], 0.0, registry),
            "norm_type": lambda: global_norm([plain], registry, 0.0),
        }
        try:
            calls[name]()
        except (ValueError, TypeError) as error:
            dist.barrier()
            return str(error), all(bool((p.grad == 10).all()) for p in (partial, plain) if p.grad is not None)
        return "no error", False


@pytest.mark.parametrize(
    ("name", "message", "unchanged"),
    [
        (
            "partial",
            "the gradient of weight (P(partial='tensor')) is partial: it must still be summed over tensor",
            True,
        ),
        ("partial by value", "is partial: it must still be summed over tensor", True),
        ("undeclared on one rank", "no spec for parameter 0 of group 0", True),
        ("summed twice", "is already summed", False),
        ("max_norm", "max_norm=-1.0", True),
        ("clip_value", "clip_value=0.0", True),
        ("norm_type", "norm_type=0.0", True),
    ],
)
def test_standalone_clip_and_norm_functions_reject_invalid_input(
    world: World, name: str, message: str, unchanged: bool
) -> None:
    for found, same in world.run(2, standalone, name):
        assert message in found
        assert same == unchanged


def failed_group() -> tuple[str, int, bool]:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        first = parameter(P(), 4, name="first")
        optimizer = ParallelOptimizer(torch.optim.SGD([first], lr=0.5, fused=True), registry)
        try:
            optimizer.add_param_group({"params": [parameter(on_last(P(), None), 2)]})
        except ValueError as error:
            message = str(error)
        first.grad = torch.ones(4)
        optimizer.step()
        return message, len(optimizer.param_groups), bool((first == 0.5).all())


def test_invalid_param_group_is_not_added(world: World) -> None:
    for message, groups, stepped in world.run(2, failed_group):
        assert "no spec for" in message
        assert groups == 1
        assert stepped


def test_step_rejects_closure() -> None:
    optimizer = ParallelOptimizer(torch.optim.SGD([parameter(P(), 4)]), ProcessGroupRegistry(Topology()))
    with pytest.raises(ValueError, match="takes no closure"):
        optimizer.step(lambda: Tensor())
