"""Random configurations: layout, memory format, precision, sharding, offload, accumulation, clipping, and events such as
an overflow or an added param group.

Weights and norms must equal, up to rounding, those of a float64 model that is stepped per element (`dense_steps`).
Replicas must be bitwise identical. A run resumes from a checkpoint with the same or with another setting. With the same
setting, it must be bitwise identical to the uninterrupted run; with another setting, it must equal the float64 model.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from configurations import (
    CASES,
    MEMORY_FORMATS,
    PRECISIONS,
    SMALL,
    WAYS_OF_WRITING,
    Case,
    Setting,
    case_of,
    is_idle,
    memory_format,
    weight,
)
from configured_runs import go_on, run
from judged_runs import problems_of
from properties import random_cases
from world import World


@random_cases(CASES, 120)
def test_random_configurations_match_dense_model_and_resume(world: World, drawn: list[Case]) -> None:
    for case, problems in zip(drawn, problems_of_each(world, drawn), strict=True):
        assert not problems, f"{problems} in {case}"


def problems_of_each(world: World, drawn: Sequence[Case]) -> list[list[str]]:
    """Run all cases. Return, per case, the differences from the dense run and between the first and the resumed run."""
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory, str(index)) for index in range(len(drawn))]
        calls = [(case.setting.at.topology.world_size, (case, path)) for case, path in zip(drawn, paths, strict=True)]
        first = world.run_each(run, calls)
        later = {index: case.resumed for index, case in enumerate(drawn) if case.resumed is not None}
        sizes = [(index, setting.at.topology.world_size) for index, setting in later.items()]
        resumed = world.run_each(go_on, [(size, (drawn[index], paths[index])) for index, size in sizes])
    second = dict(zip(later, resumed, strict=True))
    return [problems_of(case, first[index], second.get(index)) for index, case in enumerate(drawn)]


# Coverage of the drawn configurations ---------------------------------------------------------------------------------

EVENTS = ("overflow", "vetoed", "added", "frozen", "written")
STATES = ("whole", "overlap", "zero1", "zero2")
FEATURES = (
    *(f"memory format {how}" for how in MEMORY_FORMATS),
    "other memory formats after a checkpoint",
    *(f"written: {how}" for how in WAYS_OF_WRITING),
    *(f"{precision}: a rank steps nothing" for precision in PRECISIONS),
    *(f"{how}: a rank steps nothing" for how in ("fused", "foreach", "for-loop")),
    "sharded states: fewer elements than ranks",
    *(f"{kind}: a loss is None" for kind in ("means", "weights")),
    "a rank without a loss beside one with a loss of the same micro-batch",
    *(f"{states}: a param group is added" for states in STATES),
    "named parameters: a param group is added",
    "offload: a param group is added",
    *(f"{event}, then another layout" for event in EVENTS),
    *(f"{event}, then other states" for event in EVENTS),
    "frozen, then trained again",
)


def test_random_configurations_cover_every_feature() -> None:
    counts = Counter(feature for number in range(600) for feature in set(features(case_of(number))))
    assert not counts.keys() - {*FEATURES}
    rare = {feature: counts[feature] for feature in FEATURES if counts[feature] < 6}
    assert not rare, f"of 600 configurations fewer than 6 have {rare}"


def features(case: Case) -> Iterator[str]:
    setting, resumed = case.setting, case.resumed
    yield from (f"memory format {memory_format(case, setting, name)}" for name in case.names)
    if resumed is not None and any(
        memory_format(case, setting, name) != memory_format(case, resumed, name) for name in case.names
    ):
        yield "other memory formats after a checkpoint"
    if case.written is not None and case.is_written(case.written[0]):
        yield f"written: {case.written[1]}"
    if has_rank_without_parameters(case, setting):
        yield f"{case.precision}: a rank steps nothing"
        yield f"{case.implementation}: a rank steps nothing"
    if case.names == [*SMALL] and setting.axis is not None and setting.at.topology.size(setting.axis) > 1:
        yield "sharded states: fewer elements than ranks"
    yield from features_of_losses(case)
    if case.added is not None:
        yield f"{setting.states}: a param group is added"
        if setting.named:
            yield "named parameters: a param group is added"
        if setting.offload is not None:
            yield "offload: a param group is added"
    if resumed not in (None, setting):
        assert resumed is not None
        kind = "other states" if resumed.layout == setting.layout else "another layout"
        steps = (
            case.overflow,
            case.vetoed,
            case.added,
            case.frozen and case.frozen[1],
            case.written and case.written[0],
        )
        for event, step in zip(EVENTS, steps, strict=True):
            happened = case.is_written(step or 0) if event == "written" else step is not None
            if happened and step is not None and step < case.saved_at:
                yield f"{event}, then {kind}"
    if case.frozen is not None and case.frozen[2] is not None:
        yield "frozen, then trained again"


def has_rank_without_parameters(case: Case, setting: Setting) -> bool:
    names = [name for name in case.names if case.has(name, 0)]
    return any(not any(setting.at.holds(name, at) for name in names) for at in setting.at.coordinates())


def features_of_losses(case: Case) -> Iterator[str]:
    setting = case.setting
    for at in setting.at.coordinates():
        for micro in range(setting.micro):
            if not weight(case, setting, at, 0, micro):
                yield "weights: a loss is None" if setting.weighted else "means: a loss is None"
            elif case.absent and not any(
                setting.at.holds(name, at) and not is_idle(case, setting, name, at, 0, micro) for name in case.names
            ):
                yield "a rank without a loss beside one with a loss of the same micro-batch"
