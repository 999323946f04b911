"""Whole steps on CUDA tensors, on a machine without a GPU: one device throughout, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import product
from math import inf
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cpu_graph import capturing
from fake_cuda import CUDA, Log, fake_cuda
from meshstep.amp import Bf16, NaiveFp16
from meshstep.optim import (
    Adaptive,
    ByGroup,
    ByNorm,
    ByValue,
    HalfStates,
    Measure,
    Monitor,
    Offloaded,
    ParallelOptimizer,
    ParameterEntry,
    PerParameter,
    Reduce,
    ReductionPlan,
    Sharded,
)
from meshstep.optim.norm.replicas import ReplicaCheck
from meshstep.optim.step.update import LAG, SkipMonitor
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

CPU = torch.device("cpu")
MODES: dict[str, tuple[Any, torch.dtype]] = {
    "fp32": ("fp32", torch.float32),
    "bf16": ("bf16", torch.bfloat16),
    "bf16, rounded": (Bf16(stochastic_rounding=True), torch.bfloat16),
    "fp16": (NaiveFp16(), torch.float16),
}
PLACED: dict[str, dict[str, Any]] = {
    "replicated": {},
    "ZeRO-1": {"states": Sharded("data")},
    "ZeRO-2": {"states": Sharded("data", gradients=True)},
    "overlap": {"data_parallel": Reduce(overlap=True)},
    "half states": {"states": HalfStates()},
}
RULES: dict[str, dict[str, Any]] = {
    "none": {},
    "norm": {"max_norm": 1.0},
    "value": {"max_norm": ByValue(1.0)},
    "groups": {"max_norm": ByGroup((1.0,))},
    "parameters": {"max_norm": PerParameter(1.0)},
    "units": {"max_norm": Adaptive()},
    "largest": {"max_norm": ByNorm(1.0, norm_type=inf)},
    "p = 3": {"measure": Measure(norm_type=3.0, per_parameter=True, check_replicas=False), "max_norm": 0.5},
    "one by one": {"measure": Measure(reduction="per_group", check_replicas=False), "max_norm": 0.5},
    "two micro-batches": {"max_norm": 0.5, "accumulation_steps": 2},
}
CASES = [
    (placed, mode, rule)
    for placed, mode, rule in product(PLACED, MODES, RULES)
    if (placed, mode) != ("half states", "bf16, rounded")  # it has them in bfloat16 already
]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
    pytest.mark.skipif(
        not torch.backends.cuda.is_built(), reason="this torch is built without CUDA: no fake GPU either"
    ),
]


@contextmanager
def world(topology: Topology) -> Iterator[None]:
    """Rank 0 of it; collectives do nothing, and all ranks say what it says."""
    if topology.world_size == 1:
        yield
        return

    def said_by_all(values: list[Any], value: Any, group: Any = None) -> None:
        values[:] = [value] * len(values)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=topology.world_size)
    try:
        with mock.patch.object(dist, "all_gather_object", said_by_all):
            yield
    finally:
        dist.destroy_process_group()


def steps(
    topology: Topology,
    mode: str,
    options: dict[str, Any],
    collectives_on: torch.device = CUDA,
    count: int = 2,
    graph: bool = False,
) -> list[Log]:
    """What each of some steps does, the last one in a CUDA graph if asked for. (To compare copies reads the host in the
    first step.)"""
    precision, dtype = MODES[mode]
    options = {"measure": Measure(check_replicas=False), **options}
    with world(topology), fake_cuda(collectives_on=collectives_on) as logging:
        model = nn.ParameterDict(
            {
                f"{kind} {index}": nn.Parameter(torch.ones(shape, device="cuda", dtype=dtype))
                for index in range(count)
                for kind, shape in (("split", (6, 5)), ("whole", (6,)))
            }
        )
        for name, param in model.items():
            annotate(param, P("tensor") if "split" in name and "tensor" in topology.axes else P(), name)
        adamw = torch.optim.AdamW(model.parameters(), fused=True)
        optimizer = ParallelOptimizer(adamw, ProcessGroupRegistry(topology), precision=precision, **options)
        if graph:
            adamw.param_groups[0]["lr"] = torch.tensor(1e-3, device="cuda")
        logs = []
        for index in range(3):
            with logging() as log, capturing() if graph and index == 2 else nullcontext():
                for _ in range(options.get("accumulation_steps", 1)):
                    with optimizer.window():
                        for param in model.values():
                            grad_dtype = getattr(param, "grad_dtype", None) or param.dtype
                            param.grad = torch.ones_like(param, dtype=grad_dtype)
                optimizer.step()
            optimizer.zero_grad()
            logs.append(log)
        return logs


@pytest.mark.parametrize(
    ("placed", "mode", "rule"), [case for case in CASES if case[0] in ("replicated", "half states")]
)
def test_one_gpu_without_torch_distributed(placed: str, mode: str, rule: str) -> None:
    """Its registry's collectives would be on the CPU."""
    logs = steps(Topology(), mode, {**PLACED[placed], **RULES[rule]}, CPU)
    assert logs[-1].launches
    assert [log.waits for log in logs] == [[], [], []]


@pytest.mark.parametrize(("placed", "mode", "rule"), CASES)
def test_one_rank_of_four_on_gpus(placed: str, mode: str, rule: str) -> None:
    logs = steps(Topology(data=2, tensor=2), mode, {**PLACED[placed], **RULES[rule]})
    assert [log.waits for log in logs[1:]] == [[], []]


def test_offloaded_states_wait_for_the_gradients_and_for_the_decision() -> None:
    waits = steps(Topology(), "fp32", {"states": Offloaded(0.5), "max_norm": 1.0}, CPU)[-1].waits
    assert [wait for wait in waits if wait.startswith("synchronize optim/states/offloaded.py")] == [waits[-1]]
    assert len(waits) == 5  # the factor and whether to skip: to the host, and to the part that is not offloaded


def test_a_monitor_keeps_its_sums_where_the_losses_are() -> None:
    with fake_cuda(collectives_on=CPU) as logging:
        model = nn.Linear(3, 2, device="cuda")
        optimizer = ParallelOptimizer(
            torch.optim.AdamW(model.parameters(), fused=True), ProcessGroupRegistry(Topology())
        )
        monitor = Monitor(optimizer.registry, every=100)
        for _ in range(3):
            with logging() as log:
                with optimizer.window():
                    for param in model.parameters():
                        param.grad = torch.ones_like(param)
                monitor(optimizer.step(), torch.ones((), device="cuda"))
        assert log.waits == []


CAPTURED = [case for case in CASES if case[0] != "half states" and case[1] != "bf16, rounded"]


@pytest.mark.parametrize(("placed", "mode", "rule"), [case for case in CAPTURED if case[0] == "replicated"])
def test_a_captured_step_on_one_gpu_brings_nothing_from_the_host(placed: str, mode: str, rule: str) -> None:
    log = steps(Topology(), mode, {**PLACED[placed], **RULES[rule]}, CPU, graph=True)[-1]
    assert log.launches
    assert log.waits == log.transfers == []


@pytest.mark.parametrize(("placed", "mode", "rule"), CAPTURED)
def test_a_captured_step_of_one_rank_of_four_brings_nothing_from_the_host(placed: str, mode: str, rule: str) -> None:
    log = steps(Topology(data=2, tensor=2), mode, {**PLACED[placed], **RULES[rule]}, graph=True)[-1]
    assert log.waits == log.transfers == []


def test_a_step_that_is_captured_waits_for_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """After any number of warm-up steps."""
    monitor_of = SkipMonitor.__init__
    with fake_cuda(collectives_on=CPU) as logging:

        def warm(monitor: SkipMonitor, device: torch.device) -> None:
            monitor_of(monitor, device)
            monitor._step = LAG - 1

        monkeypatch.setattr(SkipMonitor, "__init__", warm)
        model = nn.Linear(3, 2, device="cuda")
        adamw = torch.optim.AdamW(model.parameters(), fused=True)
        optimizer = ParallelOptimizer(adamw, ProcessGroupRegistry(Topology()))
        adamw.param_groups[0]["lr"] = torch.tensor(1e-3, device="cuda")
        for captured in (False, True, True):
            with logging(), capturing() if captured else nullcontext():
                with optimizer.window():
                    for param in model.parameters():
                        param.grad = torch.ones_like(param)
                optimizer.step()
            monkeypatch.setattr(torch.cuda, "Event", lambda: pytest.fail("an event in a captured step"))
        assert optimizer._skips._step == LAG


def test_gradients_on_a_gpu_with_collectives_on_the_host_are_not_captured() -> None:
    with pytest.raises(RuntimeError, match="on cuda:0 and collectives on cpu: join the ranks with the backend 'nccl'"):
        steps(Topology(data=2), "fp32", {}, CPU, graph=True)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "bf16, rounded"])
@pytest.mark.parametrize("placed", [placed for placed in PLACED if placed != "half states"])
def test_gradients_travel_in_few_kernels_however_many_there_are(placed: str, mode: str) -> None:
    """Scaled, cast, packed into buckets, brought back, and added to those of the micro-batch before."""
    options = {**PLACED[placed], "max_norm": 1.0, "accumulation_steps": 2}
    few, many = (steps(Topology(data=2, tensor=2), mode, options, count=count)[-1] for count in (2, 20))
    planted = "aten.ones_like.default"  # a gradient
    assert [name for name in few.launches if name != planted] == [name for name in many.launches if name != planted]
    assert len(few.launches) < len(many.launches)


def test_comparing_copies_in_every_step_is_one_wait_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of parameters and gradients, whole ones and pieces."""
    looked_at: list[str] = []

    def nonzero(tensor: torch.Tensor) -> SimpleNamespace:
        looked_at.append(tensor.device.type)
        return SimpleNamespace(tolist=list[Any])  # there are no elements

    monkeypatch.setattr(torch.Tensor, "nonzero", nonzero)
    options = {"measure": Measure(check_replicas=True), "max_norm": 0.5, "states": Sharded("data")}
    for _, _, log in [steps(Topology(data=2, tensor=2), "bf16", options, count=count) for count in (1, 20)]:
        assert len(log.waits) == 1
        assert "optim/clip/decide.py" in log.waits[0]
    assert set(looked_at) == {"cpu"}


def test_hashes_of_copies_elsewhere_travel_together() -> None:
    with fake_cuda(collectives_on=CPU) as logging:
        on_cpu, on_gpu = ([torch.ones(5, device=device) for _ in range(10)] for device in (CPU, CUDA))
        entries = [ParameterEntry(f"weight {index}", P(), (5,)) for index in range(20)]
        plan = replace(
            ReductionPlan.of(entries, Topology(data=2), 0),
            parameter_names=tuple(entry.name for entry in entries),
            parameter_slots=tuple(range(20)),
        )
        check = ReplicaCheck(plan, on_cpu + on_gpu, CUDA)
        check.slots()
        with logging() as log:
            check.slots()
        assert len(log.waits) == 1


def test_gradients_that_come_and_go_and_have_several_dtypes_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In more steps than there are constants kept."""
    monkeypatch.setattr(SkipMonitor, "_before", lambda monitor: (0, 0))  # it would read memory that is not there
    with fake_cuda(collectives_on=CPU) as logging:
        dtypes = (torch.float32, torch.bfloat16, torch.float64)
        params = [nn.Parameter(torch.ones(4, 3, device="cuda", dtype=dtypes[index % 3])) for index in range(9)]
        groups: list[dict[str, Any]] = [{"params": params[:4]}, {"params": params[4:], "max_norm": 0.3}]
        optimizer = ParallelOptimizer(
            torch.optim.AdamW(groups, fused=True),
            ProcessGroupRegistry(Topology()),
            measure=Measure(check_replicas=False, per_parameter=True),
        )
        for step in range(1, 70):
            with optimizer.window():
                for index, param in enumerate(params):
                    param.grad = torch.ones_like(param) if step & (1 << index) else None
            with logging() as log:
                optimizer.step()
            optimizer.zero_grad()
            assert step == 1 or log.waits == []


def test_parameters_on_two_devices_are_an_error() -> None:
    with fake_cuda(collectives_on=CPU):
        params = [nn.Parameter(torch.ones(2, device=device)) for device in ("cuda:0", "cpu")]
        with pytest.raises(ValueError, match="the parameters are on cpu, cuda:0: give each process one device"):
            ParallelOptimizer(torch.optim.SGD(params, lr=0.1), ProcessGroupRegistry(Topology()))


WAITING: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda tensor: tensor.sum().isfinite().all().item(),
    "bool": lambda tensor: bool(tensor.sum() > 0),
    "from the host": lambda tensor: tensor + torch.tensor([1.0, 2.0]).to("cuda"),
    "a list": lambda tensor: torch.tensor([1.0, 2.0], device="cuda"),
    "a list as an index": lambda tensor: tensor[[0, 1]],
    "to the host": lambda tensor: tensor.cpu(),
    "to memory that is not pinned": lambda tensor: torch.empty(2).copy_(tensor, non_blocking=True),
}


@pytest.mark.parametrize("how", WAITING)
def test_the_log_has_what_waits(how: str) -> None:
    with fake_cuda() as logging:
        tensor = torch.ones(2, device="cuda")
        with logging() as log, suppress(RuntimeError):  # there is no number to read
            WAITING[how](tensor)
        assert log.waits


def test_the_log_has_nothing_where_nobody_waits() -> None:
    with fake_cuda() as logging:
        tensor, pinned = torch.ones(2, device="cuda"), torch.empty(2, pin_memory=True)
        with logging() as log:
            pinned.copy_(tensor, non_blocking=True)
            tensor.copy_(pinned, non_blocking=True)
            tensor.mul_(2.0)[0].fill_(3.0)
        assert log.waits == []
        assert len(log.launches) == 4
