"""`main_grads=False`: gradients stay in half precision until the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import using
from meshstep.amp import Bf16, NaiveFp16
from meshstep.amp.modes import Precision
from meshstep.optim import ByGroup, ByNorm, ByValue, Offloaded, ParallelOptimizer, PerParameter, Sharded
from meshstep.optim.kernels.choice import Kernels
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import Tensor, nn
from world import World

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "AdamW, not fused": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "SGD, dampening": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.3, fused=True),
}


class Model(nn.Module):
    """A sharded weight, a replicated weight and a float32 weight."""

    def __init__(self, registry: ProcessGroupRegistry, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        rows = 8 // registry.size("tensor")
        first = rows * registry.coordinate["tensor"]
        self.split = nn.Parameter(torch.randn(8, 6)[first : first + rows].to(dtype))
        self.copied = nn.Parameter(torch.randn(6).to(dtype))
        self.plain = nn.Parameter(torch.randn(5))
        declare(self, {"split": P("tensor"), "copied": P(), "plain": P()})

    def loss(self, step: int, coordinate: int) -> Tensor:
        scale = 1.0 + 0.7 * step + 0.3 * coordinate
        split = (self.split * (self.split.detach() * scale).sin()).float().sum()
        return split + (self.copied.float() * scale).square().sum() + (self.plain * scale).sin().sum()


def trained(
    topology: Topology, mode: Precision, kind: str, options: dict[str, Any], kernels: Kernels, explicit: bool
) -> tuple[list[Tensor], set[torch.dtype]]:
    """Return weights and states after three steps, and the dtypes of the gradients after backward."""
    with ProcessGroupRegistry(topology) as registry, using(kernels):
        model = Model(registry, torch.bfloat16 if isinstance(mode, Bf16) else torch.float16)
        optimizer = ParallelOptimizer(OPTIMIZERS[kind](model.parameters()), registry, precision=mode, **options)
        seen = set[torch.dtype]()
        for step in range(3):
            optimizer.backward(model.loss(step, registry.coordinate["data"]))
            seen |= {param.grad.dtype for param in model.parameters() if param.grad is not None}
            if explicit:
                optimizer.clip_grad_by_norm(0.5)
            optimizer.step()
            optimizer.zero_grad()
        states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        held = [param.detach() for group in optimizer.param_groups for param in group["params"]]
        return [*(param.detach().float() for param in model.parameters()), *held, *states], seen


CASES: list[tuple[str, dict[str, Any], Kernels, bool]] = [
    ("AdamW", {"max_norm": 0.5}, "auto", False),
    ("AdamW", {"max_norm": 0.5}, "torch", False),
    ("AdamW", {"max_norm": PerParameter(0.3)}, "auto", False),
    ("AdamW", {"max_norm": ByValue(0.3)}, "torch", False),
    ("AdamW", {"max_norm": ByNorm(0.5, 3.0)}, "auto", True),
    ("AdamW, not fused", {"max_norm": ByGroup((0.5,))}, "auto", False),
    ("SGD, dampening", {}, "auto", False),
]


@pytest.mark.long
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (3, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("mode", [Bf16, NaiveFp16])
def test_step_with_main_grads_false_is_bitwise_identical_to_main_grads_true(
    world: World, sizes: tuple[int, int], mode: type[Bf16] | type[NaiveFp16]
) -> None:
    topology = Topology(data=sizes[0], tensor=sizes[1])
    settings: dict[str, Any] = {} if mode is Bf16 else {"init_scale": 16.0}
    half = torch.bfloat16 if mode is Bf16 else torch.float16
    for case in CASES:
        kept, wide = (
            world.run(topology.world_size, trained, topology, mode(main_grads=main, **settings), *case)
            for main in (False, True)
        )
        for (values, dtypes), (expected, before) in zip(kept, wide, strict=True):
            assert (dtypes, before) == ({half, torch.float32}, {torch.float32}), case
            assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True)), case


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"accumulation_steps": 2}, "accumulation_steps=2"),
        ({"states": Sharded("data")}, "states=Sharded"),
        ({"states": Offloaded(1.0)}, "states=Offloaded"),
        ({"overlap": True}, "overlap=True"),
    ],
)
def test_main_grads_false_rejects_accumulation_overlap_and_sharded_or_offloaded_states(
    options: dict[str, Any], said: str
) -> None:
    with ProcessGroupRegistry(Topology(data=1, tensor=1)) as registry:
        params = Model(registry, torch.bfloat16).parameters()
        with pytest.raises(ValueError, match=f"main_grads=False.*{said}.* needs .*: leave main_grads=False out"):
            ParallelOptimizer(
                torch.optim.AdamW(params, fused=True), registry, precision=Bf16(main_grads=False), **options
            )
