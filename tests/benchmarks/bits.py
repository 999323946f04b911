"""Print hashes of runs in many configurations, to check that a change of the code leaves results bitwise identical.

    python tests/benchmarks/bits.py > before.txt
    (the change)
    python tests/benchmarks/bits.py > after.txt && diff before.txt after.txt

Each line is one configuration on data=2,tensor=2. It has three hashes over four ranks: the stats of seven steps, the
parameters, and the state_dict() of the optimizer; and the number of skipped steps, because the fifth step overflows.
Hashes also depend on the torch version, the kernels and the instruction set. ``MESHSTEP_KERNELS=torch`` selects torch's
kernels.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

import torch
from meshstep.amp import Bf16, Mode, Precision, precision_of
from meshstep.optim import (
    AdaGC,
    Adaptive,
    ByName,
    ByNorm,
    ByValue,
    HalfStates,
    Offloaded,
    ParallelOptimizer,
    PerParameter,
    Sharded,
    SkipSpikes,
    WarmUp,
    ZClip,
)
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from tqdm import tqdm
from world import World

STEPS, OVERFLOWS = 7, 4
LAYOUT = {
    "a": ((6, 4), P("tensor", None)),
    "b": ((5,), P()),
    "c": ((3, 8), P(None, "tensor")),
    "d": ((7,), P("tensor")),
}
Make = Callable[[list[nn.Parameter]], Any]


class Run(NamedTuple):
    """A configuration.

    ``make`` returns the torch optimizer, or a list of optimizers, for parameters. ``weight`` is that of each
    micro-batch. ``strided``: parameter "c" is not contiguous, and "d" has no gradient in the second step.
    """

    make: Make
    options: dict[str, Any]
    precision: Mode | Precision = "fp32"
    weight: float | None = None
    strided: bool = False


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def dampened(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9, dampening=0.5, fused=True)


OPTIMIZERS: dict[str, Make] = {
    "AdamW": adamw,
    "AdamW, a tensor's rate, amsgrad, maximize": lambda params: torch.optim.AdamW(
        params, lr=torch.tensor(1e-2), amsgrad=True, maximize=True, fused=True
    ),
    "AdamW, not fused": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "AdamW, two groups": lambda params: torch.optim.AdamW(
        [{"params": params[:2], "max_norm": 0.5}, {"params": params[2:], "lr": 3e-3}], lr=1e-2, fused=True
    ),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, fused=True),
    "SGD, dampened": dampened,
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, fused=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-2),
    "two optimizers": lambda params: [
        adamw(params[:2]),
        torch.optim.SGD(params[2:], lr=1e-2, momentum=0.9),
    ],
}
STATES: dict[str, dict[str, Any]] = {
    "whole": {},
    "ZeRO-1": {"states": Sharded("data")},
    "ZeRO-2": {"states": Sharded("data", gradients=True)},
    "ZeRO-1, offloaded": {"states": (Sharded("data"), Offloaded(0.5))},
}
MODES: tuple[Mode | Precision, ...] = ("bf16", "fp16", "fp16_naive", "fp16_apex", Bf16(split_masters=True))
RULES: dict[str, Any] = {
    "none": None,
    "L1": ByNorm(0.7, 1.0),
    "L3": ByNorm(0.7, 3.0),
    "L20": ByNorm(0.07, 20.0),
    "Linf": ByNorm(0.07, inf),
    "ByValue": ByValue(0.3),
    "PerParameter": PerParameter(0.2),
    "Adaptive": Adaptive(0.05),
    "ByName": ByName({"a*": 0.3}, others=1.0),
    "WarmUp": WarmUp(5.0, 0.5, steps=4),
    "ZClip": ZClip(),
    "AdaGC": AdaGC(),
    "SkipSpikes": SkipSpikes(1.5, inner=1.0),
}
MORE: dict[str, Run] = {
    "overlap": Run(adamw, {"max_norm": 0.7, "overlap": True}),
    "half states": Run(adamw, {"max_norm": 0.7, "states": HalfStates()}),
    "window of 3": Run(adamw, {"max_norm": 0.7, "accumulation_steps": 3}),
    "window of 3, bf16, weighted": Run(adamw, {"max_norm": 0.7, "accumulation_steps": 3}, "bf16", weight=2.5),
    "per group": Run(adamw, {"max_norm": 0.7, "reduction": "per_group"}),
    "per parameter": Run(adamw, {"max_norm": 0.7, "per_parameter_norms": True}),
    "commit": Run(adamw, {"max_norm": 0.7, "commit": lambda: True}),
    "strided, bf16": Run(adamw, {"max_norm": 0.7}, "bf16", strided=True),
}


def configurations() -> dict[str, Run]:
    found = {f"fp32, {name}": Run(make, {"max_norm": 0.7}) for name, make in OPTIMIZERS.items()}
    for name, states in STATES.items():
        options = {"max_norm": 0.7, **states}
        found |= {f"{mode}, {name}": Run(adamw, options, mode) for mode in MODES}
        found[f"fp32, {name}, SGD"] = Run(dampened, options)
        found[f"fp32, {name}, strided"] = Run(adamw, options, strided=True)
    for name, rule in RULES.items():
        found[f"clip {name}"] = Run(adamw, {"max_norm": rule})
        found[f"clip {name}, bf16, ZeRO-2"] = Run(adamw, {"max_norm": rule, **STATES["ZeRO-2"]}, "bf16")
        found[f"clip {name}, fp16, weighted"] = Run(adamw, {"max_norm": rule}, "fp16", weight=3.0)
    return found | MORE


def bits_of(name: str) -> tuple[str, str, str, int]:
    """Return hashes of stats, parameters and state_dict on this rank, and the number of skipped steps."""
    run = configurations()[name]
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        data, tensor = registry.rank("data"), registry.rank("tensor")

        def drawn(seed: int) -> Iterator[tuple[str, Tensor]]:
            generator = torch.Generator().manual_seed(seed)
            for key, (shape, spec) in LAYOUT.items():
                yield key, torch.randn(2, *shape, generator=generator)[tensor if spec != P() else 0]

        model = nn.ParameterDict(dict(drawn(5)))
        if run.strided:
            model["c"] = nn.Parameter(model["c"].detach().t().contiguous().t())
        precision_of(run.precision).prepare(model, registry)
        declare(model, {key: spec for key, (_, spec) in LAYOUT.items()})
        inner = run.make(list(model.parameters()))
        optimizer: Any = ParallelOptimizer(inner, registry, precision=run.precision, **run.options)
        reported: list[Any] = []
        for step in range(STEPS):
            optimizer.zero_grad()
            for micro in range(run.options.get("accumulation_steps") or 1):
                terms = [
                    (model[key].float() * factor).sum() * (inf if step == OVERFLOWS and key == "a" else 1.0)
                    for key, factor in drawn(1000 * step + 10 * micro + data + 100)
                    if not (run.strided and key == "d" and step == 1)
                ]
                optimizer.backward(torch.stack(terms).sum() * (0.3 + step % 3), weight=run.weight)
            reported.append(vars(optimizer.step()))
        skipped: int = optimizer.skipped_steps
        return hashed(reported), hashed(list(model.parameters())), hashed(optimizer.state_dict()), skipped


def hashed(value: object) -> str:
    """Return a hash of all tensors and numbers in a nested value."""
    digest = hashlib.sha256()
    for leaf in tree_leaves(value):
        if isinstance(leaf, (Tensor, int, float)):
            tensor = torch.as_tensor(leaf).detach().cpu()
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", metavar="TEXT", help="configurations with this in their names")
    options = parser.parse_args()
    world = World()
    for name in tqdm([name for name in configurations() if options.only in name]):
        by_rank = world.run(4, bits_of, name)
        *hashes, skipped = zip(*by_rank, strict=True)
        together = [hashlib.sha256("".join(of_ranks).encode()).hexdigest()[:12] for of_ranks in hashes]
        tqdm.write(f"{name}: {' '.join(together)}, {skipped[0]} skipped")
    world.close()


if __name__ == "__main__":
    main()
