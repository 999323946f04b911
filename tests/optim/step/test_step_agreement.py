"""Settings on which ranks must agree in a step.

A difference skips the step on all ranks and raises an error on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from datetime import timedelta
from typing import Any

import numpy
import pytest
import torch
from meshstep.amp import TorchFp16
from meshstep.optim import ByName, ByNorm, ParallelOptimizer, Sharded, WarmUp
from meshstep.optim.step.skips import LAG
from meshstep.optim.step.step_agreement import UsedClip, _hashed
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from probes import collectives, no_host_reads
from small_models import parameter
from torch import Tensor, nn
from world import World

BAD = 3  # the step in which ranks differ
MESHES: list[dict[str, int]] = [{"data": 2}, {"tensor": 2}, {"data": 2, "tensor": 2}, {"pipe": 2, "data": 2}]


def adamw(*groups: Any, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, fused=True, **{"lr": 0.1, **options})


class Run:
    """Trains two replicated parameters in two param groups, and records the steps and texts of errors and the skipped
    steps.

    Args:
        mesh: The sizes of the topology's axes.
        change: Called on the last rank before the backward of step `BAD`; returns True to omit the backward.
        options: Arguments of `ParallelOptimizer`, and ``weight`` of its `backward`. ``inner`` makes the wrapped
            optimizer. ``every`` and ``after`` are called on every rank, with this run and the step, before and after
            each backward.
    """

    def __init__(
        self, mesh: dict[str, int], change: Callable[[Run], bool | None], steps: int = BAD + LAG + 2, **options: Any
    ) -> None:
        self.errors: list[tuple[int, str]] = []
        self.disagreed: list[float] = []
        self.moved: list[bool] = []
        self.weight: float | torch.Tensor | None = options.pop("weight", None)
        every, after = options.pop("every", None), options.pop("after", None)
        with ProcessGroupRegistry(Topology(roles=None, **mesh)) as self.registry:
            self.rank = self.registry.global_rank
            self.last = self.rank == self.registry.topology.world_size - 1
            stage = self.registry.rank("pipe") if "pipe" in mesh else 0
            self.w, self.b = parameter(f"w{stage}", value=1.0), parameter(f"b{stage}", value=1.0)
            inner = options.pop("inner", adamw)({"params": [self.w]}, {"params": [self.b]})
            self.optimizer = ParallelOptimizer(inner, self.registry, **options)
            for step in range(steps):
                self.optimizer.zero_grad()
                skips_backward = change(self) if self.last and step == BAD else None
                if every is not None:
                    every(self, step)
                if not skips_backward:
                    self.backward()
                if after is not None:
                    after(self, step)
                before = self.w.detach().clone()
                try:
                    stats: Any = self.optimizer.step()
                    self.disagreed.append(float(stats.ranks_disagree))
                except RuntimeError as error:
                    self.errors.append((step, str(error)))
                    self.disagreed.append(-1.0)
                self.moved.append(not torch.equal(before, self.w))
            self.skipped = self.optimizer.skipped_steps
            self.polled: list[str] = []
            for _ in range(2):
                try:
                    self.optimizer.poll()
                except RuntimeError as error:
                    self.polled.append(str(error))

    def backward(self) -> None:
        self.optimizer.backward(self.w.square().sum() + self.b.square().sum(), weight=self.weight)


def miss_a_backward(run: Run) -> bool:
    return True


def make_one_more(run: Run) -> None:
    run.backward()


def forget_the_weight(run: Run) -> None:
    run.weight = None


def give_a_weight(run: Run) -> None:
    run.weight = 2.0


WINDOWS: dict[str, tuple[Callable[[Run], bool | None], dict[str, Any], str]] = {
    "missing": (miss_a_backward, {}, "the number of micro-batches{where} is 1 on rank{first} and 0 on rank {last}"),
    "one more": (make_one_more, {}, "the number of micro-batches{where} is 1 on rank{first} and 2 on rank {last}"),
    "missing with weights": (
        miss_a_backward,
        {"weight": 3.0},
        "weight= of backward{where} is given on rank{first} and not given on rank {last}",
    ),
    "weight": (give_a_weight, {}, "weight= of backward{where} is not given on rank{first} and given on rank {last}"),
    "no weight": (
        forget_the_weight,
        {"weight": 3.0},
        "weight= of backward{where} is given on rank{first} and not given on rank {last}",
    ),
}


def expected(text: str, mesh: dict[str, int]) -> str:
    size = 4 if len(mesh) == 2 else 2
    first = {"pipe": " 2"}.get(next(iter(mesh)), "s 0-2" if size == 4 else " 0")
    where = " of pipeline stage [1]" if "pipe" in mesh else ""
    return text.format(where=where, first=first, last=size - 1)


def window_run(mesh: dict[str, int], case: str, options: dict[str, Any]) -> tuple[Any, ...]:
    change, settings, _ = WINDOWS[case]
    restored = settings.get("weight")

    def every(run: Run, step: int) -> None:
        if step > BAD:
            run.weight = restored

    run = Run(mesh, change, every=every, **settings, **options)
    return run.errors, run.disagreed, run.moved, run.skipped, run.w.tolist()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("case", WINDOWS)
def test_accumulation_windows_that_differ_between_ranks_skip_step_and_raise(
    world: World, mesh: dict[str, int], case: str
) -> None:
    """The error is raised sixteen steps later on every rank, and training can continue."""
    size = 4 if len(mesh) == 2 else 2
    results = world.run(size, window_run, mesh, case, {})
    for errors, disagreed, moved, skipped, _ in results:
        ((step, text),) = errors
        assert step == BAD + LAG
        assert text == results[0][0][0][1]
        assert expected(WINDOWS[case][2], mesh) in text
        assert [at for at, found in enumerate(disagreed) if found == 1] == [BAD]
        assert [at for at, has_moved in enumerate(moved) if not has_moved] == [BAD, BAD + LAG]
        assert skipped == 1
    if "pipe" not in mesh:
        assert len({tuple(weights) for *_, weights in results}) == 1


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_differing_accumulation_windows_raise_immediately_if_on_nonfinite_is_raise(
    world: World, mesh: dict[str, int]
) -> None:
    for errors, _, moved, skipped, _ in world.run(4 if len(mesh) == 2 else 2, window_run, mesh, "missing", AT_ONCE):
        assert [step for step, _ in errors] == [BAD]
        assert expected(WINDOWS["missing"][2], mesh) in errors[0][1]
        assert [at for at, has_moved in enumerate(moved) if not has_moved] == [BAD]
        assert skipped == 1


AT_ONCE = {"on_nonfinite": "raise"}


def one_more_for_tensor_rank() -> list[tuple[int, str]]:
    """Run one more micro-batch on one of the two ranks with data coordinate 1.

    With weights, ranks with different data coordinates may have different numbers of micro-batches.

    Return the errors.
    """

    def every(run: Run, step: int) -> None:
        if run.registry.coordinate["data"]:
            run.backward()

    return Run({"data": 2, "tensor": 2}, make_one_more, every=every, weight=2.0).errors


def test_weighted_windows_are_compared_among_ranks_of_equal_data_coordinate(world: World) -> None:
    for ((step, text),) in world.run(4, one_more_for_tensor_rank):
        assert step == BAD + LAG
        assert "the number of micro-batches at data=1 is 2 on rank 2 and 3 on rank 3. Every rank must call" in text


def unchanged(mesh: dict[str, int]) -> tuple[Any, ...]:
    run = Run(mesh, lambda run: None, steps=2 * LAG + 3)
    return run.errors, sum(run.disagreed), run.skipped


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_steps_with_equal_accumulation_windows_on_all_ranks_are_not_skipped(world: World, mesh: dict[str, int]) -> None:
    assert world.run(4 if len(mesh) == 2 else 2, unchanged, mesh) == [([], 0, 0)] * (4 if len(mesh) == 2 else 2)


def first_step(weighted: bool) -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        w = parameter("w", value=1.0)
        optimizer = ParallelOptimizer(adamw(w), registry)
        for _ in range(1 if weighted else 1 + registry.global_rank):
            optimizer.backward(w.sum(), weight=2 if weighted and registry.global_rank else None)
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
        assert w.tolist() == [1.0] * 4
        return str(caught.value)


@pytest.mark.parametrize("weighted", [True, False])
def test_accumulation_windows_that_differ_in_first_step_raise_immediately(world: World, weighted: bool) -> None:
    said = "weight= of backward is not given on" if weighted else "the number of micro-batches is 1 on rank 0 and 2 on"
    for text in world.run(2, first_step, weighted):
        assert text.startswith(f"ranks disagree about the first step, nothing was stepped: {said}")


def polled() -> tuple[int, list[str]]:
    run = Run({"data": 2}, miss_a_backward, steps=BAD + 2)
    return len(run.errors), run.polled


def test_poll_raises_once_for_differing_accumulation_windows(world: World) -> None:
    for errors, (text,) in world.run(2, polled):
        assert errors == 0
        assert "the number of micro-batches is 1 on rank 0 and 0 on rank 1" in text


def loss_scales() -> tuple[list[float], list[float]]:
    """Return loss scales and found_inf of four steps. Windows differ in the second step; the third step overflows."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        w = nn.Parameter(torch.ones(4, dtype=torch.float16))
        annotate(w, P(), "w")
        optimizer = ParallelOptimizer(adamw(w), registry, precision=TorchFp16(init_scale=64.0))
        scales, found = [], []
        for step in range(4):
            optimizer.zero_grad()
            if step != 1 or registry.global_rank == 0:
                optimizer.backward((w.float() * (torch.inf if step == 2 else 1.0)).sum())
            stats = optimizer.step()
            assert optimizer.loss_scale is not None
            scales.append(float(optimizer.loss_scale.scale))
            found.append(float(stats.found_inf))
        return scales, found


def test_differing_accumulation_windows_do_not_count_as_overflow(world: World) -> None:
    for scales, found in world.run(2, loss_scales):
        assert found == [0, 0, 1, 0]
        assert scales[0] == scales[1] > scales[2]


def costs() -> tuple[int, int]:
    """Return the number of collectives of a step with a changing learning rate, and the number of skipped steps."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        w = parameter("w", value=1.0)
        optimizer = ParallelOptimizer(adamw(w), registry, max_norm=0.5)
        for step in range(3):
            optimizer.zero_grad()
            optimizer.backward(w.square().sum())
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            with collectives() as seen, no_host_reads() if step else collectives():
                optimizer.step()
        return sum(seen.values()), optimizer.skipped_steps


def test_step_agreement_adds_no_collective_or_host_synchronization(world: World) -> None:
    assert world.run(2, costs) == [(2, 0)] * 2  # one for the gradients, one for the norm


# Hyper-parameters -----------------------------------------------------------------------------------------------------


def set_lr(run: Run) -> None:
    run.optimizer.param_groups[1]["lr"] = 0.05


def set_betas(run: Run) -> None:
    run.optimizer.param_groups[0]["betas"] = (0.8, 0.999)


def set_weight_decay(run: Run) -> None:
    run.optimizer.param_groups[0]["weight_decay"] = 0.5


def set_amsgrad(run: Run) -> None:
    run.optimizer.param_groups[0]["amsgrad"] = True


def write_lr(run: Run) -> None:
    run.optimizer.param_groups[1]["lr"].fill_(0.5)


def adamw_of_tensor(*groups: Any) -> torch.optim.AdamW:
    return adamw(*({**group, "lr": torch.tensor(0.25)} for group in groups))


HYPER: dict[str, tuple[Callable[[Run], None], dict[str, Any], str]] = {
    "lr": (set_lr, {}, "lr of param group 1{where} is 0.1 on rank{first} and 0.05 on rank {last}"),
    "betas": (
        set_betas,
        {},
        "betas of param group 0{where} is (0.9, 0.999) on rank{first} and (0.8, 0.999) on rank {last}",
    ),
    "weight_decay": (
        set_weight_decay,
        {},
        "weight_decay of param group 0{where} is 0.01 on rank{first} and 0.5 on rank {last}",
    ),
    "lr, a tensor": (
        write_lr,
        {"inner": adamw_of_tensor},
        "lr of param group 1{where} is 0.25 on rank{first} and 0.5 on rank {last}",
    ),
    "lr with ZeRO": (
        set_lr,
        {"states": Sharded("data")},
        "lr of param group 1{where} is 0.1 on rank{first} and 0.05 on rank {last}",
    ),
}


def hyper_run(mesh: dict[str, int], case: str) -> tuple[Any, ...]:
    change, options, _ = HYPER[case]
    run = Run(mesh, change, steps=BAD + LAG + 1, **options)
    return run.errors, run.disagreed, run.skipped, run.w.tolist()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("case", HYPER)
def test_hyper_parameters_that_differ_between_ranks_skip_steps_and_raise(
    world: World, mesh: dict[str, int], case: str
) -> None:
    if "ZeRO" in case and "data" not in mesh:
        pytest.skip("the mesh has no data axis to shard over")
    size = 4 if len(mesh) == 2 else 2
    results = world.run(size, hyper_run, mesh, case)
    for errors, disagreed, skipped, _ in results:
        ((step, text),) = errors
        assert step == BAD + LAG
        assert expected(HYPER[case][2], mesh) in text
        assert "All-reduce the metric before you pass it to the schedule" in text
        assert disagreed == [0.0] * BAD + [1.0] * LAG + [-1.0]
        assert skipped == LAG + 1
    if "pipe" not in mesh:
        assert len({tuple(weights) for *_, weights in results}) == 1


def own_plateau() -> tuple[list[tuple[int, str]], float]:
    """Give each rank's plateau schedule its own loss; the loss of rank 1 never decreases. Return errors and the sum of
    the weights."""
    rates: list[Any] = []

    def every(run: Run, step: int) -> None:
        if not rates:
            rates.append(torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer, patience=1))
        else:
            rates[0].step(1.0 if run.rank else 1.0 / step)

    run = Run({"data": 2}, lambda run: None, every=every, steps=2 * LAG)
    return run.errors, float(run.w.detach().sum())


def test_plateau_schedule_with_rank_local_metric_raises_on_every_rank(world: World) -> None:
    (first, one), (second, other) = world.run(2, own_plateau)
    assert first == second
    assert one == other
    assert "lr of param group 0 is 0.1 on rank 0 and 0.01000000" in first[0][1]


def same_schedule(mesh: dict[str, int]) -> tuple[Any, ...]:
    """Change hyper-parameters equally on all ranks of a stage; stages have different learning rates.

    Return errors, disagreements and skipped steps.
    """

    def every(run: Run, step: int) -> None:
        stage = run.registry.rank("pipe") if "pipe" in mesh else 0
        for index, group in enumerate(run.optimizer.param_groups):
            group["lr"] = 0.1 / (1 + step + index + 10 * stage)
            group["betas"] = [0.9 - 0.01 * step, 0.99]
            group["note"] = object()

    run = Run(mesh, lambda run: None, every=every, steps=LAG + 3)
    return run.errors, sum(run.disagreed), run.skipped


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_steps_with_equal_schedules_on_all_ranks_are_not_skipped(world: World, mesh: dict[str, int]) -> None:
    assert world.run(4 if len(mesh) == 2 else 2, same_schedule, mesh) == [([], 0, 0)] * (4 if len(mesh) == 2 else 2)


def in_place_list() -> list[tuple[int, str]]:
    def every(run: Run, step: int) -> None:
        if step == 0:
            run.optimizer.param_groups[0]["betas"] = [0.9, 0.99]

    def change(run: Run) -> None:
        run.optimizer.param_groups[0]["betas"][1] = 0.5

    return Run({"data": 2}, change, every=every).errors


def test_in_place_change_of_betas_list_on_one_rank_raises_on_every_rank(world: World) -> None:
    for errors in world.run(2, in_place_list):
        assert "betas of param group 0 is (0.9, 0.99) on rank 0 and (0.9, 0.5) on rank 1" in errors[0][1]


def group_of_some_ranks(differs: bool) -> tuple[list[str], int]:
    """Use a group owned by tensor=1, which is empty on tensor=0 and has another lr there. If ``differs``, rank 3 changes
    the lr in the second step.

    Return the errors, and the number of skipped steps.
    """
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        w, owned = parameter("w", value=1.0), nn.Parameter(torch.ones(3))
        annotate(owned, P(owned={"tensor": 1}), "owned")
        tensor = registry.coordinate["tensor"]
        optimizer = ParallelOptimizer(
            adamw({"params": [w]}, {"params": [owned] if tensor else [], "lr": 0.3 if tensor else 0.7}), registry
        )
        texts = []
        for step in range(LAG + 2):
            optimizer.zero_grad()
            if step == 1 and (not tensor or (differs and registry.global_rank == 3)):
                optimizer.param_groups[1]["lr"] = 0.9
            optimizer.backward(w.sum() + (owned.sum() if tensor else 0.0))
            try:
                optimizer.step()
            except RuntimeError as error:
                texts.append(str(error))
        return texts, optimizer.skipped_steps


def test_group_options_are_compared_only_among_ranks_with_parameters_of_the_group(world: World) -> None:
    assert world.run(4, group_of_some_ranks, False) == [([], 0)] * 4
    for (text,), skipped in world.run(4, group_of_some_ranks, True):
        assert "lr of param group 1 is 0.3 on rank 1 and 0.9 on rank 3. Give all ranks" in text
        assert skipped == LAG + 1


# Frozen parameters ----------------------------------------------------------------------------------------------------


def freeze(run: Run) -> None:
    run.b.requires_grad_(False)


def frozen_run(mesh: dict[str, int], everywhere: bool) -> tuple[Any, ...]:
    def every(run: Run, step: int) -> None:
        if everywhere and step == BAD:
            freeze(run)

    run = Run(mesh, (lambda run: None) if everywhere else freeze, every=every, steps=BAD + LAG + 1)
    return run.errors, run.skipped, run.b.tolist()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_parameter_frozen_during_training_on_one_rank_raises(world: World, mesh: dict[str, int]) -> None:
    size = 4 if len(mesh) == 2 else 2
    results = world.run(size, frozen_run, mesh, False)
    for errors, skipped, _ in results:
        ((step, text),) = errors
        assert step == BAD + LAG
        name = "b1" if "pipe" in mesh else "b0"
        assert expected(f"requires_grad of {name} is True on rank{{first}} and False on rank {{last}}", mesh) in text
        assert skipped == LAG + 1
    if "pipe" not in mesh:
        assert len({tuple(values) for *_, values in results}) == 1
    for errors, skipped, _ in world.run(size, frozen_run, mesh, True):
        assert (errors, skipped) == ([], 0)


def thawed_run(everywhere: bool) -> tuple[list[list[tuple[int, str]]], list[float], bool]:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        w, b = parameter("w", value=1.0), parameter("b", value=1.0, trained=False)
        optimizer = ParallelOptimizer(adamw(w, b), registry)
        errors: list[tuple[int, str]] = []
        for step in range(BAD + LAG + 1):
            optimizer.zero_grad()
            if step == BAD and (everywhere or registry.global_rank):
                b.requires_grad_(True)
            optimizer.backward(w.sum() + b.sum())
            try:
                optimizer.step()
            except RuntimeError as error:
                errors.append((step, str(error)))
        return [errors], w.tolist(), b.tolist() == [1.0] * 4


def test_parameter_unfrozen_on_one_rank_raises_without_hanging_other_ranks(world: World) -> None:
    """The error must not be raised before the collectives of the step, in which the other ranks would wait."""
    ((first,), one, kept), ((second,), other, _) = world.run(2, thawed_run, False)
    assert [step for step, _ in first] == [BAD + LAG]
    assert [step for step, _ in second] == [*range(BAD, BAD + LAG + 1)]
    assert "b was frozen when the optimizer was made or last refreshed, and is not now on rank 1" in first[0][1]
    assert "b was frozen when the optimizer was made or last refreshed, and is not now" in second[0][1]
    assert one == other
    assert kept
    for (errors,), values, kept in world.run(2, thawed_run, True):
        assert [step for step, _ in errors] == [*range(BAD, BAD + LAG + 1)]
        assert kept
        assert values == one


# Clipping -------------------------------------------------------------------------------------------------------------


def set_max_norm(run: Run) -> None:
    run.optimizer.max_norm = 0.1 + 0.2  # 0.30000000000000004


def stop_clipping(run: Run) -> None:
    run.optimizer.max_norm = None


def set_schedule(run: Run) -> None:
    run.optimizer.max_norm = WarmUp(2.0, 1.0, steps=11)


def set_group_threshold(run: Run) -> None:
    run.optimizer.param_groups[1]["max_norm"] = 0.5


class OnDevice(Tensor):
    """A CPU tensor whose `is_cpu` is False, as of a tensor on another device."""

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()


def change_in_place(run: Run) -> None:
    clip: Any = run.optimizer.clip
    clip.max_norm.fill_(0.5)


def change_nested_in_place(run: Run) -> None:
    clip: Any = run.optimizer.clip
    clip.others.max_norm.fill_(0.5)


def change_group_in_place(run: Run) -> None:
    run.optimizer.param_groups[1]["max_norm"].fill_(0.5)


THRESHOLDS: dict[str, tuple[Callable[[Run], None], dict[str, Any], str]] = {
    "max_norm": (
        set_max_norm,
        {"max_norm": 0.3},
        "max_norm is 0.3 on rank{first} and 0.30000000000000004 on rank {last}. Set",
    ),
    "no max_norm": (stop_clipping, {"max_norm": 0.3}, "max_norm is 0.3 on rank{first} and None on rank {last}. Set"),
    "schedule": (
        set_schedule,
        {"max_norm": WarmUp(2.0, 1.0, steps=10)},
        "steps=10) on rank{first} and WarmUp(start=2, end=1, steps=11) on rank {last}. Set optimizer.max_norm, and",
    ),
    "group": (
        set_group_threshold,
        {"max_norm": 0.3},
        "max_norm of param group 1 is None on rank{first} and 0.5 on rank {last}. Set optimizer.max_norm, and max_norm of",
    ),
    "tensor": (
        change_in_place,
        {"max_norm": ByNorm(torch.tensor(0.25))},  # type: ignore[arg-type]
        "max_norm is 0.25 on rank{first} and 0.5 on rank {last}. Set",
    ),
    "tensor on a device": (
        change_in_place,
        {"max_norm": ByNorm(torch.tensor(0.25).as_subclass(OnDevice))},  # type: ignore[arg-type]
        "max_norm is 0.25 on rank{first} and 0.5 on rank {last}. Set",
    ),
    "nested tensor": (
        change_nested_in_place,
        {"max_norm": ByName({"w*": None}, others=torch.tensor(0.25))},  # type: ignore[arg-type]
        "others=ByNorm(max_norm=0.25, norm_type=None), norm_type=None) on rank{first} and ByName(",
    ),
    "tensor of a group": (
        change_group_in_place,
        {"max_norm": 0.3, "group_threshold": torch.tensor(0.25)},
        "max_norm of param group 1 is 0.25 on rank{first} and 0.5 on rank {last}. Set optimizer.max_norm, and max_norm of",
    ),
    "tensor of a group on a device": (
        change_group_in_place,
        {"max_norm": 0.3, "group_threshold": torch.tensor(0.25).as_subclass(OnDevice)},
        "max_norm of param group 1 is 0.25 on rank{first} and 0.5 on rank {last}. Set optimizer.max_norm, and max_norm of",
    ),
}


def threshold_run(mesh: dict[str, int], case: str) -> tuple[Any, ...]:
    change, options, _ = THRESHOLDS[case]
    options = deepcopy(options)
    threshold = options.pop("group_threshold", None)

    def every(run: Run, step: int) -> None:
        if step == 0 and threshold is not None:
            run.optimizer.param_groups[1]["max_norm"] = threshold

    run = Run(mesh, change, every=every, steps=BAD + LAG + 1, **options)
    return run.errors, run.disagreed, run.w.tolist()


@pytest.mark.parametrize(
    ("mesh", "case"),
    [*((MESHES[0], case) for case in THRESHOLDS), *((mesh, "max_norm") for mesh in MESHES[1:])],
    ids=str,
)
def test_clip_thresholds_that_differ_between_ranks_skip_steps_and_raise(
    world: World, mesh: dict[str, int], case: str
) -> None:
    size = 4 if len(mesh) == 2 else 2
    results = world.run(size, threshold_run, mesh, case)
    first = "s 0-2" if size == 4 else " 0"
    for errors, disagreed, weights in results:
        ((step, text),) = errors
        assert step == BAD + LAG
        assert THRESHOLDS[case][2].format(first=first, last=size - 1) in text
        assert disagreed == [0.0] * BAD + [1.0] * LAG + [-1.0]
        assert weights == results[0][2]


def clip_apart(run: Run, step: int) -> None:
    run.optimizer.clip_grad_by_norm(2.0 if run.last and step == BAD else 1.0)


def clip_on_last(run: Run, step: int) -> None:
    if run.last and step == BAD:
        run.optimizer.clip_grad_by_norm(2.0)


def clip_otherwise(run: Run, step: int) -> None:
    if run.last and step == BAD:
        run.optimizer.clip_grad_by_value(2.0)
    else:
        run.optimizer.clip_grad_by_norm(2.0, norm_type=2)


def clip_twice(run: Run, step: int) -> None:
    clip_apart(run, step)
    run.optimizer.clip_grad_by_norm(5.0)


EXPLICIT: dict[str, tuple[Callable[[Run, int], None], str]] = {
    "threshold": (
        clip_apart,
        "is clip_grad_by_norm(1) on rank 0 and clip_grad_by_norm(2) on rank 1. Call clip_grads",
    ),
    "one rank": (
        clip_on_last,
        "is none on rank 0 and clip_grad_by_norm(2) on rank 1. Call clip_grads, clip_grad_by_norm or",
    ),
    "call": (
        clip_otherwise,
        "is clip_grad_by_norm(2, norm_type=2) on rank 0 and clip_grad_by_value(2) on rank 1. Call",
    ),
    "twice": (
        clip_twice,
        "is clip_grad_by_norm(1), then clip_grad_by_norm(5) on rank 0 and clip_grad_by_norm(2), then clip_grad_by_norm(5)",
    ),
}


def explicit_run(case: str, options: dict[str, Any]) -> tuple[Any, ...]:
    run = Run({"data": 2}, lambda run: None, after=EXPLICIT[case][0], **options)
    return run.errors, run.disagreed, run.moved, run.skipped, run.w.tolist()


@pytest.mark.parametrize("case", EXPLICIT)
@pytest.mark.parametrize(
    "options", [{}, {"on_nonfinite": "raise", "max_norm": 1.5}], ids=["on_nonfinite=skip", "on_nonfinite=raise"]
)
def test_explicit_clips_that_differ_between_ranks_skip_step_and_raise(
    world: World, case: str, options: dict[str, Any]
) -> None:
    results = world.run(2, explicit_run, case, options)
    found = BAD if options else BAD + LAG
    for errors, disagreed, moved, skipped, weights in results:
        ((step, text),) = errors
        assert step == found
        assert f"explicit clipping {EXPLICIT[case][1]}" in text
        assert options or [at for at, differs in enumerate(disagreed) if differs == 1] == [BAD]
        assert [at for at, has_moved in enumerate(moved) if not has_moved] == sorted({BAD, found})
        assert skipped == 1
        assert weights == results[0][4]


def clip_by_tensor(kind: type[Tensor]) -> tuple[Any, ...]:
    """Clip by one tensor in every step, which the last rank changes in place before step `BAD`, and restores after it."""
    threshold = torch.tensor(1.0).as_subclass(kind)

    def after(run: Run, step: int) -> None:
        run.optimizer.clip_grad_by_norm(threshold.fill_(2.0 if run.last and step == BAD else 1.0))  # type: ignore[arg-type]

    run = Run({"data": 2}, lambda run: None, after=after)
    return run.errors, run.disagreed, run.skipped


@pytest.mark.parametrize("kind", [Tensor, OnDevice], ids=["on the CPU", "on a device"])
def test_explicit_clip_by_tensor_that_one_rank_changed_skips_step_and_raises(world: World, kind: type[Tensor]) -> None:
    for errors, disagreed, skipped in world.run(2, clip_by_tensor, kind):
        ((step, text),) = errors
        assert step == BAD + LAG
        assert "such as a learning rate or a threshold in a tensor, is equal on all ranks again" in text
        assert [at for at, differs in enumerate(disagreed) if differs == 1] == [BAD]
        assert skipped == 1


def equal_clips() -> tuple[Any, ...]:
    """Change thresholds in every step to values that are equal on both ranks, but of different types and in new objects.

    Return errors, disagreements and skipped steps.
    """

    def number(run: Run, value: float) -> Any:
        return numpy.float64(value) if run.rank else value

    in_place: Any = torch.tensor(1.0)

    def every(run: Run, step: int) -> None:
        in_place.fill_(1.0 + step)
        if step == 3:
            run.optimizer.max_norm = ByName({"w*": None}, others=in_place)
        elif step > 6:
            run.optimizer.max_norm = ByNorm(number(run, 1.0 + step)) if step % 2 else number(run, 1.0 + step)
        if step > LAG:
            run.optimizer.param_groups[1]["max_norm"] = number(run, 2.0 + step)

    def after(run: Run, step: int) -> None:
        if step % 3 == 1:
            run.optimizer.clip_grad_by_norm(number(run, 0.1 * (1 + step)))
        if step % 3 == 2:
            run.optimizer.clip_grad_by_value(numpy.float32(0.5) if run.rank else 0.5)
        if step % 6 == 2:
            run.optimizer.clip_grad_by_norm(2 if run.rank else 2.0)

    run = Run({"data": 2}, lambda run: None, every=every, after=after, steps=2 * LAG)
    return run.errors, sum(run.disagreed), run.skipped


def test_steps_with_equal_clip_thresholds_on_all_ranks_are_not_skipped(world: World) -> None:
    assert world.run(2, equal_clips) == [([], 0, 0)] * 2


def managed_clips() -> tuple[list[str], float]:
    """Call an explicit clip inside a window on rank 1 only. Return the errors, and the number of skipped steps."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        w, texts = parameter("w", value=1.0), []
        optimizer = ParallelOptimizer(adamw(w), registry, accumulation_steps=2, on_nonfinite="raise")
        for step in range(6):
            optimizer.backward(w.square().sum())
            if step == 2 and registry.global_rank:
                optimizer.clip_grad_by_norm(0.5)
            try:
                optimizer.step()
            except RuntimeError as error:
                texts.append(str(error))
            optimizer.zero_grad()
        return texts, optimizer.skipped_steps


def test_explicit_clip_on_one_rank_within_accumulation_window_raises(world: World) -> None:
    for (text,), skipped in world.run(2, managed_clips):
        assert "explicit clipping is none on rank 0 and clip_grad_by_norm(0.5) on rank 1" in text
        assert skipped == 1


def explicit_costs() -> tuple[int, int]:
    """Return the same as `costs`, with explicit clips whose thresholds change."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        w = parameter("w", value=1.0)
        optimizer = ParallelOptimizer(adamw(w), registry, max_norm=0.5)
        for step in range(3):
            optimizer.zero_grad()
            optimizer.backward(w.square().sum())
            with collectives() as seen, no_host_reads() if step else collectives():
                optimizer.clip_grad_by_norm(0.1 + step)
                optimizer.step()
        return sum(seen.values()), optimizer.skipped_steps


def test_comparing_explicit_clips_needs_no_collective_or_host_synchronization(world: World) -> None:
    assert world.run(2, explicit_costs) == [(2, 0)] * 2


# Weights --------------------------------------------------------------------------------------------------------------


def weight_of(kind: str, value: float) -> Any:
    return torch.tensor(value, dtype=torch.float64) if kind == "tensor" else value


def weights_run(mesh: dict[str, int], kinds: tuple[str, str], difference: float) -> tuple[Any, ...]:
    def every(run: Run, step: int) -> None:
        differs = run.last and step == BAD
        run.weight = weight_of(kinds[run.last], 3.1 + step + (difference if differs else 0.0))

    run = Run(mesh, lambda run: None, every=every)
    return run.errors, run.moved, run.skipped, run.w.tolist()


@pytest.mark.parametrize("kinds", [("number", "number"), ("tensor", "tensor"), ("tensor", "number")], ids=str)
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"data": 2, "tensor": 2}], ids=str)
def test_micro_batch_weights_that_differ_at_equal_data_coordinate_skip_step_and_raise(
    world: World, mesh: dict[str, int], kinds: tuple[str, str]
) -> None:
    size = 4 if len(mesh) == 2 else 2
    results = world.run(size, weights_run, mesh, kinds, 0.5)
    at, first = (" at data=1", 2) if "data" in mesh else ("", 0)
    for errors, moved, skipped, weights in results:
        ((step, text),) = errors
        assert step == BAD + LAG
        assert (
            f"the sum of weight= of the micro-batches{at} is 6.1 on rank {first} and 6.6 on rank {size - 1}. Give"
            in text
        )
        assert [at for at, has_moved in enumerate(moved) if not has_moved] == [BAD, BAD + LAG]
        assert skipped == 1
        assert weights == results[0][3]


@pytest.mark.parametrize(
    ("mesh", "difference"),
    [({"data": 2}, 0.5), ({"tensor": 2}, 0.0), ({"data": 2, "tensor": 2}, 0.0), ({"pipe": 2, "data": 2}, 0.5)],
    ids=str,
)
def test_micro_batch_weights_may_differ_between_data_ranks_and_in_type(
    world: World, mesh: dict[str, int], difference: float
) -> None:
    for errors, _, skipped, _ in world.run(
        4 if len(mesh) == 2 else 2, weights_run, mesh, ("number", "tensor"), difference
    ):
        assert (errors, skipped) == ([], 0)


# A micro-batch without a loss -----------------------------------------------------------------------------------------

WINDOWS_OF: list[int | None] = [None, 1, 2]


def owned_norm(mesh: dict[str, int], steps: int | None) -> float:
    """Return the norm of a parameter with gradient (3, 4) that tensor=0 owns; other tensor ranks have no loss."""
    with ProcessGroupRegistry(Topology(roles=None, **mesh)) as registry:
        mine = registry.coordinate["tensor"] == 0
        w = nn.Parameter(torch.zeros(2))
        annotate(w, P(owned={"tensor": 0}), "w")
        sgd = torch.optim.SGD([{"params": [w] if mine else []}], lr=1.0)
        optimizer = ParallelOptimizer(sgd, registry, accumulation_steps=steps)
        for _ in range(steps or 1):
            optimizer.backward((w * torch.tensor([3.0, 4.0])).sum() if mine else None)
        stats: Any = optimizer.step()
        assert not mine or w.tolist() == [-3.0, -4.0]
        return float(stats.total_norm)


@pytest.mark.parametrize("steps", WINDOWS_OF)
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"data": 2, "tensor": 2}, {"tensor": 3}], ids=str)
def test_backward_none_on_ranks_without_owned_parameter_gives_norm_of_owner(
    world: World, mesh: dict[str, int], steps: int | None
) -> None:
    size = 4 if len(mesh) == 2 else mesh["tensor"]
    assert world.run(size, owned_norm, mesh, steps) == [pytest.approx(5.0, rel=1e-12)] * size


def mean_with_gaps(steps: int | None, weighted: bool) -> list[float]:
    """Run micro-batches with loss slopes 3 and 6 on rank 0, and slope 12 and no loss on rank 1. Return the parameter.

    The losses are halved here unless a weight or ``steps=2`` divides them.
    """
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        w = parameter("w", 1)
        optimizer = ParallelOptimizer(torch.optim.SGD([w], lr=1.0), registry, accumulation_steps=steps)
        for slope in ([3.0, 6.0], [12.0, None])[registry.global_rank]:
            loss = None if slope is None else (w * slope).sum() / (1 if weighted or steps == 2 else 2)
            optimizer.backward(loss, weight=(0 if slope is None else 2) if weighted else None)
            optimizer.step() if steps == 1 else None
            optimizer.zero_grad() if steps == 1 else None
        if steps != 1:
            optimizer.step()
        return w.tolist()


@pytest.mark.parametrize("steps", WINDOWS_OF)
def test_backward_none_on_data_rank_counts_as_zero(world: World, steps: int | None) -> None:
    expected = -(3.0 + 6.0 + 12.0 + 0.0) / 4
    assert world.run(2, mean_with_gaps, steps, False) == [[expected]] * 2


@pytest.mark.parametrize("steps", [None, 2])
def test_micro_batch_weights_give_mean_over_all_samples(world: World, steps: int | None) -> None:
    assert world.run(2, mean_with_gaps, steps, True) == [[pytest.approx(-(3.0 + 6.0 + 12.0) / 6, rel=1e-6)]] * 2


def weights_of_last_stage(steps: int | None) -> list[float]:
    """Give micro-batch weights, whose sum differs from the number of micro-batches, only on the last of two stages.
    Return the parameter."""
    with ProcessGroupRegistry(Topology(pipe=2, data=2)) as registry:
        w, last = nn.Parameter(torch.zeros(1)), registry.coordinate["pipe"] == 1
        annotate(w, P(), f"w{int(last)}")
        optimizer = ParallelOptimizer(torch.optim.SGD([w], lr=1.0), registry, accumulation_steps=steps)
        for weight in (0.5, 0.25):
            with optimizer.window(weight=weight if last else None):
                (w * 3.0).sum().backward()
        optimizer.step()
        return w.tolist()


@pytest.mark.parametrize("steps", [None, 2])
def test_pipeline_stages_without_micro_batch_weight_use_weight_of_last_stage(world: World, steps: int | None) -> None:
    assert world.run(4, weights_of_last_stage, steps) == [[-(4 * 3.0) / 1.5]] * 4


@pytest.mark.parametrize("steps", [None, 2])
def test_backward_none_without_weight_in_weighted_window_raises(steps: int | None) -> None:
    w = parameter("w")
    sgd = torch.optim.SGD([w], lr=1.0)
    optimizer = ParallelOptimizer(sgd, ProcessGroupRegistry(Topology()), accumulation_steps=steps)
    optimizer.backward(w.sum(), weight=2)
    with pytest.raises(ValueError, match=r"without samples has the weight 0: backward\(None, weight=0\)"):
        optimizer.backward(None)


# Windows of accumulation_steps= ---------------------------------------------------------------------------------------


def step_without_backward() -> str:
    with ProcessGroupRegistry(Topology(data=2), timeout=timedelta(seconds=4), exclusive_groups=True) as registry:
        w = parameter("w", value=1.0)
        optimizer = ParallelOptimizer(adamw(w), registry, accumulation_steps=1)
        for step in range(3):
            if step < 2 or registry.global_rank == 0:
                optimizer.backward(w.sum())
            try:
                optimizer.step()
            except RuntimeError as error:
                return str(error)
        return "no error"


def test_step_without_backward_on_one_rank_with_accumulation_raises(world: World) -> None:
    first, second = world.run(2, step_without_backward)
    assert "rank 0 got no reply in call 3 of step; rank 1: in " in first
    assert second.startswith("rank 1 called step() without a backward since its last update (accumulation_steps=1)")


def test_explicit_clip_with_equal_threshold_is_not_hashed_again() -> None:
    """`clip_grad_by_norm(0.5)` makes a new rule in each step."""
    used = UsedClip(None, all_groups=False)
    assert used.read((ByNorm(float("0.5")),), [])
    assert not used.read((ByNorm(float("0.5")),), [])
    assert used.read((ByNorm(float("0.25")),), [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_hash_of_compared_tensor_depends_on_order_and_salt(dtype: torch.dtype) -> None:
    """For example, two ranks may pass betas as a tensor of two elements in different orders."""
    one = torch.tensor([1, 2]).to(dtype)
    hashes = [float(_hashed(tensor, salt)) for tensor, salt in ((one, 1), (one.flip(0), 1), (one, 2))]
    assert len(set(hashes)) == 3
    assert hashes[0] == float(_hashed(one.clone(), 1))


def named_on_one_rank() -> list[float]:
    """Pass the parameter with a name on rank 1 only, so that only its param group has the key "param_names"."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        weight = parameter("w", value=1.0)
        params: Any = [("w", weight)] if registry.global_rank else [weight]
        optimizer = ParallelOptimizer(torch.optim.AdamW(params, fused=True), registry)
        disagreed = []
        for _ in range(2):
            optimizer.zero_grad()
            optimizer.backward(weight.sum())
            stats: Any = optimizer.step()
            disagreed.append(float(stats.ranks_disagree))
        return disagreed


def test_parameter_names_passed_on_one_rank_only_cause_no_disagreement(world: World) -> None:
    assert world.run(2, named_on_one_rank) == [[0.0, 0.0]] * 2
