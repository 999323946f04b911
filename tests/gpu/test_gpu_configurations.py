"""Random configurations of several ranks over gloo that share one GPU match the dense model in float64.

`configurations` draws layout, memory format, precision, state placement, accumulation, clipping and events.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from on_gpu import ranks

pytest.importorskip("hypothesis", reason="hypothesis draws the configurations", exc_type=ImportError)

from configurations import Case, case_of
from configured_runs import Report, go_on, run
from judged_runs import problems_of

FIRST = 1000  # number of the first drawn configuration
# Configurations that once failed, and only on a GPU: fused kernels got parameters with gaps in memory, Offloaded chose
# other parameters on another replica, and empty weights stayed on the GPU.
FOUND = {2: [1007], 4: [1001, 2053, 2094]}


def size(case: Case) -> int:
    return case.setting.at.topology.world_size


def fits(case: Case, world_size: int) -> bool:
    """Return whether the case runs on this number of ranks, also after its checkpoint.

    A case with DTensors does not fit, because their gloo meshes are on the CPU. A case that adds a param group does not fit
    if some rank has no parameters before, because this rank rejects the group.
    """
    settings = [setting for setting in (case.setting, case.resumed) if setting is not None]
    first = [name for name in case.names if case.has(name, 0)]
    return all(
        setting.at.topology.world_size == world_size
        and not setting.at.meshes
        and (
            case.added is None
            or all(any(setting.at.holds(name, at) for name in first) for at in setting.at.coordinates())
        )
        for setting in settings
    )


def run_and_go_on(numbers: list[int], folder: str, device: str) -> list[list[dict[str, Any] | None]]:
    """Run the drawn cases on this rank, and return per case the reports before and after its checkpoint."""
    found = []
    for number in numbers:
        case, path = case_of(number), Path(folder, str(number))
        try:
            first = asdict(run(case, path, device))
            found.append([first, None if case.resumed is None else asdict(go_on(case, path, device))])
        except Exception as error:
            raise RuntimeError(f"configuration {number} failed: {case}") from error
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_random_configurations_on_device_match_dense_model(
    device: torch.device, world_size: int, tmp_path: Path
) -> None:
    wanted = 10 if device.type == "cuda" else 1  # tests/optim/test_any_configuration.py runs others on the CPU
    numbers = list(islice((number for number in count(FIRST) if fits(case_of(number), world_size)), wanted))
    numbers = list(dict.fromkeys(numbers + (FOUND.get(world_size, []) if device.type == "cuda" else [])))
    by_rank = ranks("gloo", world_size, run_and_go_on, numbers, str(tmp_path), device.type)
    problems = {}
    for number, reports in zip(numbers, zip(*by_rank, strict=True), strict=True):
        first, second = ([report and Report(**report) for report in part] for part in zip(*reports, strict=True))
        found = problems_of(case_of(number), first, second if second[0] else None)
        if found:
            problems[number] = found
    assert not problems
