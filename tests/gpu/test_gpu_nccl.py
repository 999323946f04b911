"""Training in a world of one rank over NCCL (gloo on the CPU) equals training without a process group bitwise."""

from __future__ import annotations

import torch
from graph_runs import PLACED, SETTINGS, Run, Setting, by_steps
from meshstep.parallel import ProcessGroupRegistry, Topology
from on_gpu import ranks
from precision_modes import differences
from torch import Tensor

CASES = [(mode, placed) for placed in PLACED for mode in ("fp32", "bf16", "fp16_naive")]


def trained(device: torch.device, topology: Topology) -> list[dict[str, Tensor]]:
    """Return the results of `by_steps` for each case."""
    with ProcessGroupRegistry(topology) as registry:
        assert registry.device.type == (device.type if topology.axes else "cpu")
        found = []
        for mode, placed in CASES:
            options = {**(PLACED[placed] if topology.axes else {}), "max_norm": 0.5}
            found.append(by_steps(Run(Setting(SETTINGS[mode].precision, options), device, registry)))
        return found


def test_training_in_world_of_one_rank_is_bitwise_identical_to_no_process_group(device: torch.device) -> None:
    expected = trained(device, Topology())
    (found,) = ranks("nccl" if device.type == "cuda" else "gloo", 1, trained, device, Topology(data=1))
    for case, one, other in zip(CASES, expected, found, strict=True):
        assert differences(one, other) == [], case
