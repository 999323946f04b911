"""Several ranks over gloo that share one GPU train like ranks on the CPU."""

from __future__ import annotations

import torch
from graph_runs import PLACED, SETTINGS, Run, Setting
from meshstep.parallel import ProcessGroupRegistry, Topology
from on_gpu import ranks
from torch import Tensor

CASES = [(mode, placed) for placed in PLACED for mode in ("fp32", "bf16", "fp16_naive")]


def trained(device: torch.device, world_size: int) -> list[dict[str, Tensor]]:
    """Return the final weights, and the statistics of all steps, of each case on this rank."""
    left = []
    with ProcessGroupRegistry(Topology(data=world_size)) as registry:
        for mode, placed in CASES:
            options = {**PLACED[placed], "max_norm": 0.5}
            run = Run(Setting(SETTINGS[mode].precision, options, SETTINGS["momentum"].inner), device, registry)
            run.steps(range(3, 12))
            left.append({**run.model.state_dict(), "trace": torch.stack(run.trace)})
    return [{name: value.detach().cpu() for name, value in of_case.items()} for of_case in left]


def test_ranks_sharing_one_gpu_train_like_ranks_on_the_host(device: torch.device) -> None:
    first, second = ranks("gloo", 2, trained, device, 2)
    expected, _ = (first, second) if device.type == "cpu" else ranks("gloo", 2, trained, torch.device("cpu"), 2)
    for case, one, other, on_cpu in zip(CASES, first, second, expected, strict=True):
        half = case[0] != "fp32"
        for name, value in one.items():
            assert torch.equal(value, other[name]), (case, name)  # replicas are bitwise identical
            rtol, atol = (5e-2, 2e-2) if half else (1e-3, 1e-4)
            torch.testing.assert_close(value, on_cpu[name], rtol=rtol, atol=atol, msg=f"{case}, {name}")
