"""Order of asynchronous copies and collectives on simulated CUDA streams; see `stream_simulation`."""

from __future__ import annotations

import inspect
import math
import re
import textwrap
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fake_cuda import innermost_calls
from gathered_objects import objects_gathered_by, said_by_all
from loops import using
from meshstep.amp import Bf16
from meshstep.optim import (
    SOAP,
    AsyncSaver,
    Bf16Compression,
    CosineAnnealingLR,
    HalfStates,
    HoldOnSkip,
    Muon,
    Offloaded,
    ParallelOptimizer,
    Shampoo,
    Sharded,
    SpectralNorms,
    Telemetry,
    ZClip,
)
from meshstep.optim.checkpoint import save
from meshstep.optim.checkpoint.contents import SavedTensor, scalars_on_host
from meshstep.optim.checkpoint.save import Snapshot
from meshstep.optim.gradients.buckets import InFlight, NoCompression
from meshstep.optim.schedule import FlagCopy
from meshstep.optim.states import offloaded, sharded
from meshstep.optim.states.offloaded import HostBucket, TransferStreams
from meshstep.optim.states.sharded import ZeroBucket
from meshstep.optim.step import skips
from meshstep.optim.step.host_copy import HostCopy
from meshstep.optim.step.skips import SkipMonitor
from meshstep.optim.step.update_request import HostDecision
from meshstep.optim.whole.optimizer import StepsTaken
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from meshstep.parallel.layout.shard import Box
from meshstep.parallel.mesh.process_group_collectives import REDUCE_SCATTER
from meshstep.testing import fake_world
from set_gradients import run_backward, setting_gradients
from stream_simulation import simulated_cuda
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, StepLR

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="needs a torch built with CUDA for the fake GPU"
)

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
SHAPES = ((6, 5), (6,), (4, 6), (4,), (3, 3))
# Maximum size of a gradient bucket in bytes. With 2 and with 4 bytes per element, the last two gradients share a bucket,
# and each other gradient has its own. The fake backend fills the other rank's slice with a copy of this rank's slice. With
# these buckets, this copies no padding into a weight.
GRADIENT_BUCKET = 52
SKIPPED = (2, 5, 6)  # steps with a non-finite gradient


def fused_adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, fused=True)


@dataclass
class Training:
    """A training run with skipped steps.

    Args:
        inner: Returns the wrapped optimizer.
        options: Arguments of `ParallelOptimizer`, in addition to ``max_norm=1.0`` and ``check_replicas=False``.
        schedule: Returns a schedule. (A schedule waits for each step, and would hide other missing waits.)
        telemetry: Arguments of `Telemetry`; None: no telemetry.
        ranks: Number of data-parallel ranks, of which only rank 0 runs.
        own_streams: True: each step runs in a new stream, which waits for the previous one.
        micro_batches: Number of backwards per step. They set gradients from the last parameter to the first, and run
            the parameters' hooks, so reductions start in backward. 0: gradients are set without a backward.
        saved_to: The directory of an `AsyncSaver` that saves after each step; None: no checkpoints.
    """

    inner: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = fused_adamw
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    schedule: Callable[[ParallelOptimizer], LRScheduler] | None = None
    telemetry: dict[str, Any] | None = None
    steps: int = 9
    ranks: int = 1
    own_streams: bool = False
    micro_batches: int = 0
    saved_to: Path | None = None

    def run(self, device: torch.device) -> tuple[list[Tensor], list[float], int]:
        steps = self.iterate(device)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    def iterate(self, device: torch.device) -> Generator[None, None, tuple[list[Tensor], list[float], int]]:
        """Yield after each step, and return the value of `run`."""
        params = [
            nn.Parameter(torch.linspace(-1, 1, math.prod(shape)).view(shape).to(device, self.dtype)) for shape in SHAPES
        ]
        options = {"max_norm": 1.0, "check_replicas": False, **self.options}
        registry = ProcessGroupRegistry(Topology() if self.ranks == 1 else Topology(data=self.ranks))
        for index, param in enumerate(params):
            annotate(param, P(), str(index))
        optimizer = ParallelOptimizer(self.inner(params), registry, **options)
        schedule = None if self.schedule is None else self.schedule(optimizer)
        measured = None if self.telemetry is None else Telemetry(optimizer, every=1, **self.telemetry)
        if self.saved_to is not None and torch.__version__.startswith("2.11."):
            pytest.skip("the fake backend of torch 2.11 can't create the process group that AsyncSaver needs")
        model, saver = nn.ParameterList(params), None if self.saved_to is None else AsyncSaver(self.saved_to, registry)
        rates = []
        for step in range(self.steps):
            with self.stream(device):
                for _ in range(self.micro_batches):
                    run_backward(optimizer, self.gradients(params, step))
                if not self.micro_batches:
                    with setting_gradients(optimizer):
                        for tensor, gradient in self.gradients(params, step):
                            tensor.grad = gradient
                optimizer.step()
                rates.append(float(optimizer.param_groups[0]["lr"]))
                if schedule is not None:
                    schedule.step()
                optimizer.zero_grad()
                if saver is not None:
                    saver.save(model, optimizer, lr_scheduler=schedule)
            yield
        if saver is not None:
            saver.close()
        if measured is not None:
            assert measured.last is not None
            measured.last.values.cpu()
        return [param.detach().cpu() for param in params], rates, optimizer.skipped_steps

    def gradients(self, params: Sequence[Tensor], step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter, from the last to the first, and a new gradient of it."""
        for index, param in reversed([*enumerate(params)]):
            value = math.inf if step in SKIPPED else math.sin(step + index)
            dtype = getattr(param, "grad_dtype", None) or param.dtype
            yield param, torch.full(param.shape, value, device=param.device, dtype=dtype)

    @contextmanager
    def stream(self, device: torch.device) -> Iterator[None]:
        """Run a step in a new stream if ``own_streams``."""
        if device.type == "cpu" or not self.own_streams:
            yield
            return
        before, own = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        own.wait_stream(before)
        with torch.cuda.stream(own):
            yield
        before.wait_stream(own)


OFFLOADED = Training(options={"states": Offloaded(0.5)})
RUNS: dict[str, Training] = {
    "fp32": Training(),
    "full lag of skip counts": Training(steps=20),
    "bf16": Training(options={"precision": "bf16"}, dtype=torch.bfloat16),
    "fp16": Training(options={"precision": "fp16"}, dtype=torch.float16),
    "schedule": Training(schedule=lambda optimizer: CosineAnnealingLR(optimizer, 12)),
    "schedule of torch": Training(schedule=lambda optimizer: HoldOnSkip(StepLR(optimizer, 2, 0.5))),
    "stateful clipping rule": Training(options={"max_norm": ZClip(warm_up=2)}),
    "half offloaded": OFFLOADED,
    "offloaded": Training(options={"states": Offloaded(1.0)}),
    "offloaded, bf16": Training(options={"states": Offloaded(1.0), "precision": "bf16"}, dtype=torch.bfloat16),
    "offloaded at once": Training(lambda params: torch.optim.SGD(params, 0.1), {"states": Offloaded(0.5)}),
    "telemetry": Training(telemetry={}),
    "spectral norms": Training(telemetry={"spectral": SpectralNorms()}, steps=5),
    "SOAP": Training(lambda params: SOAP(params, lr=0.01), steps=5),
    "Shampoo": Training(lambda params: Shampoo(params, lr=0.01), steps=5),
    "own stream per step": Training(own_streams=True),
    "offloaded, own stream per step": replace(OFFLOADED, own_streams=True),
    "SOAP, own stream per step": Training(lambda params: SOAP(params, lr=0.01), steps=5, own_streams=True),
}
# Reductions start in backward. Gradients have four buckets; see `small_buckets`. Updates are proportional to gradients, so
# that missing sums change the weights.
BACKWARD = Training(lambda params: torch.optim.SGD(params, 0.1, fused=True), steps=4, ranks=2, micro_batches=1)
OVERLAP = {"overlap": True, "bucket_bytes": GRADIENT_BUCKET, "max_norm": 100.0}
ZERO_2 = {"states": Sharded("data", gradients=True), "max_norm": 100.0}
COMPRESSED = {**ZERO_2, "states": Sharded("data", gradients=True, compression=Bf16Compression())}
IN_BACKWARD: dict[str, Training] = {
    "overlap": replace(BACKWARD, options=OVERLAP),
    "overlap, accumulation": replace(BACKWARD, options={**OVERLAP, "accumulation_steps": 2}, micro_batches=2),
    "overlap, fp16": replace(BACKWARD, options={**OVERLAP, "precision": "fp16"}, dtype=torch.float16),
    "overlap, compressed": replace(BACKWARD, options={**OVERLAP, "compression": Bf16Compression()}),
    "overlap, own stream per step": replace(BACKWARD, options=OVERLAP, own_streams=True),
    "ZeRO-2 in backward": replace(BACKWARD, options=ZERO_2),
    "ZeRO-2, accumulation": replace(BACKWARD, options={**ZERO_2, "accumulation_steps": 2}, micro_batches=2),
    "ZeRO-2, bf16": replace(BACKWARD, options={**ZERO_2, "precision": "bf16"}, dtype=torch.bfloat16),
    "ZeRO-2, compressed": replace(BACKWARD, options=COMPRESSED),
    "ZeRO-2, own stream per step": replace(BACKWARD, options=ZERO_2, own_streams=True),
}
# Gradients of other ranks are missing, so these runs have no reference.
ON_TWO_RANKS: dict[str, Training] = {
    "replicated": Training(ranks=2),
    "ZeRO-1": Training(options={"states": Sharded("data")}, ranks=2),
    "ZeRO-2": Training(options={"states": Sharded("data", gradients=True)}, ranks=2),
    "ZeRO-1, bf16": Training(options={"states": Sharded("data"), "precision": "bf16"}, dtype=torch.bfloat16, ranks=2),
    "ZeRO-2, offloaded": Training(options={"states": (Sharded("data", gradients=True), Offloaded(1.0))}, ranks=2),
    "bfloat16 gradient sums": Training(options={"compression": Bf16Compression()}, ranks=2),
    "fixed order of sums": Training(options={"sum_order": "fixed", "accumulation_steps": 1}, ranks=2),
    "telemetry on two ranks": Training(telemetry={}, ranks=2),
    "Muon": Training(lambda params: Muon(params, lr=0.01), steps=5, ranks=2),
    "ZeRO-1, own stream per step": Training(options={"states": Sharded("data")}, ranks=2, own_streams=True),
}


CLIPPED = {"max_norm": ZClip(warm_up=2), "accumulation_steps": 2}
HALF_OFFLOADED = (Sharded("data", gradients=True), Offloaded(0.5))
EVERYTHING = Training(
    options={**CLIPPED, "states": HALF_OFFLOADED},
    schedule=lambda optimizer: CosineAnnealingLR(optimizer, 12),
    telemetry={},
    steps=4,
    ranks=2,
    micro_batches=2,
)
HALF_EVERYTHING = replace(EVERYTHING, dtype=torch.bfloat16)
SPLIT, ROUNDED = Bf16(split_masters=True), Bf16(stochastic_rounding=True)
# Many features in one run.
COMBINED: dict[str, Training] = {
    "fp32": EVERYTHING,
    "own stream per step": replace(EVERYTHING, own_streams=True),
    "fp16": replace(EVERYTHING, options={**EVERYTHING.options, "precision": "fp16"}, dtype=torch.float16),
    "split masters": replace(HALF_EVERYTHING, options={**EVERYTHING.options, "precision": SPLIT}),
    "stochastic rounding": replace(HALF_EVERYTHING, options={**EVERYTHING.options, "precision": ROUNDED}),
    "HalfStates": replace(EVERYTHING, options={**CLIPPED, "states": (*HALF_OFFLOADED, HalfStates())}),
    "HalfStates, bf16": replace(
        HALF_EVERYTHING, options={**CLIPPED, "states": (*HALF_OFFLOADED, HalfStates()), "precision": "bf16"}
    ),
    "HalfStates, split masters": replace(
        HALF_EVERYTHING, options={**CLIPPED, "states": (ZERO_2["states"], HalfStates()), "precision": SPLIT}
    ),
    "ZeRO-1": replace(EVERYTHING, options={**CLIPPED, "states": (Sharded("data"), Offloaded(0.5))}),
    "overlap": replace(EVERYTHING, options={**CLIPPED, **OVERLAP, "states": Offloaded(0.5)}),
    "SOAP": replace(EVERYTHING, inner=lambda params: SOAP(params, lr=0.01), options={**CLIPPED, **OVERLAP}),
    "Muon": replace(EVERYTHING, inner=lambda params: Muon(params, lr=0.01), options={**CLIPPED, **OVERLAP}),
}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit buckets of offloaded parameters and of `Sharded`, so that most runs have several."""
    monkeypatch.setattr(offloaded, "BUCKET_BYTES", 160)
    monkeypatch.setattr(sharded, "BUCKET_BYTES", GRADIENT_BUCKET)


@contextmanager
def world_of(training: Training) -> Iterator[None]:
    """Replace the ranks of ``training`` other than rank 0."""
    with ExitStack() as stack:
        if training.ranks > 1:
            stack.enter_context(fake_world(training.ranks))
            stack.enter_context(objects_gathered_by(said_by_all))
        yield


def simulate(training: Training) -> tuple[list[str], list[Tensor]]:
    with world_of(training), simulated_cuda(collectives_on=SECOND) as simulation:
        weights, *_ = training.run(SECOND)
    return simulation.findings, weights


def findings_of(training: Training) -> list[str]:
    return simulate(training)[0]


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_training_on_second_simulated_gpu_has_no_unordered_stream_access(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, learning rates and skipped steps are those of a run on the CPU."""
    training = RUNS[name]
    if training.steps < skips.LAG:
        monkeypatch.setattr(skips, "LAG", 3)
    with simulated_cuda(collectives_on=SECOND) as simulation:
        weights, rates, skipped = training.run(SECOND)
    assert simulation.findings == []
    assert simulation.transfers["to the host"] >= training.steps
    expected = training.run(CPU)
    torch.testing.assert_close(weights, expected[0])
    assert (rates, skipped) == expected[1:]


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_training_on_one_of_two_ranks_has_no_unordered_stream_access(name: str) -> None:
    assert findings_of(ON_TWO_RANKS[name]) == []


def weights_on_cpu(training: Training) -> list[Tensor]:
    """Return the final weights of a run on the CPU, in which other ranks have the gradients of rank 0 or none."""
    with world_of(training):
        return training.run(CPU)[0]


@cache
def has_fake_sums() -> bool:
    """Return whether torch's fake backend writes the result of a reduce-scatter. Some versions leave it as it is."""
    with fake_world(2):
        own = torch.zeros(2)
        getattr(dist, REDUCE_SCATTER)(own, torch.ones(4))
    return bool(own.all())


@pytest.mark.default_cases(4)
@pytest.mark.parametrize("name", IN_BACKWARD)
def test_gradient_reduction_in_backward_has_no_unordered_stream_access(name: str) -> None:
    findings, weights = simulate(IN_BACKWARD[name])
    assert findings == []
    if "states" not in IN_BACKWARD[name].options or has_fake_sums():
        torch.testing.assert_close(weights, weights_on_cpu(IN_BACKWARD[name]))


class LateExecutor:
    """A `ThreadPoolExecutor` whose thread runs each call as late as possible: when the result is requested."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, call: Callable[..., Any], *args: Any) -> Any:
        return SimpleNamespace(result=lambda: call(*args))

    def shutdown(self) -> None:
        pass


@contextmanager
def saving_late() -> Iterator[list[dict[str, Tensor]]]:
    """Let `AsyncSaver` write checkpoints as late as possible, to the list that is yielded and not to files."""
    written: list[dict[str, Tensor]] = []

    def write(path: Path, snapshot: Snapshot, *_: Any) -> Path:
        written.append(
            {
                f"{key} {box}": part.clone()
                for key, tensor in snapshot.tensors.items()
                for box, part in tensor.parts.items()
            }
        )
        return path

    with mock.patch.object(save, "ThreadPoolExecutor", LateExecutor), mock.patch.object(save, "write", write):
        yield written


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("name", COMBINED)
def test_combined_features_have_no_unordered_stream_access_and_save_the_checkpoints_of_a_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skips, "LAG", 3)
    training = replace(COMBINED[name], saved_to=tmp_path)
    with using("torch"), saving_late() as saved:
        findings, weights = simulate(training)
    assert findings == []
    assert len(saved) == training.steps
    if "states" in training.options and not has_fake_sums():
        return
    with using("torch"), saving_late() as expected:
        torch.testing.assert_close(weights, weights_on_cpu(training))
    torch.testing.assert_close(saved, expected)


@pytest.mark.parametrize(
    ("name", "method", "most"), [("overlap", "all_reduce", 4), ("ZeRO-2 in backward", "reduce_scatter", 3)]
)
def test_compute_stream_waits_in_backward_for_no_reduction_or_for_the_oldest_of_three(
    name: str, method: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    works: list[Any] = []
    in_flight: list[int] = []
    start = getattr(NoCompression, method)

    def started(*args: Any) -> Any:
        wait = start(*args)
        works.append(wait.__self__)
        clock = works[-1].event.simulation.current_stream(SECOND).clock
        in_flight.append(sum(any(clock.get(one, 0) < at for one, at in work.event.clock.items()) for work in works))
        return wait

    monkeypatch.setattr(NoCompression, method, started)
    assert findings_of(IN_BACKWARD[name]) == []
    assert in_flight == [1, 2, 3, most] * IN_BACKWARD[name].steps


@pytest.mark.parametrize("name", ["schedule", "half offloaded", "SOAP"])
def test_models_on_two_simulated_gpus_have_no_unordered_stream_access(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skips, "LAG", 3)
    with simulated_cuda() as simulation:
        for _ in zip(RUNS[name].iterate(FIRST), RUNS[name].iterate(SECOND), strict=True):
            pass
    assert simulation.findings == []


@dataclass(frozen=True)
class Defect:
    """A change of the library's code that breaks a synchronization.

    Args:
        owner: The class, or the module of a function.
        old: Text in the source code of the method, which occurs once.
        new: The text that replaces it; ``KEPT`` is an empty dict, and ``on_new_stream`` is the function below.
        run: A key of `RUNS`, `ON_TWO_RANKS` or `IN_BACKWARD`; "" for a defect that is tested with other runs.
        finding: A regular expression that matches the start of each finding.
    """

    owner: Any
    method: str
    old: str
    new: str
    run: str
    finding: str = "the host (reads|writes) pinned memory"  # fused optimizers may write gradients

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        method = getattr(self.owner, self.method)
        code = textwrap.dedent(inspect.getsource(method))
        assert code.count(self.old) == 1
        made: dict[str, Any] = {}
        names = inspect.unwrap(method).__globals__
        monkeypatch.setitem(names, "KEPT", {})
        monkeypatch.setitem(names, "on_new_stream", on_new_stream)
        exec(code.replace(self.old, self.new), names, made)
        monkeypatch.setattr(self.owner, self.method, made[self.method])


def on_new_stream(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that runs ``call`` in a new stream, which waits for no other stream."""

    def run() -> Any:
        with torch.cuda.stream(torch.cuda.Stream(SECOND)):
            return call()

    return run


ON_DEVICE = r"stream \d+ of cuda:1 (reads|writes) device memory"
FREED = r"memory of stream \d+ of cuda:1 was freed before stream \d+ of cuda:1 has finished"
WAIT, NO_WAIT = "synchronize()", "query()"
DEFECTS: dict[str, Defect] = {
    "event of FlagCopy on the current device": Defect(
        HostCopy, "__init__", "current_stream(source.device)", "current_stream()", "schedule"
    ),
    "wait of FlagCopy removed": Defect(FlagCopy, "read", "self.wait()", "self.buffer", "schedule"),
    "wait of HostBucket removed": Defect(HostBucket, "wait", WAIT, NO_WAIT, "offloaded"),
    "transfers wait for the current device": Defect(
        TransferStreams,
        "opened",
        "current_stream(self.device)",
        "current_stream()",
        "offloaded",
        f"{ON_DEVICE}|{FREED}",
    ),
    "transfers do not wait for gradients": Defect(
        TransferStreams, "opened", "stream.wait_stream(compute)", "pass", "offloaded", ON_DEVICE
    ),
    "buffer of another stream without record_stream": Defect(
        HostBucket,
        "_down",
        "flat = self._flat_there(host)",
        "other = torch.cuda.stream(torch.cuda.default_stream(self.device)); other.__enter__(); "
        "flat = self._flat_there(host); other.__exit__(None, None, None)",
        "offloaded",
        FREED,
    ),
    "event after a download removed": Defect(HostBucket, "_down", "self._mark()", "", "half offloaded"),
    "wait for gradients removed": Defect(HostBucket, "finish", "self.wait()", "", "half offloaded"),
    "wait for all-reduce removed": Defect(
        NoCompression, "all_reduce", "work.wait", "lambda: None", "replicated", ON_DEVICE
    ),
    "wait for reduce-scatter removed": Defect(
        NoCompression, "reduce_scatter", "work.wait", "lambda: None", "ZeRO-2", ON_DEVICE
    ),
    "wait for all-reduce in backward removed": Defect(
        NoCompression, "all_reduce", "work.wait", "lambda: None", "overlap", ON_DEVICE
    ),
    "wait for reduce-scatter in backward removed": Defect(
        NoCompression, "reduce_scatter", "work.wait", "lambda: None", "ZeRO-2 in backward", ON_DEVICE
    ),
    "reduction in backward started on another stream": Defect(
        InFlight, "run", "start()", "on_new_stream(start)()", "overlap", f"{ON_DEVICE}|{FREED}"
    ),
    "reduction in backward finished on another stream": Defect(
        InFlight, "run", "start()", "on_new_stream(start())", "ZeRO-2 in backward", f"{ON_DEVICE}|{FREED}"
    ),
    "wait for all-gather removed": Defect(ZeroBucket, "gather", "work.wait()", "", "ZeRO-1", ON_DEVICE),
    "gradients of all buckets in one buffer": Defect(
        HostBucket,
        "start",
        "self._gradients = self._flat(self._grad_dtype)",
        "self._gradients = KEPT.setdefault(0, torch.empty(512, pin_memory=True))[: self._numel]",
        "offloaded",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", DEFECTS)
def test_simulation_finds_planted_stream_synchronization_defect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    defect = DEFECTS[name]
    defect.plant(monkeypatch)
    monkeypatch.setattr(skips, "LAG", 3)
    with using("torch"):  # the simulation records torch operators, and C loops use none
        findings = findings_of((RUNS | ON_TWO_RANKS | IN_BACKWARD)[defect.run])
    assert findings
    assert all(re.match(defect.finding, finding) for finding in findings), findings


SAVER_DEFECTS = {
    "wait before a checkpoint is written removed": Defect(AsyncSaver, "_write", "event.synchronize()", "pass", ""),
    "event of a checkpoint on the current device": Defect(
        save, "_copy_to_host", "current_stream(device)", "current_stream()", ""
    ),
}
FOUND_WITH_ALL_FEATURES = (
    "wait of FlagCopy removed",
    "wait of HostBucket removed",
    "buffer of another stream without record_stream",
    "wait for reduce-scatter removed",
    "reduction in backward finished on another stream",
    "wait for all-gather removed",
    *SAVER_DEFECTS,
)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("name", FOUND_WITH_ALL_FEATURES)
def test_simulation_of_combined_features_finds_planted_defect(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defect = (DEFECTS | SAVER_DEFECTS)[name]
    defect.plant(monkeypatch)
    monkeypatch.setattr(skips, "LAG", 3)
    with using("torch"), saving_late():
        findings = findings_of(replace(COMBINED["fp32"], saved_to=tmp_path))
    assert findings
    assert all(re.match(defect.finding, finding) for finding in findings), findings


@pytest.mark.parametrize("name", ["overlap", "ZeRO-2 in backward"])
def test_unfinished_reductions_in_backward_change_simulated_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect breaks no order of streams: no operation uses the sums of the last buckets."""
    if "states" in IN_BACKWARD[name].options and not has_fake_sums():
        pytest.skip("torch's fake backend makes no sums")
    expected = weights_on_cpu(IN_BACKWARD[name])
    Defect(InFlight, "run", "while to_the_end and", "while False and", name).plant(monkeypatch)
    _, weights = simulate(IN_BACKWARD[name])
    assert not torch.allclose(weights[0], expected[0])


def test_removed_wait_before_c_update_loops_makes_weights_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """C loops read gradients without an operator, so they read the NaN of a copy that has not run."""
    DEFECTS["wait for gradients removed"].plant(monkeypatch)
    with simulated_cuda(collectives_on=SECOND), using("auto"):
        weights, *_ = OFFLOADED.run(SECOND)
    assert any(weight.isnan().any() for weight in weights)


def test_offloaded_transfers_overlap_with_each_other_and_with_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The upload of a bucket waits neither for the download of the next one, nor for the update on the device."""
    waited: list[tuple[bool, bool]] = []
    send = HostBucket.send

    def recorded(bucket: HostBucket) -> None:
        send(bucket)
        streams: Any = bucket._streams
        compute: Any = torch.cuda.current_stream(bucket.device)
        waited.append(tuple(streams.up.clock.get(one, 0) == one.issued for one in (streams.down, compute)))

    monkeypatch.setattr(HostBucket, "send", recorded)
    with simulated_cuda(collectives_on=SECOND) as simulation:
        replace(OFFLOADED, options={"states": Offloaded(0.8)}).run(SECOND)
    assert simulation.findings == []
    per_step = len(waited) // OFFLOADED.steps
    assert per_step >= 2
    for step in range(OFFLOADED.steps):
        *first, last = waited[step * per_step : (step + 1) * per_step]
        assert first == [(False, False)] * (per_step - 1)
        assert last == (True, False)  # no download follows that of the last bucket


def test_step_counts_allocate_pinned_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    with simulated_cuda(collectives_on=SECOND) as simulation:
        pin = simulation.pin
        monkeypatch.setattr(simulation, "pin", lambda tensor: pinned.append(tensor.dim()) or pin(tensor))  # type: ignore[func-returns-value]
        counts = [torch.zeros((), device=SECOND) for _ in SHAPES]
        slots: Any = [SimpleNamespace(position=at, state={"step": count}) for at, count in enumerate(counts)]
        taken = StepsTaken()
        for _ in range(3):
            taken.note(slots)
    assert len(pinned) == 1


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", ["SOAP", "Shampoo"])
def test_step_of_preconditioned_optimizer_waits_once_for_all_step_counts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step also checks gradients on the host."""
    calls: list[str] = []
    by_step: list[list[str]] = []
    with simulated_cuda(collectives_on=SECOND) as simulation:
        wait = simulation.wait
        monkeypatch.setattr(simulation, "wait", lambda clock: calls.append(innermost_calls()) or wait(clock))  # type: ignore[func-returns-value]
        for _ in RUNS[name].iterate(SECOND):
            by_step.append(calls[:])
            calls.clear()
    assert [len(waits) for waits in by_step[1:]] == [1] * (RUNS[name].steps - 1)
    assert all("whole/optimizer.py" in wait for waits in by_step[1:] for wait in waits)
    assert len([wait for wait in by_step[0] if "whole/optimizer.py" in wait]) == 1


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("optimizer", [SOAP, Shampoo])
def test_step_counts_on_host_are_right_after_a_step_without_some_gradients(
    optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    """Without `ParallelOptimizer`, a step changes only parameters with gradients."""

    def weights_on(device: torch.device) -> list[Tensor]:
        params = [nn.Parameter(torch.linspace(-1, 1, 6).view(2, 3).to(device)) for _ in range(3)]
        stepped = optimizer(params, lr=0.01)
        for step, with_gradient in enumerate([(0, 1, 2), (1,), (1, 2), (0, 1), (0, 1, 2)]):
            for index in with_gradient:
                params[index].grad = torch.full((2, 3), math.sin(step + index), device=device)
            stepped.step()
            stepped.zero_grad()
        return [param.detach().cpu() for param in params]

    with simulated_cuda() as simulation:
        weights = weights_on(SECOND)
    assert simulation.findings == []
    torch.testing.assert_close(weights, weights_on(CPU))


def saved(device: torch.device) -> tuple[Snapshot, Tensor]:
    weight = torch.linspace(-1, 1, 12).view(3, 4).to(device)
    tensors = {"weight": SavedTensor((3, 4), weight.dtype, {Box((0, 0), (3, 4)): weight})}
    return Snapshot(tensors, record={}, random={}, common={}, facts={}, keep=1), weight


def test_checkpoint_copy_does_not_block_the_host_and_keeps_old_weights() -> None:
    with simulated_cuda(collectives_on=SECOND) as simulation:
        snapshot, weight = saved(SECOND)
        before = dict(simulation.host)
        copy, arrived = save._copy_to_host(snapshot)
        assert simulation.host == before
        weight.add_(1)
        (part,) = copy.tensors["weight"].parts.values()
        assert simulation.is_pinned(part)
        for event in arrived:
            event.synchronize()
        assert torch.equal(part, torch.linspace(-1, 1, 12).view(3, 4))
    assert simulation.findings == []


def test_simulation_finds_checkpoint_copy_read_before_its_event() -> None:
    with simulated_cuda(collectives_on=SECOND) as simulation:
        snapshot, _ = saved(SECOND)
        copy, _ = save._copy_to_host(snapshot)
        (part,) = copy.tensors["weight"].parts.values()
        assert part.isnan().all()
    assert any(re.match("the host reads pinned memory", finding) for finding in simulation.findings)


def test_scalar_states_are_copied_to_the_host_with_one_wait_per_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    def states(device: torch.device) -> dict[int, dict[str, Any]]:
        return {
            position: {
                "step": torch.tensor(position + 0.5).to(device),
                "rate": torch.tensor(position + 0.1, dtype=torch.float64).to(device),
                "moment": torch.ones(2, 3).to(device),
                "name": "a",
            }
            for position in (4, 9)
        }

    waits: list[object] = []
    with simulated_cuda(collectives_on=SECOND) as simulation:
        before = states(SECOND)
        wait = simulation.wait
        monkeypatch.setattr(simulation, "wait", lambda clock: waits.append(clock) or wait(clock))  # type: ignore[func-returns-value]
        found = scalars_on_host(before)
        assert len(waits) == 2
    for position, state in states(CPU).items():
        assert list(found[position]) == list(state)
        for key in ("step", "rate"):
            assert torch.equal(found[position][key], state[key])
        assert found[position]["moment"] is before[position]["moment"]


NAN_READ = pytest.raises(ValueError, match="cannot convert float NaN to integer")


@pytest.mark.parametrize(
    ("method", "old", "new"),
    [
        ("_copy_to_host", "current_stream(self.counts.device)", "current_stream()"),
        ("_copy_to_host", "event.record(torch.cuda.current_stream(self.counts.device))", "pass"),
        ("_earlier_counts", "event.synchronize()", "pass"),
        ("_copy_to_host", "self._copies[slot]", "self._copies[(slot + 1) % LAG]"),
    ],
    ids=["event on the current device", "event removed", "wait removed", "buffer reused one step early"],
)
def test_planted_synchronization_defect_of_skip_counts_reads_unwritten_memory(
    method: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`SkipMonitor` reads pinned memory without an operator, so it reads the NaN of a copy that has not run."""
    Defect(SkipMonitor, method, old, new, "fp32").plant(monkeypatch)
    monkeypatch.setattr(skips, "LAG", 3)
    with NAN_READ:
        findings_of(RUNS["fp32"])


@pytest.mark.parametrize(
    ("method", "old", "new"),
    [("__init__", "current_stream(source.device)", "current_stream()"), ("wait", WAIT, NO_WAIT)],
    ids=["event on the current device", "wait removed"],
)
def test_simulation_finds_planted_synchronization_defect_of_step_counts(
    method: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    defect = Defect(HostCopy, method, old, new, "SOAP")
    defect.plant(monkeypatch)
    with simulated_cuda(collectives_on=SECOND) as simulation, NAN_READ:
        RUNS["SOAP"].run(SECOND)
    (finding,) = simulation.findings
    assert re.match(defect.finding, finding)


@pytest.mark.parametrize(
    ("method", "old", "new"),
    [("__init__", "current_stream(source.device)", "current_stream()"), ("wait", WAIT, NO_WAIT)],
    ids=["event on the current device", "wait removed"],
)
def test_simulation_finds_planted_synchronization_defect_of_host_decision(
    method: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test copies a decision outside of a step. In a step the defects have no effect, because an offloaded bucket also
    waits for its gradients, which arrive after the decision."""

    def findings() -> list[str]:
        with simulated_cuda() as simulation:
            skip = torch.ones((), device=SECOND)
            HostDecision(skip, skip / 4).wait()
        return simulation.findings

    assert findings() == []
    Defect(HostCopy, method, old, new, "").plant(monkeypatch)
    assert len(findings()) == 2


def test_host_decision_returns_device_values_and_none_for_missing_factor() -> None:
    with simulated_cuda():
        skip = torch.ones((), device=SECOND)
        found, factor = HostDecision(skip, None).wait()
        assert (float(found), factor) == (1.0, None)
        found, factor = HostDecision(skip, skip / 4).wait()
    assert factor is not None
    assert (found.device, float(found), float(factor)) == (CPU, 1.0, 0.25)
