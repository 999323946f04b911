"""Monitor: values of reports, host synchronizations, skipped steps and resuming."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from arguments import arguments
from meshstep.optim import GradStats, Monitor, ParallelOptimizer, Report, TensorBoardWriter
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from probes import no_host_reads
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from world import World


def stats_of(step: int, **parts: Any) -> GradStats:
    """Return stats with norm = step + 1; every third step is skipped."""
    values: dict[str, Any] = {
        "total_norm": torch.tensor(step + 1.0, dtype=torch.float64),
        "clip_coef": torch.tensor(0.5, dtype=torch.float64),
        "found_inf": torch.tensor(float(step % 3 == 2)),
        "group_norms": torch.tensor([step + 2.0, step + 3.0], dtype=torch.float64),
    }
    return GradStats(**{**values, **parts})


class CountedReads(TorchDispatchMode):
    """Counts reads of tensor values in Python. ``tolist`` on the CPU counts as one read per element, or as none."""

    reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock of Monitor. The only element of the returned list is the current time."""
    now = [100.0]
    monkeypatch.setattr("meshstep.optim.telemetry.monitor.time.perf_counter", lambda: now[0])
    return now


def test_monitor_report_covers_steps_since_last_report(clock: list[float]) -> None:
    reports: list[Report] = []
    monitor = Monitor(ProcessGroupRegistry(Topology()), reports.append, every=4, unit="tokens")
    counts = [3, 5, 2, 6, 4, 4, 1, 7, 9]
    for step, count in enumerate(counts):
        clock[0] += 0.5
        monitor(stats_of(step), torch.tensor(float(step)), count)
    assert [report.step for report in reports] == [4, 8]
    for report, steps in zip(reports, ([0, 1, 2, 3], [4, 5, 6, 7]), strict=True):
        total = sum(counts[step] for step in steps)
        assert report.loss == pytest.approx(sum(step * counts[step] for step in steps) / total)
        assert report.per_second == pytest.approx(total / 2)
        assert report.grad_norm == steps[-1] + 1
        assert list(report.group_norms) == [steps[-1] + 2, steps[-1] + 3]
        assert report.clip_coef == 0.5
    assert [report.skipped_steps for report in reports] == [1, 2]


def test_monitor_does_not_count_micro_batches_as_steps(clock: list[float]) -> None:
    reports: list[Report] = []
    monitor = Monitor(ProcessGroupRegistry(Topology()), reports.append, every=2)
    for step in range(2):
        for micro in range(3):
            clock[0] += 1.0
            monitor(stats_of(step) if micro == 2 else None, float(micro), count=micro + 1)
    assert [report.step for report in reports] == [2]
    assert reports[0].loss == pytest.approx((0 * 1 + 1 * 2 + 2 * 3) / 6)
    assert reports[0].per_second == pytest.approx(2.0)


def test_monitor_synchronizes_with_host_once_per_report() -> None:
    reports: list[Report] = []
    monitor = Monitor(ProcessGroupRegistry(Topology()), reports.append, every=5)
    names = {f"layer{index}": torch.tensor(float(index), dtype=torch.float64) for index in range(6)}
    stats = stats_of(0, loss_scale=torch.tensor(1024.0), parameter_norms=names)
    loss = torch.tensor(2.0, requires_grad=True)
    for _ in range(4):
        with no_host_reads():
            monitor(stats, loss)
    transfers: list[int] = []
    tolist = Tensor.tolist

    def counted_tolist(tensor: Tensor) -> Any:
        transfers.append(tensor.numel())
        return tolist(tensor)

    with pytest.MonkeyPatch.context() as patch, CountedReads() as counted:  # type: ignore[no-untyped-call]
        patch.setattr(Tensor, "tolist", counted_tolist)
        monitor(stats, loss)
    assert len(transfers) == 1
    assert counted.reads in (0, transfers[0]), "only one tolist may read on the host"
    assert reports[0].loss_scale == 1024
    assert reports[0].parameter_norms == {name: float(norm) for name, norm in names.items()}


def test_monitor_reports_nonfinite_values() -> None:
    reports: list[Report] = []
    monitor = Monitor(ProcessGroupRegistry(Topology()), reports.append, every=1)
    monitor(stats_of(2, total_norm=torch.tensor(math.inf)), torch.tensor(math.nan))
    monitor(stats_of(0))
    assert reports[0].loss is not None
    assert math.isnan(reports[0].loss)
    assert reports[0].grad_norm == math.inf
    assert reports[1].loss is None
    assert reports[1].skipped_steps == 1


def test_monitor_report_prints_as_one_line_and_lists_scalars() -> None:
    report = Report(20, 0.25, 1.5, 0.6667, 65536.0, 2, 812.4, "samples", (1.0, 1.1), {"fc.weight": 0.5})
    assert str(report) == "loss 0.2500, norm 1.5, clip 0.667, scale 65536, skipped 2, 812 samples/s"
    assert report.scalars() == {
        "loss": 0.25,
        "grad_norm/total": 1.5,
        "clip_coef": 0.6667,
        "loss_scale": 65536.0,
        "skipped_steps": 2,
        "samples_per_second": 812.4,
        "grad_norm/group_0": 1.0,
        "grad_norm/group_1": 1.1,
        "grad_norm/fc.weight": 0.5,
    }
    plain = Report(20, None, 1.5, 1.0, None, 0, 3.0, group_norms=(1.5,))
    assert str(plain) == "norm 1.5, clip 1, 3 samples/s"
    assert plain.scalars().keys() == {"grad_norm/total", "clip_coef", "skipped_steps", "samples_per_second"}


@pytest.mark.parametrize("every", [0, 2.5, True])
def test_monitor_rejects_invalid_interval(every: Any) -> None:
    with pytest.raises(ValueError, match="give a whole number of steps >= 1"):
        Monitor(ProcessGroupRegistry(Topology()), every=every)


def train_on_ranks(topology: Topology) -> tuple[list[Report], float]:
    """Train two steps. Data coordinate d gives the monitor 3 + d samples per step and, on the last stage, loss 10 + d.

    Return the reports, and the last norm.
    """
    reports: list[Report] = []
    with ProcessGroupRegistry(topology) as registry:
        model = nn.Linear(4, 3)
        declare(model, {"*": P()})
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        optimizer = ParallelOptimizer(sgd, registry, **arguments(precision="fp16", per_parameter_norms=True))
        now = 0.0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("meshstep.optim.telemetry.monitor.time.perf_counter", lambda: now)
            monitor = Monitor(registry, reports.append, every=2)
            where = registry.coordinate
            count = 3 + where.get("data", 0)
            last = where.get("pipe", 0) == topology.size(*topology.pipe_axes) - 1
            for _ in range(2):
                now += 1.0
                optimizer.backward(model(torch.ones(2, 4)).sum())
                monitor(optimizer.step(), torch.tensor(10.0 + where.get("data", 0)) if last else None, count)
    assert optimizer.grad_norm is not None
    return reports, float(optimizer.grad_norm)


@pytest.mark.parametrize("topology", [Topology(data=2, tensor=2), Topology(pipe=2, data=2), Topology()], ids=str)
def test_report_combines_losses_and_counts_of_all_ranks(world: World, topology: Topology) -> None:
    (reports, norm), *others = world.run(topology.world_size, train_on_ranks, topology)
    assert all(not their_reports for their_reports, _ in others), "callbacks run on global rank 0 only"
    (report,) = reports
    counts = [3 + d for d in range(topology.size(*topology.data_axes))]
    assert report.loss == pytest.approx(sum(n * (10 + d) for d, n in enumerate(counts)) / sum(counts))
    assert report.per_second == pytest.approx(sum(counts))
    assert report.grad_norm == norm
    assert report.loss_scale == 2.0**16
    assert report.parameter_norms
    powers = sum(value**2 for value in report.parameter_norms.values())
    assert math.sqrt(powers) == pytest.approx(norm)


def test_tensorboard_writer_writes_scalars(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with TensorBoardWriter(tmp_path / "unused"):
        pass
    assert not (tmp_path / "unused").exists(), "a writer without reports must not create a file"
    with TensorBoardWriter(tmp_path) as board:
        monitor = Monitor(ProcessGroupRegistry(Topology()), board, every=2)
        for step in range(4):
            monitor(stats_of(step), torch.tensor(float(step)))
        board.close()
    found = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(point.step, point.value) for point in found.Scalars("grad_norm/total")] == [(2, 2.0), (4, 4.0)]
    assert [(point.step, point.value) for point in found.Scalars("loss")] == [(2, 0.5), (4, 2.5)]


def test_tensorboard_writer_without_package_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"needs the package tensorboard .*pip install 'meshstep\[tensorboard\]'"):
        TensorBoardWriter(tmp_path)


# Skipped steps, flush and resuming ------------------------------------------------------------------------------------


def test_non_finite_loss_of_skipped_step_is_excluded_from_report() -> None:
    reports: list[Report] = []
    monitor = Monitor(ProcessGroupRegistry(Topology()), reports.append, every=6)
    # Steps 2, 5, 8 and 11 are skipped.
    losses = [1.0, 2.0, math.nan, 4.0, 5.0, 6.0, 7.0, math.nan, math.inf, 1.0, 1.0, 1.0]
    for step, loss in enumerate(losses):
        monitor(None, 0.5, count=2)
        with no_host_reads():
            monitor(stats_of(step), torch.tensor(loss), count=step + 1)
    counted = [0, 1, 3, 4, 5]  # step 2 counts only with its other micro-batch, whose loss is finite
    total = 6 * 2 * 0.5 + sum(losses[step] * (step + 1) for step in counted)
    assert reports[0].loss == pytest.approx(total / (6 * 2 + sum(step + 1 for step in counted)))
    assert reports[1].loss is not None
    assert math.isnan(reports[1].loss), "step 7 was applied, with a non-finite loss"


def losses_of_micro_batches(data_ranks: int) -> list[float | None]:
    """Report the losses of 24 micro-batches per step; in the third step, which is skipped, one loss is inf.

    Return the reported losses.
    """
    reports: list[Report] = []
    topology, per_rank = Topology(data=data_ranks) if data_ranks > 1 else Topology(), 24 // data_ranks
    with ProcessGroupRegistry(topology) as registry:
        monitor = Monitor(registry, reports.append, every=2)
        for step in range(4):
            for local in range(per_rank):
                number = registry.global_rank * per_rank + local
                loss = math.inf if (step, number) == (2, 7) else math.exp(number * 37 % 24 - 12.0) / (1 + step)
                stats = stats_of(step) if local == per_rank - 1 else None
                monitor(stats, torch.tensor(loss), count=1 + number * number)
    return [report.loss for report in reports]


def test_reported_loss_is_bitwise_equal_on_1_to_4_data_ranks(world: World) -> None:
    found = [world.run(ranks, losses_of_micro_batches, ranks)[0] for ranks in (1, 2, 3, 4)]
    assert found[0][1] is not None
    assert math.isfinite(found[0][1])
    assert len({*map(tuple, found)}) == 1
    # The negative control: sums in float64 in the order of the ranks depend on the number of ranks.
    terms = [torch.tensor(math.exp(number * 37 % 24 - 12.0)).double() * (1 + number * number) for number in range(24)]
    sums = {float(sum(sum(terms[r * k : r * k + k]) for r in range(24 // k))) for k in (24, 12, 8, 6)}
    assert len(sums) > 1


def skipped_on_ranks() -> list[float | None]:
    """Report three steps, of which both ranks skip the third. Its loss is NaN on rank 1. Return the reported losses."""
    reports: list[Report] = []
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        monitor = Monitor(registry, reports.append, every=3)
        for step in range(3):
            bad = step == 2 and registry.global_rank == 1
            monitor(stats_of(step), torch.tensor(math.nan if bad else 10.0 * registry.global_rank + step), count=4)
    return [report.loss for report in reports]


def test_nan_loss_of_one_rank_in_skipped_step_is_excluded_from_report(world: World) -> None:
    (loss,), others = world.run(2, skipped_on_ranks)
    assert loss == pytest.approx((0 + 1 + 2 + 10 + 11) / 5)
    assert others == []


def test_monitor_flush_reports_remaining_steps(clock: list[float]) -> None:
    reports: list[Report] = []
    monitor = Monitor(ProcessGroupRegistry(Topology()), reports.append, every=3)
    monitor.flush()
    assert reports == []
    for step in range(5):
        clock[0] += 2.0
        monitor(stats_of(step), torch.tensor(float(step)), count=3)
    monitor.flush()
    monitor.flush()
    assert [(report.step, report.loss, report.grad_norm) for report in reports] == [(3, 1.0, 3.0), (5, 3.5, 5.0)]
    assert reports[1].per_second == pytest.approx(6 / 4)


def test_monitor_continues_counting_from_loaded_state() -> None:
    reports: list[Report] = []
    first = Monitor(ProcessGroupRegistry(Topology()), every=2)
    for step in range(4):
        first(stats_of(step), 1.0)
    assert first.state_dict() == {"step": 4, "skipped_steps": 1}
    second = Monitor(ProcessGroupRegistry(Topology()), reports.append, every=2)
    second(stats_of(2), 100.0)  # before the state is loaded
    second.load_state_dict(first.state_dict())
    with pytest.raises(
        ValueError, match=r"is not the state of a Monitor .*; give the result of Monitor.state_dict\(\)"
    ):
        second.load_state_dict({"step": 3})
    for step in range(4, 6):
        second(stats_of(step), 1.0)
    assert [(report.step, report.loss, report.skipped_steps) for report in reports] == [(6, 1.0, 2)]
