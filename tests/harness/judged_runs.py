"""Compare the reports of the ranks of a drawn configuration with the dense reference."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
from configurations import STEPS, Case, Setting
from configured_runs import Report
from dense_steps import DenseRun, elements
from torch import Tensor


def problems_of(case: Case, first: Sequence[Report], second: Sequence[Report] | None) -> list[str]:
    """Return the problems that ranks reported, and the differences from the dense run, between replicas and after
    resuming.

    ``first`` are the reports of the first run, ``second`` those of the ranks that resumed. None: no rank did.
    """
    dense = DenseRun(case)
    found = [problem for report in (*first, *(second or ())) for problem in report.problems]
    norms = [dense.step(number) for number in range(case.saved_at if second else STEPS)]
    skipped = dense.skipped
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
                f"shards with different numbers of steps were merged: {differed}, but a warning was given: {not differed}"
            )
        norms += [dense.step(number) for number in range(case.saved_at, STEPS)]
        found += differences(dense, case, case.resumed, second)
    if went_on and second is not None:
        found += [problem for pair in zip(first, second, strict=True) for problem in other_bits(*pair)]
    for report in second or ():
        if report.skipped != dense.skipped:
            found.append(f"{report.skipped} steps were skipped, expected {dense.skipped}")
    for report in first:
        expected = dense.skipped if went_on else skipped
        if report.skipped != expected:
            found.append(f"{report.skipped} steps were skipped, expected {expected}")
    for report in (*first, *(second or ())):
        for number, norm in report.norms.items():
            # The rounding error of a sum is relative to the sum's largest term, even if this term cancels.
            rounding, absolute = case.mode.norm_rounding, dense.absolute_norms[number]
            allowed = rounding * absolute if rounding > 1e-6 else max(rounding * norms[number], 2**-22 * absolute)
            if not (abs(norm - norms[number]) < allowed if isfinite(norms[number]) else not isfinite(norm)):
                found.append(f"step {number}: norm {norm}, expected {norms[number]}")
    return found


def differences(dense: DenseRun, case: Case, setting: Setting, reports: Sequence[Report]) -> list[str]:
    """Return the differences of parameters and updated shards from the reference and between replicas, and the elements
    that are offloaded on some replicas only."""
    found = []
    copies: dict[object, Tensor] = {}
    rounding, rounding_per_step = case.mode.rounding, case.mode.rounding_per_step
    for rank, (at, report) in enumerate(zip(setting.at.coordinates(), reports, strict=True)):
        mine = [(name, 0, param, rounding) for name, param in report.params.items()]
        # A frozen weight may have no master weight; its bound then includes the rounding of the weight's dtype.
        pieces = [(*piece, rounding if piece[2].dtype == case.mode.dtype else 0.0) for piece in report.pieces]
        for name, offset, value, rounded in mine + pieces:
            where = elements(setting, name, at)[offset : offset + value.numel()]
            wanted, largest = dense.params[name].value, dense.params[name].largest
            allowed = rounded * wanted[where].abs() + (3e-6 + STEPS * rounding_per_step) * largest
            allowed = allowed + dense.params[name].remainders[where]
            error = (value.flatten().double() - wanted[where]).abs()
            if not (error <= allowed).all():
                found.append(
                    f"{name} on rank {rank}: the error exceeds its bound by {float((error - allowed).max()):.1e}"
                )
            key = name, tuple(where.tolist()), value.dtype
            if not torch.equal(value.flatten(), copies.setdefault(key, value.flatten())):
                found.append(f"{name} on rank {rank} differs bitwise from a replica")
        last = max(report.norms)
        missing = {name for name in case.names if case.has(name, last) and setting.at.holds(name, at)}
        assert report.params.keys() == missing
    return found + replicas_offloaded_on_some_ranks(setting, reports)


def replicas_offloaded_on_some_ranks(setting: Setting, reports: Sequence[Report]) -> list[str]:
    """Return the elements of which one replica is stepped as an offloaded copy and another one is not.

    On a CPU both replicas are bitwise identical; on a GPU they may differ.
    """
    found = []
    first: dict[tuple[str, int], tuple[int, bool]] = {}
    for rank, (at, report) in enumerate(zip(setting.at.coordinates(), reports, strict=True)):
        for (name, offset, value), offloaded in zip(report.pieces, report.offloaded, strict=True):
            for element in elements(setting, name, at)[offset : offset + value.numel()].tolist():
                other, there = first.setdefault((name, element), (rank, offloaded))
                if offloaded != there:
                    found.append(
                        f"element {element} of {name} is offloaded on one of the ranks {other} and {rank} only"
                    )
    return found


def other_bits(one: Report, other: Report) -> list[str]:
    """Return differences between a run resumed from a checkpoint and the uninterrupted run."""
    same = all(torch.equal(param, other.params[name]) for name, param in one.params.items()) and all(
        torch.equal(mine, others) for (*_, mine), (*_, others) in zip(one.pieces, other.pieces, strict=True)
    )
    return [] if same else ["the run resumed from the checkpoint differs bitwise"]
