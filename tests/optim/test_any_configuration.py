"""Any layout x precision x sharding x offload x accumulation x clipping, and whatever happens on the way: the numbers of a
float64 model that is stepped an element at a time (`dense_steps`), copies that are the same bits, and checkpoints that go
on exactly."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

import torch
from configurations import CASES, PRECISIONS, STEPS, Case, Setting
from configured_runs import Report, go_on, run
from dense_steps import DenseRun, elements
from properties import random_cases
from torch import Tensor
from world import World


@random_cases(CASES, 120)
def test_any_configuration(world: World, drawn: list[Case]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory, str(index)) for index in range(len(drawn))]
        calls = [(case.setting.at.topology.world_size, (case, path)) for case, path in zip(drawn, paths, strict=True)]
        first = world.run_each(run, calls)
        later = {index: case.resumed for index, case in enumerate(drawn) if case.resumed is not None}
        sizes = [(index, setting.at.topology.world_size) for index, setting in later.items()]
        resumed = world.run_each(go_on, [(size, (drawn[index], paths[index])) for index, size in sizes])
    second = dict(zip(later, resumed, strict=True))
    for index, case in enumerate(drawn):
        problems = problems_of(case, first[index], second.get(index))
        assert not problems, f"{problems} in {case}"


def problems_of(case: Case, first: Sequence[Report], second: Sequence[Report] | None) -> list[str]:
    """Args: second: Of the ranks that went on from a checkpoint."""
    dense = DenseRun(case)
    found = [problem for report in (*first, *(second or ())) for problem in report.problems]
    norms = [dense.step(number) for number in range(case.saved_at if second else STEPS)]
    went_on = second is not None and case.resumed == case.setting
    if not went_on:
        found += differences(dense, case, case.setting, first)
    if second is not None and case.resumed is not None:
        stepped = [
            (name, elements(case.resumed, name, at)[offset : offset + piece.numel()])
            for at, report in zip(case.resumed.at.coordinates(), second, strict=True)
            for name, offset, piece in report.pieces
        ]
        differed = dense.put_together(stepped)
        if case.kind == "AdamW" and differed != any(report.warned for report in second):
            found.append(
                f"pieces with different numbers of steps came together: {differed}, and a warning: {not differed}"
            )
        norms += [dense.step(number) for number in range(case.saved_at, STEPS)]
        found += differences(dense, case, case.resumed, second)
    if went_on and second is not None:
        found += [problem for pair in zip(first, second, strict=True) for problem in other_bits(*pair)]
    for report in (*first, *(second or ())):
        for number, norm in report.norms.items():
            if not (abs(norm / norms[number] - 1) < 1e-6 if isfinite(norms[number]) else not isfinite(norm)):
                found.append(f"step {number}: norm {norm} for {norms[number]}")
    return found


def differences(dense: DenseRun, case: Case, setting: Setting, reports: Sequence[Report]) -> list[str]:
    """Of what ranks hold and step, from the reference and from each other's copies."""
    found = []
    copies: dict[object, Tensor] = {}
    rounding = PRECISIONS[case.precision][2]
    for rank, (at, report) in enumerate(zip(setting.at.coordinates(), reports, strict=True)):
        mine = [(name, 0, param, rounding) for name, param in report.params.items()]
        for name, offset, value, rounded in mine + [(*piece, 0.0) for piece in report.pieces]:
            where = elements(setting, name, at)[offset : offset + value.numel()]
            wanted, largest = dense.params[name].value, dense.params[name].largest
            allowed = rounded * wanted[where].abs() + 3e-6 * largest
            error = (value.flatten().double() - wanted[where]).abs()
            if not (error <= allowed).all():
                found.append(f"{name} on rank {rank} is {float((error - allowed).max()):.1e} off")
            key = name, tuple(where.tolist()), value.dtype
            if not torch.equal(value.flatten(), copies.setdefault(key, value.flatten())):
                found.append(f"{name} on rank {rank} has other bits than a copy of it")
        missing = {name for name in case.names if setting.at.holds(name, at)} - report.params.keys()
        assert not missing
    return found


def other_bits(one: Report, other: Report) -> list[str]:
    """Where a run that went on from a checkpoint is not the one that did not stop."""
    same = all(torch.equal(param, other.params[name]) for name, param in one.params.items()) and all(
        torch.equal(mine, others) for (*_, mine), (*_, others) in zip(one.pieces, other.pieces, strict=True)
    )
    return [] if same else ["the run that went on from the checkpoint has other bits"]
