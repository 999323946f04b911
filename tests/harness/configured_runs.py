"""A drawn configuration on real ranks: each steps its part of the model, and reports what came of it."""

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
    DIFFERING,
    MODEL,
    PRECISIONS,
    STEPS,
    Case,
    Layout,
    Setting,
    is_idle,
    numbers,
    start_of,
    weight,
)
from dense_steps import inner_optimizer
from dtensors import local
from meshstep.amp import NaiveFp16
from meshstep.optim import ParallelOptimizer, Reduce, ReplicaMismatchError, load_checkpoint, save_checkpoint
from meshstep.optim.gradients import sync as gradient_sync
from meshstep.parallel import P, ProcessGroupRegistry, annotate
from meshstep.parallel.interop.local import has_dtensors, local_parameter
from torch import Tensor, nn
from zero_models import small_buckets


@dataclass
class Report:
    """Of one rank.

    Args:
        norms: By step.
        params: What it holds of each parameter.
        pieces: What it steps: parameter, place in what this rank holds of it, and value.
        warned: Loading said that pieces with different numbers of steps were put together.
        problems: What it saw itself.
    """

    norms: dict[int, float] = field(default_factory=dict)
    params: dict[str, Tensor] = field(default_factory=dict)
    pieces: list[tuple[str, int, Tensor]] = field(default_factory=list)
    warned: bool = False
    problems: list[str] = field(default_factory=list)


class Rank:
    """One rank's part of the model and its optimizer."""

    def __init__(self, case: Case, setting: Setting, registry: ProcessGroupRegistry, moved: float = 0.0) -> None:
        self.case, self.setting, self.registry = case, setting, registry
        dtype = PRECISIONS[case.precision][1]
        self.model = nn.ParameterDict()
        for name in case.names:
            spec = setting.at.spec(name)
            if setting.at.holds(name, registry.coordinate):
                piece = slice_of(start_of(name) + moved, spec, setting.at.topology, registry.global_rank).to(dtype)
                meshed = name in setting.at.meshes
                self.model[name] = nn.Parameter(_as_dtensor(name, piece, setting.at, registry) if meshed else piece)
                annotate(self.model[name], P() if meshed else setting.at.said.get(name, spec), name)

    def inner(self, kind: str) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "max_norm": self.case.group_max_norm}]
        for name, param in self.model.items():
            groups[MODEL[name].group]["params"].append(param)
        return inner_optimizer(kind, groups)

    def options(self) -> dict[str, Any]:
        """As words, see `arguments`."""
        case, setting = self.case, self.setting
        options: dict[str, Any] = {
            "precision": PRECISIONS[case.precision][0],
            "max_norm": case.max_norm,
            "norm_type": case.norm_type,
            "accumulation_steps": setting.micro if setting.managed else None,
            "offload": setting.offload,
            "reduction": setting.reduction,
            "check_replicas": setting.check_replicas,
        }
        if setting.axis is not None:
            options |= {"shard_states": setting.axis, "shard_gradients": setting.states == "zero2"}
        elif setting.states == "overlap":
            options["data_parallel"] = Reduce(overlap=True, bucket_bytes=setting.bucket)
        return options

    def optimizer(self) -> ParallelOptimizer[Any]:
        return ParallelOptimizer(self.inner(self.case.kind), self.registry, **arguments(**self.options()))

    def step(self, optimizer: ParallelOptimizer[Any], number: int) -> Any:
        case, setting, at = self.case, self.setting, self.registry.coordinate
        optimizer.zero_grad()
        for micro in range(setting.micro):
            loss = torch.zeros((), requires_grad=True) * 1.0
            for name, param in self.model.items():
                if not is_idle(case, setting, name, at, number, micro):
                    factors = numbers(case, setting, name, at, number, micro).float() / self.averaged(name)
                    loss = loss + (_with_gradient(param).float() * factors).sum()
            count = weight(case, setting, at, number, micro)
            early = setting.states == "overlap" and not setting.managed and micro < setting.micro - 1
            with optimizer.no_sync() if early else nullcontext():
                optimizer.backward(loss if count else None, **({"weight": count} if setting.weighted else {}))
        return optimizer.step()

    def averaged(self, name: str) -> int:
        """Over how many ranks of a DTensor's mesh torch has to average its gradient: it is complete there."""
        topology = self.setting.at.topology
        meshed = {axis for axes, _ in self.setting.at.meshes.get(name, ()) for axis in axes}
        return topology.size(*(axis for axis in topology.data_axes if axis in meshed))

    def steps(self, optimizer: ParallelOptimizer[Any], steps: range, report: Report) -> None:
        for number in steps:
            stats = self.step(optimizer, number)
            report.norms[number] = float(stats.total_norm)
            if bool(stats.found_inf) == torch.isfinite(stats.total_norm):
                report.problems.append(f"step {number} of norm {stats.total_norm} was skipped or made wrongly")

    def see(self, optimizer: ParallelOptimizer[Any], report: Report) -> None:
        """What there is at the end."""
        names = {id(local_parameter(param)): name for name, param in self.model.items()}
        report.params = {name: local(param).clone() for name, param in self.model.items()}
        for piece in optimizer.pieces():
            report.pieces.append((names[id(piece.param)], piece.offset, piece.piece.detach().clone()))


def _as_dtensor(name: str, piece: Tensor, at: Layout, registry: ProcessGroupRegistry) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = registry.device_mesh(*(axes for axes, _ in at.meshes[name]))
    placements = [Replicate() if dim is None else Shard(dim) for _, dim in at.meshes[name]]
    shape = MODEL[name].shape
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _with_gradient(param: Tensor) -> Tensor:
    """This rank's part, by which a DTensor's gradient comes."""
    part: Tensor = param.to_local() if has_dtensors((param,)) else param  # type: ignore[attr-defined]
    return part


@contextmanager
def _registry(setting: Setting) -> Iterator[ProcessGroupRegistry]:
    small_sums = mock.patch.object(gradient_sync, "BUCKET_BYTES", setting.bucket)
    with ProcessGroupRegistry(setting.at.topology) as registry, small_buckets(setting.bucket), small_sums:
        yield registry


def run(case: Case, path: Path) -> Report:
    """From the start to the end, with a checkpoint on the way where another run is to go on from it; in the same setting,
    or else this one ends there."""
    with _registry(case.setting) as registry:
        report, rank = Report(), Rank(case, case.setting, registry)
        if case.differing is not None and registry.topology.world_size > 1:
            report.problems += problems_of_differing_ranks(case, registry)
        optimizer = rank.optimizer()
        first = STEPS if case.resumed is None else case.saved_at
        rank.steps(optimizer, range(first), report)
        if case.resumed is not None:
            save_checkpoint(path, rank.model, optimizer)
        if case.resumed == case.setting:
            rank.steps(optimizer, range(first, STEPS), report)
        rank.see(optimizer, report)
        return report


def go_on(case: Case, path: Path) -> Report:
    """From the checkpoint to the end."""
    assert case.resumed is not None
    with _registry(case.resumed) as registry:
        report, rank = Report(), Rank(case, case.resumed, registry, moved=1.0)
        optimizer = rank.optimizer()
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


def problems_of_differing_ranks(case: Case, registry: ProcessGroupRegistry) -> list[str]:
    """One rank is told something else: every rank must say so, and nothing may change on any."""
    assert case.differing is not None
    other = registry.global_rank == case.draw("differing") % registry.topology.world_size
    rank, what = Rank(case, case.setting, registry), case.differing
    if what == "weights":
        return _other_weights(rank, other)
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
        problems = [] if DIFFERING[what] in str(error) else [f"{what} differs, but it said: {error}"]
    else:
        return [f"nobody saw that {what} differs"]
    unchanged = all(
        len(group["params"]) == len(before) and all(map(_same, group["params"], before))
        for group, before in zip(inner.param_groups, params, strict=True)
    )
    return problems if unchanged and not inner.state else [*problems, f"{what} differs, and something was changed"]


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
    """One copy starts from other values."""
    copies = rank.setting.at.topology.size(*rank.setting.at.spec("vector").replica_axes(rank.setting.at.topology))
    if rank.setting.check_replicas is False or copies == 1 or "vector" in rank.setting.at.stages:
        return []
    if other:
        with torch.no_grad():
            rank.model["vector"][5] += 0.5
    before = {name: local(param).clone() for name, param in rank.model.items()}
    try:
        rank.step(rank.optimizer(), number=STEPS)  # in which nothing overflows
    except ReplicaMismatchError as error:
        problems = [] if "vector: the parameter differs" in str(error) else [f"weights differ, but it said: {error}"]
    else:
        problems = ["nobody saw that the copies of a parameter differ"]
    same = all(torch.equal(before[name], local(param)) for name, param in rank.model.items())
    return problems if same else [*problems, "weights differ, and were stepped"]
