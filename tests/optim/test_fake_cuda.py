"""Complete steps on fake CUDA tensors: devices, host synchronizations, copies, collectives and kernel launches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache
from itertools import product
from math import inf
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fake_cuda as harness
import pytest
import torch
import torch.distributed as dist
from cpu_graph import capturing
from dtensors import registry_of
from fake_cuda import CUDA, Log, fake_cuda
from gathered_objects import objects_gathered_by, said_by_all
from meshstep.amp import Bf16, NaiveFp16
from meshstep.optim import (
    AdaGC,
    Adaptive,
    ByGroup,
    ByNorm,
    ByValue,
    HalfStates,
    Monitor,
    Offloaded,
    ParallelOptimizer,
    ParameterEntry,
    PerParameter,
    ReductionPlan,
    Sharded,
    SkipSpikes,
    WarmUp,
    ZClip,
    align_replicas,
)
from meshstep.optim.gradients.buckets import BUCKET_BYTES
from meshstep.optim.norm.replicas import ReplicaCheck
from meshstep.optim.states import offloaded
from meshstep.optim.step.skips import LAG, SkipMonitor
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from meshstep.parallel.interop import dtensor
from meshstep.parallel.layers.summa import Grid, Part, _Reduction, summa
from meshstep.parallel.mesh import collectives as linear_maps
from meshstep.parallel.mesh.collectives import Over
from set_gradients import setting_gradients
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

CPU = torch.device("cpu")
MODES: dict[str, tuple[Any, torch.dtype]] = {
    "fp32": ("fp32", torch.float32),
    "bf16": ("bf16", torch.bfloat16),
    "bf16, split": (Bf16(split_masters=True), torch.bfloat16),
    "bf16, rounded": (Bf16(stochastic_rounding=True), torch.bfloat16),
    "fp16": (NaiveFp16(), torch.float16),
}
PLACED: dict[str, dict[str, Any]] = {
    "replicated": {},
    "ZeRO-1": {"states": Sharded("data")},
    "ZeRO-2": {"states": Sharded("data", gradients=True)},
    "overlap": {"overlap": True},
    "half states": {"states": HalfStates()},
    "offloaded": {"states": Offloaded(0.5)},
    "ZeRO-1, offloaded": {"states": (Sharded("data"), Offloaded(1.0))},
}
RULES: dict[str, dict[str, Any]] = {
    "none": {},
    "norm": {"max_norm": 1.0},
    "value": {"max_norm": ByValue(1.0)},
    "groups": {"max_norm": ByGroup((1.0,))},
    "parameters": {"max_norm": PerParameter(1.0)},
    "units": {"max_norm": Adaptive()},
    "largest": {"max_norm": ByNorm(1.0, norm_type=inf)},
    "p = 3": {"norm_type": 3.0, "per_parameter_norms": True, "check_replicas": False, "max_norm": 0.5},
    "norms per group": {"reduction": "per_group", "check_replicas": False, "max_norm": 0.5},
    "names, z": {"max_norm": {"split*": ZClip(warm_up=2), "*": ByNorm(WarmUp(2.0, 1.0, 9))}},
    "spikes, means": {"max_norm": SkipSpikes(3.0, AdaGC(warm_up=1), window=4, warm_up=1)},
    "two micro-batches": {"max_norm": 0.5, "accumulation_steps": 2},
}
CASES = [
    (placed, mode, rule)
    for placed, mode, rule in product(PLACED, MODES, RULES)
    if (placed, mode) != ("half states", "bf16, rounded")  # this mode already has bfloat16 states
    and (mode != "bf16, split" or rule in ("norm", "two micro-batches"))  # other rules behave as in bf16
]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
    pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a torch built with CUDA for the fake GPU"),
]


@contextmanager
def world(topology: Topology) -> Iterator[None]:
    """Simulate rank 0 without communication. Object gathers return rank 0's object for every rank."""
    if topology.world_size == 1:
        yield
        return

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=topology.world_size)
    try:
        with objects_gathered_by(said_by_all):
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def sharded_fully(registry: ProcessGroupRegistry) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Yield a function from this rank's shard to a DTensor, sharded over the data axis along dim 0 as by `fully_shard`.

    A `DeviceMesh` contains a tensor that is read on the host, so this tensor must not be fake.
    """
    with unset_fake_temporarily():
        mesh = registry.device_mesh("data")
    check, ranks = dtensor.check_mesh, dtensor.mesh_ranks

    def check_outside(tensor: DTensor, topology: Topology) -> dict[str, tuple[str, ...]]:
        with unset_fake_temporarily():
            return check(tensor, topology)

    def ranks_outside(tensor: DTensor) -> tuple[int, ...]:
        with unset_fake_temporarily():
            return ranks(tensor)

    with (
        mock.patch.object(dtensor, "check_mesh", check_outside),
        mock.patch.object(dtensor, "mesh_ranks", ranks_outside),
    ):
        yield lambda piece: DTensor.from_local(piece, mesh, (Shard(0),), run_check=False)


def steps(
    topology: Topology,
    mode: str,
    options: dict[str, Any],
    collectives_on: torch.device = CUDA,
    count: int = 2,
    dtensors: bool = False,
    number: int = 3,
    graph: bool = False,
) -> list[Log]:
    """Return the logs of ``number`` steps, and of one more in a CUDA graph if ``graph``. Replicas are compared only if
    the options request it, because the comparison synchronizes with the host in the first step."""
    precision, dtype = MODES[mode]
    options = {"check_replicas": False, **options}
    with ExitStack() as stack:
        stack.enter_context(world(topology))
        logging = stack.enter_context(fake_cuda(collectives_on=collectives_on))
        registry = registry_of(tuple(zip(topology.axes, topology.sizes, strict=True)))
        laid_out = stack.enter_context(sharded_fully(registry)) if dtensors else lambda piece: piece
        model = nn.ParameterDict(
            {
                f"{kind} {index}": nn.Parameter(laid_out(torch.ones(shape, device="cuda", dtype=dtype)))
                for index in range(count)
                for kind, shape in (("split", (6, 5)), ("whole", (6,)))
            }
        )
        for name, param in model.items():
            annotate(param, P(None, "tensor") if "split" in name and "tensor" in topology.axes else P(), name)
        adamw = torch.optim.AdamW(model.parameters(), fused=True)
        optimizer = ParallelOptimizer(adamw, registry, precision=precision, **options)
        logs = []
        for index in range(number + graph):
            if index == number:
                adamw.param_groups[0]["lr"] = torch.tensor(1e-3, device="cuda")
            with logging() as log, capturing() if index == number else nullcontext():
                for _ in range(options.get("accumulation_steps", 1)):
                    with setting_gradients(optimizer):
                        for param in model.values():
                            grad_dtype = getattr(param, "grad_dtype", None) or param.dtype
                            local = param.to_local() if isinstance(param, DTensor) else param
                            param.grad = laid_out(torch.ones_like(local, dtype=grad_dtype))
                optimizer.step()
            optimizer.zero_grad()
            logs.append(log)
        return logs


CAPTURED = [
    case for case in CASES if case[0] in ("replicated", "ZeRO-1", "ZeRO-2", "overlap") and case[1] != "bf16, rounded"
]


@cache
def run_of_four(placed: str, mode: str, rule: str) -> list[Log]:
    """Return the logs of three steps of one of four ranks, and of a captured step if supported. They are cached, because
    several tests use them."""
    options, graph = {**PLACED[placed], **RULES[rule]}, (placed, mode, rule) in CAPTURED
    return steps(Topology(data=2, tensor=2), mode, options, graph=graph)


@pytest.mark.default_cases(24)
@pytest.mark.parametrize(
    ("placed", "mode", "rule"), [case for case in CASES if case[0] in ("replicated", "half states", "offloaded")]
)
def test_step_on_single_cuda_device_synchronizes_only_for_offload_or_weight_comparison(
    placed: str, mode: str, rule: str
) -> None:
    """A single rank needs no collectives, so the device of its registry may be the CPU.

    Allowed: the waits of `Offloaded`, and the comparison of weights in the second step (`without_comparison`). A
    captured step must not copy to or from the host either.
    """
    graph = (placed, mode, rule) in CAPTURED
    first, second, third, *captured = steps(Topology(), mode, {**PLACED[placed], **RULES[rule]}, CPU, graph=graph)
    assert third.launches
    assert [waits_unsaid(log, placed) for log in without_comparison([first, second, third])] == [[], [], []]
    assert len(captured) == graph
    for log in captured:
        assert log.launches
        assert log.waits == log.transfers == []


@pytest.mark.long
@pytest.mark.default_cases(40)
@pytest.mark.parametrize(("placed", "mode", "rule"), CASES)
def test_later_steps_on_four_cuda_ranks_synchronize_only_for_offload_or_weight_comparison(
    placed: str, mode: str, rule: str
) -> None:
    """Allowed: the waits of `Offloaded`, and the comparison of weights in the second step (`without_comparison`).

    A captured step must not copy to or from the host either.
    """
    first, second, third, *captured = run_of_four(placed, mode, rule)
    assert [waits_unsaid(log, placed) for log in without_comparison([first, second, third])[1:]] == [[], []]
    assert len(captured) == ((placed, mode, rule) in CAPTURED)
    assert all(log.waits == log.transfers == [] for log in captured)


@pytest.mark.default_cases(8)
@pytest.mark.parametrize(("mode", "rule"), list(product(MODES, RULES)))
def test_later_steps_with_dtensors_on_cuda_synchronize_only_for_weight_comparison(mode: str, rule: str) -> None:
    logs = steps(Topology(data=2, tensor=2), mode, RULES[rule], dtensors=True)
    assert logs[-1].launches
    assert [log.waits for log in without_comparison(logs)[1:]] == [[], []]


@pytest.mark.parametrize("topology", [Topology(), Topology(data=2, tensor=2)])
def test_commit_that_returns_a_cuda_tensor_needs_no_host_synchronization_after_first_step(topology: Topology) -> None:
    logs = steps(topology, "fp32", {"commit": lambda: torch.ones((), dtype=torch.bool, device=CUDA)})
    assert logs[-1].launches
    assert [log.waits for log in without_comparison(logs)[1:]] == [[], []]


def test_gloo_rank_that_began_without_parameters_rejects_cuda_param_group() -> None:
    """The rank has counters on the CPU, and a step would combine tensors of two devices."""
    with world(Topology(pipe=2)), fake_cuda(collectives_on=CPU):
        registry = registry_of((("pipe", 2),))
        optimizer = ParallelOptimizer(torch.optim.AdamW([{"params": []}], fused=True), registry)
        added = nn.Parameter(torch.ones(6, device="cuda"))
        annotate(added, P(), "added")
        with pytest.raises(
            ValueError, match="this rank's loss scale and counters are on cpu, because this rank had no param"
        ):
            optimizer.add_param_group({"params": [added]})
        assert len(optimizer.param_groups) == 1


COMPARES = "amp/casting.py"


def without_comparison(logs: list[Log]) -> list[Log]:
    """Return the logs, without the waits and transfers by which the second step compares weights with their master or
    offloaded copies."""
    first, second, *later = logs
    waits, transfers = ([text for text in texts if COMPARES not in text] for texts in (second.waits, second.transfers))
    return [first, replace(second, waits=waits, transfers=transfers), *later]


@pytest.mark.parametrize(
    ("placed", "mode", "compared"),
    [
        ("replicated", "bf16", True),
        ("ZeRO-1", "fp16", True),
        ("offloaded", "fp32", True),
        ("replicated", "fp32", False),
        ("ZeRO-2", "fp32", False),
        ("replicated", "bf16, split", False),
        ("replicated", "bf16, rounded", False),
    ],
)
def test_only_second_step_compares_weights_with_their_master_or_offloaded_copies(
    placed: str, mode: str, compared: bool
) -> None:
    logs = run_of_four(placed, mode, "norm")[:3]
    assert [any(COMPARES in wait for wait in log.waits) for log in logs] == [False, compared, False]


def waits_unsaid(log: Log, placed: str) -> list[str]:
    said = ("synchronize optim/states/offloaded.py", "synchronize optim/step")
    return [wait for wait in log.waits if "offloaded" not in placed or not wait.startswith(said)]


# In these collectives, gloo copies CUDA tensors through pinned memory. It does not copy them in send and recv. In coalesced
# collectives, which torch's functional collectives use, it would read device memory on the host.
GLOO_COPIES = {
    f"c10d.{name}.default"
    for name in ("allreduce_", "broadcast_", "reduce_", "_allgather_base_", "_reduce_scatter_base_")
}


@pytest.mark.long
@pytest.mark.default_cases(6)
@pytest.mark.parametrize(("placed", "mode"), sorted({(placed, mode) for placed, mode, _ in CASES}))
def test_ranks_sharing_a_gpu_with_gloo_use_supported_collectives(placed: str, mode: str) -> None:
    """Gradient buckets are passed as CUDA tensors; norms are copied to the CPU."""
    for rule in ("norm", "largest", "norms per group"):
        logs = steps(Topology(data=2, tensor=2), mode, {**PLACED[placed], **RULES[rule]}, CPU, number=2)
        of_device = {name for log in logs for name, device in log.collectives if device == "cuda"}
        assert of_device
        assert of_device <= GLOO_COPIES
        assert "cpu" in {device for _, device in logs[-1].collectives}


MAPS: dict[str, Callable[[torch.Tensor, Over], torch.Tensor]] = {
    "all-reduce": linear_maps.all_reduce,
    "all-gather": linear_maps.all_gather,
    "reduce-scatter": linear_maps.reduce_scatter,
    "broadcast": linear_maps.broadcast,
    "reduce": linear_maps.reduce_to_root,
}


@pytest.mark.parametrize("kind", MAPS)
def test_linear_maps_use_only_collectives_that_gloo_supports_for_cuda_tensors(kind: str) -> None:
    """The cases are linear maps that layers apply in forward and backward."""
    with world(Topology(tensor=2)), fake_cuda(collectives_on=CPU) as logging:
        over = Over(ProcessGroupRegistry(Topology(tensor=2)), ("tensor",))
        with logging() as log:
            MAPS[kind](torch.ones(4, 3, device=CUDA), over)
        assert {device for _, device in log.collectives} == {"cuda"}
        assert {name for name, _ in log.collectives} <= GLOO_COPIES


@torch.no_grad()
def test_2d_layers_use_only_collectives_that_gloo_supports_for_cuda_tensors() -> None:
    topology = Topology(row=2, col=2)
    with world(topology), fake_cuda(collectives_on=CPU) as logging:
        grid = Grid(ProcessGroupRegistry(topology), "row", "col")
        a, b = torch.ones(3, 4, device=CUDA), torch.ones(4, 5, device=CUDA)
        with logging() as log:
            summa(a, b, grid)
            terms = _Reduction(0, grid, "row")
            for k in range(2):
                terms.add({"row": Part(k, 0, 3)}, torch.ones(3, 5, device=CUDA))
            terms.finish()
        assert log.collectives
        assert set(log.collectives) <= {(name, "cuda") for name in GLOO_COPIES}


def test_offloaded_step_waits_only_for_gradients_step_decision_and_weights() -> None:
    """Exception: the comparison of weights in the second step (`without_comparison`)."""
    for log in without_comparison(steps(Topology(), "fp32", {"states": Offloaded(0.5), "max_norm": 1.0}, CPU)):
        gradients, decision, weights = log.waits
        assert "optim/states/offloaded.py" in gradients
        assert "optim/step/update_request.py" in decision
        assert "optim/states/offloaded.py" in weights


@pytest.mark.long
@pytest.mark.parametrize(("fraction", "nbytes", "buckets"), [(1.0, BUCKET_BYTES, 1), (0.5, 2000, 2), (1.0, 2000, 4)])
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_offloaded_parameters_are_copied_in_buckets(
    mode: str, fraction: float, nbytes: int, buckets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The float32 gradients of the 100 parameters have 7,200 bytes; with fraction 0.5, half of them are offloaded."""
    monkeypatch.setattr(offloaded, "BUCKET_BYTES", nbytes)
    logs = steps(Topology(), mode, {"states": Offloaded(fraction), "max_norm": 1.0}, CPU, count=50)
    for log in without_comparison(logs)[1:]:
        assert sum("synchronize" in wait and "optim/states/offloaded.py" in wait for wait in log.waits) == buckets + 1
        assert len(log.waits) == buckets + 2  # each bucket of gradients, the last bucket of weights, the step decision
        assert len(log.transfers) == 2 * buckets + 2  # plus the step decision and the counts of skipped steps


def test_offloaded_parameters_need_one_flat_device_buffer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one flat buffer exists at a time, and none after the last step."""
    monkeypatch.setattr(offloaded, "BUCKET_BYTES", 2000)
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    make = offloaded.HostBucket._flat_there

    def noted(bucket: offloaded.HostBucket, host: torch.Tensor) -> torch.Tensor:
        nonlocal most
        flat = make(bucket, host)
        alive.append(weakref.ref(flat))
        most = max(most, sum(other is not None for other in (made() for made in alive)))
        return flat

    monkeypatch.setattr(offloaded.HostBucket, "_flat_there", noted)
    steps(Topology(), "fp32", {"states": Offloaded(1.0)}, CPU, count=50)
    assert len(alive) == 4 + 3 * 2 * 4  # at construction, and each direction in three steps
    assert most == 1
    assert all(made() is None for made in alive)


@pytest.mark.parametrize(
    ("states", "collectives_on", "copies"),
    [((), CUDA, 0), ((), CPU, 2), (Offloaded(0.5), CUDA, 3), (Offloaded(0.5), CPU, 3)],
)
def test_align_replicas_packs_all_parameters_into_one_collective(
    states: Any, collectives_on: torch.device, copies: int
) -> None:
    """The model has 100 parameters. There is one copy per direction if tensors and collectives are on different devices,
    and one copy of offloaded weights to the model."""
    topology = Topology(data=2)
    with world(topology), fake_cuda(collectives_on=collectives_on) as logging:
        params = [nn.Parameter(torch.ones(6, device="cuda")) for _ in range(100)]
        for index, param in enumerate(params):
            annotate(param, P(), str(index))
        optimizer = ParallelOptimizer(
            torch.optim.AdamW(params, fused=True),
            ProcessGroupRegistry(topology),
            states=states,
            check_replicas=False,
        )
        with setting_gradients(optimizer):
            for param in params:
                param.grad = torch.ones_like(param)
        optimizer.step()
        with logging() as log:
            align_replicas(optimizer)
    assert len(log.transfers) == copies
    assert len(log.collectives) == 1


def test_monitor_on_cuda_does_not_synchronize_between_reports() -> None:
    with fake_cuda(collectives_on=CPU) as logging:
        model = nn.Linear(3, 2, device="cuda")
        optimizer = ParallelOptimizer(
            torch.optim.AdamW(model.parameters(), fused=True), ProcessGroupRegistry(Topology())
        )
        monitor = Monitor(optimizer.registry, every=100)
        for _ in range(3):
            with logging() as log:
                with setting_gradients(optimizer):
                    for param in model.parameters():
                        param.grad = torch.ones_like(param)
                monitor(optimizer.step(), torch.ones((), device="cuda"))
        assert log.waits == []


def test_captured_step_waits_for_no_cuda_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of a capture, step `LAG` would wait for the event of an earlier step. The test captures step `LAG`."""
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
                with setting_gradients(optimizer):
                    for param in model.parameters():
                        param.grad = torch.ones_like(param)
                optimizer.step()
            monkeypatch.setattr(torch.cuda, "Event", lambda: pytest.fail("an event in a captured step"))
        assert optimizer._skips._step == LAG


def test_capture_with_collectives_on_host_raises() -> None:
    with pytest.raises(
        RuntimeError, match=r"on cuda:0 and collectives on cpu: initialize torch.distributed with the backend 'nccl'"
    ):
        steps(Topology(data=2), "fp32", {}, CPU, graph=True)


@pytest.mark.long
@pytest.mark.default_cases(6)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "bf16, rounded"])
@pytest.mark.parametrize("placed", [placed for placed in PLACED if placed != "half states"])
def test_number_of_gradient_kernels_is_independent_of_parameter_count(placed: str, mode: str) -> None:
    """The kernels scale and cast gradients, pack and unpack buckets, and add gradients of micro-batches."""
    options = {**PLACED[placed], "max_norm": 1.0, "accumulation_steps": 2}
    few, many = (steps(Topology(data=2, tensor=2), mode, options, count=count)[-1] for count in (2, 20))
    planted = "aten.ones_like.default"  # a gradient
    assert [name for name in few.launches if name != planted] == [name for name in many.launches if name != planted]
    assert len(few.launches) < len(many.launches)


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_shard_without_gradient_needs_no_host_synchronization(mode: str) -> None:
    """The device decides whether other shards of the tensor have a gradient.

    Exception: the comparison of weights with their master weights (`COMPARES`).
    """
    topology, (precision, dtype) = Topology(tensor=2), MODES[mode]
    with world(topology), fake_cuda() as logging:
        registry = ProcessGroupRegistry(topology)
        model = nn.ParameterDict(
            {name: nn.Parameter(torch.ones(4, 3, device="cuda", dtype=dtype)) for name in ("experts", "other")}
        )
        for name, param in model.items():
            annotate(param, P("tensor"), name)
        adamw = torch.optim.AdamW(model.parameters(), fused=True)
        optimizer = ParallelOptimizer(adamw, registry, precision=precision, max_norm=1.0, check_replicas=False)
        launches = []
        for index in range(5):
            with logging() as log:
                with setting_gradients(optimizer):
                    for name, param in model.items():
                        grad_dtype = getattr(param, "grad_dtype", None) or param.dtype
                        has_tokens = name == "other" or index in (0, 2)
                        param.grad = torch.ones_like(param, dtype=grad_dtype) if has_tokens else None
                optimizer.step()
            optimizer.zero_grad()
            assert [wait for wait in log.waits if COMPARES not in wait] == []
            launches.append(len(log.launches))
        assert launches[4] > launches[2], "the shard without gradient must be stepped separately"


@pytest.mark.long
def test_replica_check_in_every_step_synchronizes_with_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third of three steps is checked. The check compares parameters and gradients, replicated or sharded."""
    looked_at: list[str] = []

    def nonzero(tensor: torch.Tensor) -> SimpleNamespace:
        looked_at.append(tensor.device.type)
        return SimpleNamespace(tolist=list[Any])  # fake tensors have no elements

    monkeypatch.setattr(torch.Tensor, "nonzero", nonzero)
    options = {"check_replicas": True, "max_norm": 0.5, "states": Sharded("data")}
    for _, _, log in [steps(Topology(data=2, tensor=2), "bf16", options, count=count) for count in (1, 20)]:
        assert len(log.waits) == 1
        assert "optim/clip/clipper.py" in log.waits[0]
    assert set(looked_at) == {"cpu"}


def test_replica_check_copies_hashes_of_cpu_tensors_to_gpu_together() -> None:
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


# Some parameters get their first gradient after step 16, or never.
@pytest.mark.filterwarnings("ignore:in 16 steps no rank had a gradient")
def test_changing_set_of_gradients_with_several_dtypes_needs_no_host_synchronization(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first step is not checked. The run has more steps than the cache `Constants` has entries."""
    # The original method would read memory that fake tensors do not have.
    monkeypatch.setattr(SkipMonitor, "_earlier_counts", lambda monitor: (0, 0, 0, 0))
    with fake_cuda(collectives_on=CPU) as logging:
        dtypes = (torch.float32, torch.bfloat16, torch.float64)
        params = [nn.Parameter(torch.ones(4, 3, device="cuda", dtype=dtypes[index % 3])) for index in range(9)]
        groups: list[dict[str, Any]] = [{"params": params[:4]}, {"params": params[4:], "max_norm": 0.3}]
        optimizer = ParallelOptimizer(
            torch.optim.AdamW(groups, fused=True),
            ProcessGroupRegistry(Topology()),
            check_replicas=False,
            per_parameter_norms=True,
        )
        for step in range(1, 70):
            with setting_gradients(optimizer):
                for index, param in enumerate(params):
                    param.grad = torch.ones_like(param) if step & (1 << index) else None
            with logging() as log:
                optimizer.step()
            optimizer.zero_grad()
            assert step == 1 or log.waits == []


def test_parameters_on_two_devices_are_rejected() -> None:
    with fake_cuda(collectives_on=CPU):
        params = [nn.Parameter(torch.ones(2, device=device)) for device in ("cuda:0", "cpu")]
        with pytest.raises(ValueError, match="the parameters are on cpu, cuda:0, but all parameters of"):
            ParallelOptimizer(torch.optim.SGD(params, lr=0.1), ProcessGroupRegistry(Topology()))


def adagrad_of_torch_2_11(params: list[nn.Parameter]) -> torch.optim.Adagrad:
    """Return a fused Adagrad without the attribute that later versions of torch set."""
    optimizer = torch.optim.Adagrad([{"params": params}], lr=0.1, fused=True)
    vars(optimizer).pop("_step_supports_amp_scaling", None)
    return optimizer


def test_fused_adagrad_of_torch_2_11_is_rejected_for_parameters_on_gpu() -> None:
    with fake_cuda(), pytest.raises(ValueError, match=r"fused=True .*: write torch.optim.Adagrad\(..., fused=False\)"):
        ParallelOptimizer(
            adagrad_of_torch_2_11([nn.Parameter(torch.ones(2, device="cuda"))]), ProcessGroupRegistry(Topology())
        )


def test_fused_adagrad_of_torch_2_11_is_accepted_with_all_parameters_offloaded() -> None:
    with fake_cuda():
        adagrad = adagrad_of_torch_2_11([nn.Parameter(torch.ones(2, device="cuda"))])
        ParallelOptimizer(adagrad, ProcessGroupRegistry(Topology()), states=Offloaded(1.0))
        assert {state["sum"].device for state in adagrad.state.values()} == {CPU}


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
def test_fake_cuda_log_contains_waits_for_synchronizing_operations(how: str) -> None:
    with fake_cuda() as logging:
        tensor = torch.ones(2, device="cuda")
        with logging() as log, suppress(RuntimeError):  # fake tensors have no values
            WAITING[how](tensor)
        assert log.waits


def test_fake_cuda_log_contains_no_waits_for_asynchronous_operations() -> None:
    with fake_cuda() as logging:
        tensor, pinned = torch.ones(2, device="cuda"), torch.empty(2, pin_memory=True)
        with logging() as log:
            pinned.copy_(tensor, non_blocking=True)
            tensor.copy_(pinned, non_blocking=True)
            tensor.mul_(2.0)[0].fill_(3.0)
        assert log.waits == []
        assert len(log.launches) == 4


@pytest.mark.parametrize(
    ("placed", "mode", "rule"),
    [
        ("ZeRO-2", "bf16, rounded", "names, z"),
        ("ZeRO-1, offloaded", "fp16", "p = 3"),
        ("overlap", "bf16, split", "norm"),
        ("half states", "fp32", "units"),
    ],
)
def test_fake_cuda_log_matches_fake_tensor_mode_of_torch(
    placed: str, mode: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = run_of_four(placed, mode, rule)
    monkeypatch.setattr(harness, "QuickFakeTensorMode", FakeTensorMode)
    graph = (placed, mode, rule) in CAPTURED
    slow = steps(Topology(data=2, tensor=2), mode, {**PLACED[placed], **RULES[rule]}, graph=graph)
    assert quick == slow


TWO_DEVICES = (
    "at least two devices, cuda:0 and cpu|two different devices cuda:0, cpu"  # the second is the message of torch 2.11
)


def test_failing_operators_on_fake_tensors_are_not_cached() -> None:
    """Fake tensors cache the results of operators; the cache must not contain results of failed operators."""
    with fake_cuda():
        there, here = torch.ones(2, device="cuda"), torch.ones(2)
        for _ in range(2):
            there.add_(there)
            with pytest.raises(RuntimeError, match=TWO_DEVICES):
                there.add_(here)
            with pytest.raises(RuntimeError, match=TWO_DEVICES):
                torch.where(there > 0, there, here, out=there)
            with pytest.raises(RuntimeError, match=r"Attempting to broadcast|must match the size"):
                there.add_(torch.ones(3, device="cuda"))
            with pytest.raises(RuntimeError, match="invalid for input of size"):
                there.view(3)
