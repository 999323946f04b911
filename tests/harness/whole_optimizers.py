"""Third-party optimizers, and the difference between their results on sharded weights and in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from layouts import Axes, Split
from meshstep.optim import ParallelOptimizer
from meshstep.optim.whole import whole
from meshstep.parallel import ProcessGroupRegistry, Topology
from torch import Tensor, nn
from world import World

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
How = Literal["wrapped", "on pieces"]


def of(package: str, name: str, **options: Any) -> Make:
    """Return a constructor of the optimizer ``name`` of ``package``, which is imported when called."""

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        module = __import__(package, fromlist=[name])
        return getattr(module, name)(params, **{"lr": 0.01, **options})  # type: ignore[no-any-return]

    return make


def matrices(package: str, name: str, **options: Any) -> Make:
    """Return a constructor of a matrix optimizer with one group of matrices; vectors use its own AdamW."""

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups: Any = [
            {"params": [param for param in params if param.dim() > 1], "use_muon": True},
            {"params": [param for param in params if param.dim() < 2], "use_muon": False},
        ]
        module = __import__(package, fromlist=[name])
        return getattr(module, name)(groups, **{"lr": 0.01, **options})  # type: ignore[no-any-return]

    return make


MAKE: dict[str, Make] = {
    "torch Adafactor": of("torch.optim", "Adafactor"),
    "timm Lamb": of("timm.optim", "Lamb", max_grad_norm=None),
    "timm Lars": of("timm.optim", "Lars", lr=1.0, weight_decay=0.1),
    "timm LaProp": of("timm.optim", "LaProp"),
    "timm AdafactorBigVision": of("timm.optim", "AdafactorBigVision", min_dim_size_to_factor=2),
    "timm AdamP": of("timm.optim", "AdamP", delta=100.0, weight_decay=0.1),
    "timm NvNovoGrad": of("timm.optim", "NvNovoGrad"),
    "timm Adopt": of("timm.optim", "Adopt"),
    "timm Mars": of("timm.optim", "Mars"),
    "timm Muon": of("timm.optim", "Muon"),
    "AdaFactor": of("pytorch_optimizer", "AdaFactor"),
    "Adalite": of("pytorch_optimizer", "Adalite"),
    "AdaMuon": matrices("pytorch_optimizer", "AdaMuon"),
    "AdaNorm": of("pytorch_optimizer", "AdaNorm"),
    "Amos": of("pytorch_optimizer", "Amos"),
    "CAME": of("pytorch_optimizer", "CAME"),
    "Conda": of("pytorch_optimizer", "Conda"),
    "Fromage": of("pytorch_optimizer", "Fromage"),
    "Lamb": of("pytorch_optimizer", "Lamb"),
    "LARS": of("pytorch_optimizer", "LARS", lr=1.0, weight_decay=0.1),
    "Lion": of("pytorch_optimizer", "Lion"),
    "Muon": matrices("pytorch_optimizer", "Muon"),
    "Nero": of("pytorch_optimizer", "Nero"),
    "NovoGrad": of("pytorch_optimizer", "NovoGrad"),
    "RACS": of("pytorch_optimizer", "RACS"),
    "ScalableShampoo": of(
        "pytorch_optimizer", "ScalableShampoo", start_preconditioning_step=2, preconditioning_compute_steps=1
    ),
    "SCION": of("pytorch_optimizer", "SCION"),
    "Shampoo": of("pytorch_optimizer", "Shampoo"),
    "SM3": of("pytorch_optimizer", "SM3"),
    "SOAP": of("pytorch_optimizer", "SOAP", precondition_frequency=2),
    "StableAdamW": of("pytorch_optimizer", "StableAdamW"),
    "Tiger": of("pytorch_optimizer", "Tiger"),
}
RIGHT_ON_PIECES = ("timm LaProp", "timm Adopt", "Lion", "Tiger")
# The tests do not reach the code of these optimizers that depends on norms: norms and matrices are too small.
NOT_REACHED = (
    "timm Mars",
    "AdaNorm",
    "ScalableShampoo",
)


def trained(axes: Axes, kind: str, how: How | None) -> dict[str, Tensor]:
    """Return the full parameters after five steps. ``how`` "wrapped": `whole` gathers full tensors. "on pieces": the
    optimizer is declared elementwise. None: it is used unchanged."""
    with ProcessGroupRegistry(Topology(roles=None, **dict(axes))) as registry:
        model = Split(axes, registry)
        inner = MAKE[kind](list(model.parameters()))
        if how == "wrapped":
            inner = whole(inner)
        elif how == "on pieces":
            inner.elementwise = True  # type: ignore[attr-defined]
        optimizer = ParallelOptimizer(inner, registry, max_norm=0.5)
        for step in range(5):
            optimizer.zero_grad()
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            optimizer.backward(model(x).square().mean())
            optimizer.step()
        return {name: model.full(name).detach() for name in model.specs}


def apart(world: World, kind: str, how: How) -> float:
    """Return the relative difference between a run on shards and a run of the unmodified optimizer in one process."""
    (dense,), split = world.run(1, trained, (), kind, None), world.run(2, trained, (("tensor", 2),), kind, how)[0]
    return max(float((split[name] - dense[name]).abs().max() / dense[name].abs().max()) for name in dense)
