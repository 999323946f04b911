"""The update of a parameter does not depend on the dtypes of the other parameters of its rank.

Replicas lie on ranks whose other parameters differ, for example on pipeline stages, so they would diverge otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from loops import using
from meshstep.optim import ParallelOptimizer
from meshstep.optim.kernels.choice import Kernels
from meshstep.optim.step import torch_engine
from meshstep.parallel import ProcessGroupRegistry, Topology
from torch import Tensor, nn

MAKE: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.0113, weight_decay=0.1, fused=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.0113, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.0113, weight_decay=0.1, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.0113, momentum=0.9, fused=True),
    "dampening": lambda params: torch.optim.SGD(params, lr=0.0113, momentum=0.9, dampening=0.3, fused=True),
}
OTHERS = (None, torch.bfloat16, torch.float16, torch.float64)


def stepped(name: str, other: torch.dtype | None) -> Tensor:
    """Return a float32 weight after five clipped steps beside a weight of dtype ``other``, or alone (None)."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(1003, generator=generator))
    beside = [] if other is None else [nn.Parameter(torch.ones(17, dtype=other))]
    optimizer = ParallelOptimizer(MAKE[name]([weight, *beside]), ProcessGroupRegistry(Topology()), max_norm=3.0)
    for _ in range(5):
        weight.grad = torch.randn(1003, generator=generator)
        for param in beside:
            param.grad = torch.zeros_like(param)  # adds nothing to the norm
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("loses_updates", [True, False], ids=["torch loses updates", "torch is right"])
def test_parameters_of_other_dtypes_do_not_change_the_update_of_a_parameter(
    loses_updates: bool, name: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The updates are bitwise equal, even if torch's fused SGD loses updates of half-precision parameters on a CPU
    (pytorch issue 191763)."""
    if loses_updates:
        monkeypatch.setattr(torch_engine, "_fused_sgd_is_wrong", lambda: True)
    with using(kernels):
        alone = stepped(name, None)
        for other in OTHERS[1:]:
            assert torch.equal(stepped(name, other), alone), other
