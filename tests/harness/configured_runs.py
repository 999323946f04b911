"""Run a drawn configuration on real ranks: each rank trains its part of the model and reports the results."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from arguments import arguments
from cases import slice_of
from configurations import (
    ADDED_GROUP,
    DIFFERING,
    MODEL,
    STEPS,
    Case,
    Coordinate,
    Layout,
    Setting,
    is_idle,
    is_masked,
    laid_out,
    memory_format,
    numbers,
    start_of,
    weight,
    written_to,
)
from dense_steps import hyper_parameters, inner_optimizer
from dtensors import local
from meshstep.amp import NaiveFp16
from meshstep.optim import ParallelOptimizer, ReplicaMismatchError, load_checkpoint, save_checkpoint
from meshstep.optim.gradients import buckets as gradient_sync
from meshstep.optim.states.offloaded import OffloadTransform
from meshstep.parallel import P, ProcessGroupRegistry, annotate
from meshstep.parallel.interop.local_parameters import has_dtensors, local_parameter
from torch import Tensor, nn
from zero_models import small_buckets


@dataclass
class Report:
    """The results of one rank.

    Args:
        pieces: The tensors that the rank updates: parameter name, offset in the rank's shard, and values.
        offloaded: For each piece, whether it is a copy on the CPU.
        skipped: The number of skipped steps, as the optimizer counts them.
        warned: Whether loading warned that shards with different numbers of steps were merged.
        problems: Problems that the rank itself detected.
    """

    norms: dict[int, float] = field(default_factory=dict)
    params: dict[str, Tensor] = field(default_factory=dict)
    pieces: list[tuple[str, int, Tensor]] = field(default_factory=list)
    offloaded: list[bool] = field(default_factory=list)
    skipped: int = 0
    warned: bool = False
    problems: list[str] = field(default_factory=list)


class Rank:
    """One rank's part of the model and its optimizer.

    Model and optimizer are constructed before the step number ``step``, which decides whether the model has the
    parameters that are added during the run. ``moved`` is a value added to all weights.
    """

    def __init__(
        self,
        case: Case,
        setting: Setting,
        registry: ProcessGroupRegistry,
        step: int = 0,
        moved: float = 0.0,
        device: str = "cpu",
    ) -> None:
        self.case, self.setting, self.registry, self.made_in, self.device = case, setting, registry, step, device
        self.model = nn.ParameterDict()
        self.vetoes = False
        for name in case.names:
            if case.has(name, step):
                self._add(name, moved)

    def _add(self, name: str, moved: float = 0.0) -> None:
        setting, at = self.setting, self.setting.at
        if not at.holds(name, self.registry.coordinate):
            return
        spec, meshed = at.spec(name), name in at.meshes
        piece = self._piece(start_of(name) + moved, name)
        piece = laid_out(piece, memory_format(self.case, setting, name))
        self.model[name] = nn.Parameter(_as_dtensor(name, piece, at, self.registry) if meshed else piece)
        annotate(self.model[name], P() if meshed else at.said.get(name, spec), name)

    def _piece(self, full: Tensor, name: str) -> Tensor:
        at = self.setting.at
        piece = slice_of(full, at.spec(name), at.topology, self.registry.global_rank)
        return piece.to(self.device, self.case.mode.dtype)

    def inner(self, kind: str) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [{}, {"max_norm": self.case.group_max_norm}]
        if any(MODEL[name].group == ADDED_GROUP for name in self.case.names if self.case.has(name, self.made_in)):
            groups.append({})
        for index, group in enumerate(groups):
            group["params"] = self._of_group(index)
            if self.setting.named and not group["params"]:
                group["param_names"] = []
        return inner_optimizer(kind, groups, self.case.implementation)

    def _of_group(self, group: int) -> list[Any]:
        named = [(name, param) for name, param in self.model.items() if MODEL[name].group == group]
        return named if self.setting.named else [param for _, param in named]

    def options(self) -> dict[str, Any]:
        case, setting = self.case, self.setting
        options: dict[str, Any] = {
            "precision": case.mode.precision,
            "max_norm": case.max_norm,
            "norm_type": case.norm_type,
            "accumulation_steps": setting.micro if setting.managed else None,
            "offload": setting.offload,
            "reduction": setting.reduction,
            "check_replicas": setting.check_replicas,
        }
        if case.vetoed is not None:
            options["commit"] = lambda: not self.vetoes
        if setting.axis is not None:
            options |= {"shard_states": setting.axis, "shard_gradients": setting.states == "zero2"}
        elif setting.states == "overlap":
            options |= {"overlap": True, "bucket_bytes": setting.bucket}
        return options

    def optimizer(self) -> ParallelOptimizer[Any]:
        return ParallelOptimizer(self.inner(self.case.kind), self.registry, **arguments(**self.options()))

    # Between steps -----------------------------------------------------------------------------------------------------

    def events(self, optimizer: ParallelOptimizer[Any], number: int) -> None:
        case = self.case
        for name, param in self.model.items():
            if case.frozen is not None and case.frozen[0] == name and number in case.frozen[1:]:
                param.requires_grad_(not case.is_frozen(name, number))
        if case.is_written(number):
            self._write(optimizer)
        if case.added == number:
            self.add_group(optimizer)
        self.vetoes = number == case.vetoed and case.draw("vetoes") % self.registry.topology.world_size == (
            self.registry.global_rank
        )

    def freeze(self, step: int) -> None:
        for name, param in self.model.items():
            if self.case.is_frozen(name, step):
                param.requires_grad_(False)

    def add_group(self, optimizer: ParallelOptimizer[Any]) -> None:
        for name in self.case.names:
            if MODEL[name].group == ADDED_GROUP:
                self._add(name)
        optimizer.add_param_group({"params": self._of_group(ADDED_GROUP), **hyper_parameters(ADDED_GROUP)})

    @torch.no_grad()
    def _write(self, optimizer: ParallelOptimizer[Any]) -> None:
        """Write new weights into the model. If they are copies of master weights, call `reload_from_model`."""
        case, setting = self.case, self.setting
        assert case.written is not None
        how, loaded = case.written[1], dict[str, Tensor]()
        for name, param in self.model.items():
            value = self._piece(written_to(case, name), name)
            if how == "in place" or name in setting.at.meshes:
                _with_gradient(param).copy_(value)
            elif how == "loaded":
                loaded[name] = value
            else:
                param.data = laid_out(value, memory_format(case, setting, name, relaid=how == "relaid"))
        self.model.load_state_dict(loaded, strict=False)
        if case.mode.has_masters:
            reloads: Any = optimizer
            reloads.reload_from_model()

    # Steps -------------------------------------------------------------------------------------------------------------

    def step(self, optimizer: ParallelOptimizer[Any], number: int) -> Any:
        case, setting, at = self.case, self.setting, self.registry.coordinate
        optimizer.zero_grad()
        for micro in range(setting.micro):
            loss, terms = torch.zeros((), requires_grad=True, device=self.device) * 1.0, 0
            for name, param in self.model.items():
                if not is_idle(case, setting, name, at, number, micro):
                    factors = numbers(case, setting, name, at, number, micro).float() / self.averaged(name)
                    factors = factors.to(self.device)
                    loss, terms = loss + (_with_gradient(param).float() * factors).sum(), terms + 1
            count = weight(case, setting, at, number, micro)
            absent = not terms and case.absent and case.draw("absent", number, micro, at) % 2
            early = setting.states == "overlap" and not setting.managed and micro < setting.micro - 1
            with optimizer.no_sync() if early else nullcontext():
                given = loss if (count or is_masked(case, setting, at, number, micro)) and not absent else None
                optimizer.backward(given, **self._weight(count, number, micro))
        return optimizer.step()

    def _weight(self, count: int, number: int, micro: int) -> dict[str, float | Tensor]:
        """Return the weight of a micro-batch as an argument, a number or a tensor; no argument without weights."""
        if not self.setting.weighted:
            return {}
        where = [self.registry.coordinate[axis] for axis in self.setting.at.topology.data_axes]
        is_tensor = self.case.draw("tensor weight", number, micro, where) % 3 == 0
        return {"weight": torch.tensor(float(count), device=self.device) if is_tensor else count}

    def averaged(self, name: str) -> int:
        """Return the number of data ranks in a DTensor's mesh (1 for a plain tensor). The optimizer expects that a
        DTensor's gradient is already averaged over these ranks, so the loss is divided by their number."""
        topology = self.setting.at.topology
        meshed = {axis for axes, _ in self.setting.at.meshes.get(name, ()) for axis in axes}
        return topology.size(*(axis for axis in topology.data_axes if axis in meshed))

    def steps(self, optimizer: ParallelOptimizer[Any], steps: range, report: Report) -> None:
        for number in steps:
            self.events(optimizer, number)
            stats = self.step(optimizer, number)
            report.norms[number] = float(stats.total_norm)
            if bool(stats.found_inf) == torch.isfinite(stats.total_norm):
                report.problems.append(
                    f"step {number} has norm {stats.total_norm}, but found_inf={bool(stats.found_inf)}"
                )

    def see(self, optimizer: ParallelOptimizer[Any], report: Report) -> None:
        names = {id(local_parameter(param)): name for name, param in self.model.items()}
        report.params = {name: local(param).cpu().clone() for name, param in self.model.items()}
        report.skipped = optimizer.skipped_steps
        for piece, value in zip(optimizer.stepped_tensors(), optimizer._chain.values(), strict=True):
            report.pieces.append((names[id(piece.param)], piece.offset, value.detach().cpu().clone()))
        report.offloaded = offloaded_pieces(optimizer)
        report.problems += problems_of_fraction(optimizer, report.offloaded, self.setting.offload or 0.0)


def offloaded_pieces(optimizer: ParallelOptimizer[Any]) -> list[bool]:
    """Return for each stepped tensor of this rank whether `Offloaded` made it, as a copy on the CPU."""
    offload = [transform for transform in optimizer._chain.transforms if isinstance(transform, OffloadTransform)]
    replaced = {id(tensor) for transform in offload for tensor in transform.copies}
    return [any(id(tensor) in replaced for tensor in piece.path) for piece in optimizer.stepped_tensors()]


def problems_of_fraction(optimizer: ParallelOptimizer[Any], offloaded: list[bool], fraction: float) -> list[str]:
    """Return a problem if this rank offloads less than ``fraction`` of the elements that it trains, else none."""
    pieces = zip(optimizer.stepped_tensors(), offloaded, strict=True)
    # Parameters that were frozen when they were added are not offloaded, so their tensors do not count.
    numels = [(piece.tensor.numel(), on_cpu) for piece, on_cpu in pieces if piece.trained or on_cpu]
    found, trained = sum(numel for numel, on_cpu in numels if on_cpu), sum(numel for numel, _ in numels)
    enough = found >= fraction * trained - 1e-6
    return [] if enough else [f"{found} of {trained} elements are offloaded with fraction {fraction}"]


def _as_dtensor(name: str, piece: Tensor, at: Layout, registry: ProcessGroupRegistry) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = registry.device_mesh(*(axes for axes, _ in at.meshes[name]))
    placements = [Replicate() if dim is None else Shard(dim) for _, dim in at.meshes[name]]
    shape = MODEL[name].shape
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _with_gradient(param: Tensor) -> Tensor:
    """Return the tensor to use in the loss: the local tensor of a DTensor, else the parameter itself."""
    part: Tensor = param.to_local() if has_dtensors((param,)) else param  # type: ignore[attr-defined]
    return part


@contextmanager
def registry_of(setting: Setting) -> Iterator[ProcessGroupRegistry]:
    small_sums = mock.patch.object(gradient_sync, "BUCKET_BYTES", setting.bucket)
    with ProcessGroupRegistry(setting.at.topology) as registry, small_buckets(setting.bucket), small_sums:
        yield registry


def run(case: Case, path: Path, device: str = "cpu") -> Report:
    """Run from the start to the end, or to the checkpoint if the case resumes with another setting."""
    with registry_of(case.setting) as registry:
        report, rank = Report(), Rank(case, case.setting, registry, device=device)
        if case.differing is not None and registry.topology.world_size > 1:
            report.problems += problems_of_differing_ranks(case, registry, device)
        rank.freeze(step=0)
        optimizer = rank.optimizer()
        first = STEPS if case.resumed is None else case.saved_at
        rank.steps(optimizer, range(first), report)
        if case.resumed is not None:
            save_checkpoint(path, rank.model, optimizer)
        if case.resumed == case.setting:
            rank.steps(optimizer, range(first, STEPS), report)
        rank.see(optimizer, report)
        if case.resumed in (None, case.setting):
            report.problems += problems_of_lost_gradient(rank, optimizer)
        return report


def go_on(case: Case, path: Path, device: str = "cpu") -> Report:
    assert case.resumed is not None
    with registry_of(case.resumed) as registry:
        last, same = case.saved_at - 1, case.resumed == case.setting
        # Construct the optimizer either as in the first run, and add the group later, or with the group from the start.
        adds_group = case.added is not None and case.added <= last and (same or case.draw("adds group") % 2 == 1)
        made_in = 0 if adds_group else last
        report, rank = Report(), Rank(case, case.resumed, registry, step=made_in, moved=1.0, device=device)
        if case.frozen is not None and case.frozen[2] is None:
            start = case.frozen[1]
            rank.freeze(0 if start == 0 or same or case.draw("frozen before") % 2 else last)
        optimizer = rank.optimizer()
        if adds_group:
            assert case.added is not None
            rank.freeze(case.added)  # frozen first, as in the first run: buckets are built without frozen parameters
            rank.add_group(optimizer)
        rank.freeze(last)
        if case.stepped_before:
            rank.step(optimizer, case.saved_at)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load_checkpoint(path, rank.model, optimizer)
        report.warned = any("different numbers of optimizer steps" in str(warning.message) for warning in caught)
        rank.steps(optimizer, range(case.saved_at, STEPS), report)
        rank.see(optimizer, report)
        return report


# Ranks that differ ------------------------------------------------------------------------------------------------------


def problems_of_differing_ranks(case: Case, registry: ProcessGroupRegistry, device: str = "cpu") -> list[str]:
    """Pass a different option on one rank, and return the problems of this rank.

    There are none if it raises an error that names the option, and changes nothing.
    """
    assert case.differing is not None
    other = registry.global_rank == case.draw("differing") % registry.topology.world_size
    rank, what = Rank(case, case.setting, registry, device=device), case.differing
    if what == "weights":
        return _other_weights(rank, other)
    if what in ("lr", "kind") and not _has_peers(rank, case.draw("differing") % registry.topology.world_size):
        return []
    options, inner = rank.options(), rank.inner(case.kind)
    if other and what == "kind":
        inner = rank.inner("SGD" if case.kind == "AdamW" else "AdamW")
    elif other and what in ("lr", "threshold"):
        group, key = {"lr": (0, "lr"), "threshold": (1, "max_norm")}[what]
        inner.param_groups[group][key] = 0.123
    elif other:
        options[what] = _another(what, options.get(what))
    params = [group["params"][:] for group in inner.param_groups]
    try:
        ParallelOptimizer(inner, registry, **arguments(**options))
    except ValueError as error:
        problems = [] if DIFFERING[what] in str(error) else [f"{what} differs, but the error is: {error}"]
    else:
        return [f"{what} differs, but this rank raised no error"]
    unchanged = all(
        len(group["params"]) == len(before) and all(map(_same, group["params"], before))
        for group, before in zip(inner.param_groups, params, strict=True)
    )
    return (
        problems if unchanged and not inner.state else [*problems, f"{what} differs, and param groups or state changed"]
    )


def problems_of_lost_gradient(rank: Rank, optimizer: ParallelOptimizer[Any]) -> list[str]:
    """Make a step in which one rank does not use a parameter that is replicated over model axes.

    Return the problems of this rank: none if it raises an error that names the parameter, and changes nothing.
    """
    case, setting, topology = rank.case, rank.setting, rank.registry.topology
    found: list[tuple[str, Coordinate, list[str]]] = []
    for name in case.names:
        spec = setting.at.spec(name)
        model = [axis for axis in spec.replica_axes(topology) if axis in topology.model_axes]
        axes = [axis for axis in model if axis not in spec.partial and topology.size(axis) > 1]
        if axes and (case.frozen is None or case.frozen[0] != name):
            found += [(name, at, axes) for at in setting.at.coordinates() if setting.at.holds(name, at)]
    if not found:
        return []
    lost, without, axes = found[case.draw("lost") % len(found)]

    usual = is_idle

    def idle(case: Case, setting: Setting, name: str, at: Coordinate, step: int, micro: int) -> bool:
        if name != lost or any(at[axis] != without[axis] for axis in topology.axes if axis not in axes):
            return usual(case, setting, name, at, step, micro)
        return at == without

    before = {name: local(param).clone() for name, param in rank.model.items()}
    with mock.patch(f"{__name__}.is_idle", idle), mock.patch(f"{__name__}.weight", return_value=1):
        try:
            rank.step(optimizer, STEPS)
            optimizer.poll()
        except (RuntimeError, ReplicaMismatchError) as error:
            problems = [] if lost in str(error) else [f"a gradient of {lost} is missing, but the error is: {error}"]
        else:
            problems = [f"a replica of {lost} has no gradient at {without}, but this rank raised no error"]
    same = all(torch.equal(before[name], local(param)) for name, param in rank.model.items())
    return problems if same else [*problems, f"{lost} has no gradient at {without}, and its weights changed"]


def _has_peers(rank: Rank, differing: int) -> bool:
    """Return whether another rank of the pipeline stage holds parameters of group 0 too, so that their options are
    compared."""
    at, topology = rank.setting.at, rank.setting.at.topology
    names = [name for name in rank.case.names if MODEL[name].group == 0]

    def stage_of(coordinate: dict[str, int]) -> list[int]:
        return [coordinate[axis] for axis in topology.pipe_axes]

    where = topology.coordinate(differing)
    have = [other for other in at.coordinates() if any(at.holds(name, other) for name in names)]
    return where in have and any(stage_of(other) == stage_of(where) for other in have if other != where)


def _same(one: object, other: object) -> bool:
    return one is other


def _another(what: str, value: Any) -> Any:
    if what == "check_replicas":
        return not value
    if what == "reduction":
        return "packed" if value == "per_group" else "per_group"
    others = {"max_norm": 0.123, "norm_type": 2.5, "accumulation_steps": 7, "offload": 0.123, "max_skips_in_a_row": 3}
    return {**others, "precision": NaiveFp16(init_scale=32.0)}[what]


def _other_weights(rank: Rank, other: bool) -> list[str]:
    """Change the initial values of one replica.

    Return the problems of this rank: none if it raises an error and keeps its weights.
    """
    copies = rank.setting.at.topology.size(*rank.setting.at.spec("vector").replica_axes(rank.setting.at.topology))
    spec = rank.setting.at.spec("vector")
    if rank.setting.check_replicas is False or copies == 1 or "vector" in rank.setting.at.stages or spec.owned:
        return []
    if rank.case.small:
        return []
    if other:
        with torch.no_grad():
            rank.model["vector"][5] += 0.5
    before = {name: local(param).clone() for name, param in rank.model.items()}
    try:
        rank.step(rank.optimizer(), number=STEPS)  # no case has an overflow in the step after its last one
    except ReplicaMismatchError as error:
        problems = (
            [] if "vector: the parameter differs" in str(error) else [f"weights differ, but the error is: {error}"]
        )
    else:
        problems = ["replicas of a parameter differ, but this rank raised no error"]
    same = all(torch.equal(before[name], local(param)) for name, param in rank.model.items())
    return problems if same else [*problems, "replicas of a parameter differ, and weights changed"]
