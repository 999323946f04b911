"""Cases of stochastic rounding, for the tests of each kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from meshstep.amp import Bf16
from meshstep.optim import HalfStates, ParallelOptimizer
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from torch import Tensor, nn

BF16, F32 = torch.bfloat16, torch.float32


def values(shape: Sequence[int], seed: int) -> Tensor:
    """Return values of many magnitudes, with infinities, zeros, denormals, values near the largest, and NaNs."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, tuple(shape), generator=generator).to(torch.int32)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 3.4028e38, 1e-45])
    special = torch.cat([special, torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(F32)])
    chosen = special[torch.randint(len(special), tuple(shape), generator=generator)]
    return torch.where(torch.rand(tuple(shape), generator=generator) < 0.1, chosen, bits.view(F32))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16)


def stepped_on_ranks(states_only: bool) -> dict[str, list[list[float]]]:
    """Return the bfloat16 tensors (weight and states) of two parameters after three steps on data=2,tensor=2.

    The parameter "whole" is replicated, and "sharded" is sharded over ``tensor``. With ``states_only``, the weights are
    float32, and `HalfStates` rounds the states.
    """
    topology = Topology(data=2, tensor=2)
    with ProcessGroupRegistry(topology) as registry:
        dtype = F32 if states_only else BF16
        params = {name: nn.Parameter(torch.ones(50, dtype=dtype)) for name in ("whole", "sharded")}
        for name, spec in (("whole", P()), ("sharded", P("tensor"))):
            annotate(params[name], spec, name)
        adamw = torch.optim.AdamW(params.items(), lr=1e-3, fused=True)
        options: dict[str, Any] = {"states": HalfStates()} if states_only else {}
        precision: Any = "fp32" if states_only else Bf16(stochastic_rounding=True)
        optimizer = ParallelOptimizer(adamw, registry, precision=precision, check_replicas=False, **options)
        for step in range(3):
            with optimizer.window():
                for param in params.values():
                    param.grad = torch.full_like(param, 0.3 + step)
            optimizer.step()
        found = {}
        for name, param in params.items():
            tensors = [param, *(value for _, value in sorted(optimizer.state[param].items()))]
            found[name] = [tensor.tolist() for tensor in tensors if tensor.dtype == BF16]
        return found


def assert_replicas_equal_and_shards_different(ranks: Sequence[dict[str, list[list[float]]]]) -> None:
    """Check the results of `stepped_on_ranks` on 4 ranks, where rank = 2 data + tensor."""
    assert all(len({*tensor}) > 1 for tensor in ranks[0]["whole"])
    assert all(rank["whole"] == ranks[0]["whole"] for rank in ranks)
    assert ranks[0] == ranks[2]
    assert ranks[1] == ranks[3]
    for one, other in zip(ranks[0]["sharded"], ranks[1]["sharded"], strict=True):
        assert one != other
