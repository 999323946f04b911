"""Randomly drawn training configurations: layout, memory format, precision, state placement, accumulation, clipping
and events.

The loss is a sum of products of parameters with random constants, so the gradient of every shard follows directly from
the definition of its layout; `dense_steps` computes it.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any, NamedTuple

import torch
from cases import slice_of
from hypothesis import strategies as st
from meshstep.amp import Bf16, NaiveFp16, TorchFp16
from meshstep.parallel import P, Topology, blocks
from torch import Tensor

STEPS = 5
Coordinate = dict[str, int]

# The model --------------------------------------------------------------------------------------------------------------


class Logical(NamedTuple):
    shape: tuple[int, ...]
    group: int = 0


MODEL = {
    "first": Logical((7, 5)),
    "second": Logical((7, 5)),
    "vector": Logical((13,), group=1),
    "split": Logical((6, 3)),
    "fused": Logical((12, 3)),
    "terms": Logical((9,), group=1),
    "bias": Logical((4,)),
    "experts": Logical((6, 4)),
    "tied": Logical((11,), group=1),
    "gain": Logical(()),
    "uneven": Logical((7, 2)),
    "few": Logical((1, 3), group=1),
    "conv": Logical((6, 4, 2, 2)),
    "late": Logical((5, 3), group=2),
    "late_split": Logical((6, 2), group=2),
}
ALWAYS_USED = ("first", "second", "gain")  # every stage needs some gradient in every accumulation window
SMALL = ("gain",)  # has one element: of the ranks that shard its optimizer states, only one updates it
ADDED_GROUP = 2  # the param group that may be added during the run
WHOLE = P()
UNEVEN = ("uneven", "few")  # parameters with shards of unequal sizes, some of them empty; checkpoints reject them


class Layout(NamedTuple):
    """A mesh, and the layout of the parameters that are not replicated on it.

    Args:
        stages: The pipeline stage by parameter name, for parameters on one stage only.
        said: The specs that the user declares with axis aliases (``aliases=`` of `Topology`), by parameter name; for
            all other parameters the user declares `specs`.
        meshes: Which parameters are DTensors: for each dim of their mesh its axes and the sharded tensor dim (None:
            replicated).
    """

    topology: Topology
    specs: dict[str, P]
    stages: dict[str, int] = {}  # noqa: RUF012 (a constant)
    said: dict[str, P] = {}  # noqa: RUF012
    meshes: dict[str, tuple[tuple[tuple[str, ...], int | None], ...]] = {}  # noqa: RUF012

    def spec(self, name: str) -> P:
        return self.specs.get(name, WHOLE)

    def holds(self, name: str, at: Coordinate) -> bool:
        return self.stages.get(name, at.get("pipe")) == at.get("pipe") and self.spec(name).holds(at, self.topology)

    def coordinates(self) -> list[Coordinate]:
        return [self.topology.coordinate(rank) for rank in range(self.topology.world_size)]


def _over(axis: str) -> dict[str, P]:
    return {name: P(axis) for name in ("split", "experts", "conv", "late_split", *UNEVEN)}


def _only(spec: P) -> dict[str, P]:
    return dict.fromkeys(MODEL, spec)


_TENSOR = {**_over("tensor"), "fused": P(blocks("tensor", 2)), "terms": P(partial="tensor")}
_STAGES = {"first": 0, "split": 0, "terms": 0, "experts": 0, "second": 1, "vector": 1, "fused": 1, "gain": 1}
_STAGES |= {"conv": 0, "late": 1, "late_split": 0}
_TIED = {"tied": P(tied={"pipe": (0, -1)}), "bias": P(owned={"pipe": 1})}
_GRID = {"split": P("row"), "fused": P(("col", "row")), "experts": P("row", "col"), "uneven": P("col"), "few": P("row")}
_GRID |= {"conv": P("row", "col"), "late_split": P("col", "row")}
_ALIASES = {"data": ("edp", "mid"), "expert": ("mid", "tensor")}
_FOLDED = {
    "split": P("tensor"),
    "fused": P(("mid", "tensor")),
    "terms": P(partial="tensor"),
    "bias": P(owned={"mid": 1, "tensor": 0}),
    "experts": P(None, ("mid", "tensor")),
    "uneven": P(("mid", "tensor")),
    "few": P(("edp", "mid")),
    "conv": P(None, ("mid", "tensor")),
    "late_split": P("tensor"),
}
_SAID = {
    "fused": P("expert"),
    "bias": P(owned={"expert": 2}),
    "experts": P(None, "expert"),
    "uneven": P("expert"),
    "few": P("data"),
    "conv": P(None, "expert"),
}
_MESHES: dict[str, tuple[tuple[tuple[str, ...], int | None], ...]] = {
    "first": ((("tensor",), None),),
    "split": ((("tensor",), 0),),
    "fused": ((("mid", "tensor"), 0),),
    "experts": ((("mid",), 1), (("tensor",), 1)),
}
_UNEVEN_STAGES = {"uneven": 1, "few": 0}
_FIRST_AND_LAST = {name: 2 * stage for name, stage in {**_STAGES, **_UNEVEN_STAGES}.items()}
LAYOUTS = {
    "one": Layout(Topology(), {}),
    "data=2": Layout(Topology(data=2), {}),
    "data=3": Layout(Topology(data=3), {}),
    "data=4": Layout(Topology(data=4), {}),
    "data=5": Layout(Topology(data=5), {}),
    "data=2,tensor=2": Layout(Topology(data=2, tensor=2), {**_TENSOR, "bias": P(owned={"tensor": 1})}),
    "tensor=3": Layout(Topology(tensor=3), {**_TENSOR, "bias": P(owned={"tensor": 1})}),
    "data=3,row=2": Layout(Topology(data=3, row=2), {"bias": P(owned={"row": 0}), "split": P("row")}),
    "row=2,col=2": Layout(
        Topology(row=2, col=2), {**_GRID, "bias": P("col", owned={"row": 0}), "terms": P(partial="row")}
    ),
    "row=2,col=2, diagonal": Layout(
        Topology(row=2, col=2),
        {**_GRID, "bias": P("col", owned={"row": "col"}), "experts": P(None, "row", owned={"col": "row"})},
    ),
    "row=3,col=2, diagonal": Layout(
        Topology(row=3, col=2), {"bias": P("col", owned={"row": "col"}), "split": P("row", partial="col")}
    ),
    "experts, data=2": Layout(Topology(roles={"expert": "data"}, data=2, expert=2), _over("expert")),
    "experts, other samples": Layout(Topology(roles={"expert": "data"}, expert=3), _over("expert")),
    "experts, same samples": Layout(Topology(roles={"expert": "model"}, expert=2), _over("expert")),
    "folded": Layout(Topology(edp=2, mid=2, tensor=2, aliases=_ALIASES), _FOLDED, said=_SAID),
    "folded, experts over data": Layout(
        Topology(edp=2, mid=2, tensor=1, aliases=_ALIASES), _FOLDED, said={**_SAID, "bias": P(owned={"expert": 1})}
    ),
    "folded, all experts": Layout(Topology(edp=1, mid=2, tensor=2, aliases=_ALIASES), _FOLDED, said=_SAID),
    "two meshes of DTensors": Layout(
        Topology(edp=1, mid=2, tensor=2, aliases=_ALIASES),
        _FOLDED,
        said={name: _SAID[name] for name in ("bias", "uneven", "few")},
        meshes=_MESHES,
    ),
    "two meshes of DTensors, and data": Layout(
        Topology(edp=2, mid=2, tensor=2, aliases=_ALIASES), _FOLDED, said={"bias": _SAID["bias"]}, meshes=_MESHES
    ),
    "stages": Layout(Topology(pipe=2, data=2), _TIED, {**_STAGES, **_UNEVEN_STAGES}),
    "stages of three": Layout(Topology(pipe=2, data=3), _TIED, {**_STAGES, **_UNEVEN_STAGES}),
    # Layouts with ranks that hold no parameter.
    "owned elsewhere": Layout(Topology(tensor=2), _only(P(owned={"tensor": 0}))),
    "owned elsewhere, data=2": Layout(Topology(data=2, tensor=2), _only(P(owned={"tensor": 1}))),
    "a stage without parameters": Layout(Topology(pipe=2, data=2), {}, dict.fromkeys(MODEL, 1)),
    "a stage without parameters in the middle": Layout(
        Topology(pipe=3), {"tied": P(tied={"pipe": (0, -1)}), "bias": P(owned={"pipe": 2})}, _FIRST_AND_LAST
    ),
}

# One case and its settings ----------------------------------------------------------------------------------------------


class Mode(NamedTuple):
    """A precision mode and the errors that its rounding may cause.

    Args:
        dtype: The dtype of the weights and of the gradients of one micro-batch.
        rounding: Error bound of the weights, relative to each element.
        rounding_per_step: Error bound of the updated values per step, relative to the largest value the parameter had.
        norm_rounding: Error bound of the norm. The default, 1e-6, is relative to the norm itself, or 2**-22 of
            `DenseRun.absolute_norms` if that is more; a larger bound is relative to `DenseRun.absolute_norms`.
        has_masters: The weights are copies of master weights: after the user writes weights, masters must be reloaded.
    """

    precision: Any
    dtype: torch.dtype
    rounding: float = 0.0
    rounding_per_step: float = 0.0
    norm_rounding: float = 1e-6
    has_masters: bool = False


PRECISIONS = {
    "fp32": Mode("fp32", torch.float32),
    "fp16": Mode(TorchFp16(init_scale=64.0), torch.float32),
    "bf16": Mode("bf16", torch.bfloat16, 2**-8, has_masters=True),
    "bf16, half gradients": Mode(Bf16(main_grads=False), torch.bfloat16, 2**-8, has_masters=True),
    "bf16, split masters": Mode(Bf16(split_masters=True), torch.bfloat16, 2**-8),
    "bf16, stochastic": Mode(
        Bf16(stochastic_rounding=True), torch.bfloat16, rounding_per_step=2**-7, norm_rounding=2**-7
    ),
    "fp16_naive": Mode(NaiveFp16(init_scale=64.0), torch.float16, 2**-11, has_masters=True),
}
MEMORY_FORMATS = ("contiguous", "channels_last", "permuted", "expanded", "offset", "strided")


@dataclass(frozen=True)
class Setting:
    """How a model is distributed and stepped; a run may resume from a checkpoint with another setting.

    ``memory`` is the seed of the memory format of each parameter; 0: all are contiguous.
    """

    layout: str
    memory: int
    named: bool
    states: str
    shard_axis: int
    offload: float | None
    micro: int
    managed: bool
    weighted: bool
    reduction: Any
    check_replicas: Any
    bucket: int

    @property
    def at(self) -> Layout:
        return LAYOUTS[self.layout]

    @property
    def axis(self) -> str | None:
        """Return the axis over which optimizer states are sharded; None without ZeRO, or if the mesh has no such axis.

        It is never the pipeline axis, whose stages have different parameters.
        """
        topology = self.at.topology
        axes = [axis for axis in topology.axes if axis not in topology.pipe_axes]
        axes = [*(["data"] if topology.aliases else []), *axes]
        return axes[self.shard_axis % len(axes)] if axes and self.states in ("zero1", "zero2") else None


@dataclass(frozen=True)
class Case:
    """One complete training run.

    Args:
        resumed: The setting after the checkpoint. If it equals the setting before the checkpoint, results must be bitwise
            identical. None: no checkpoint.
        saved_at: The number of steps before the checkpoint.
        stepped_before: Whether the optimizer that loads the checkpoint has already made steps.
        small: Whether the model has one element, apart from the parameters of a param group added later.
        idle: Whether some shards, and some ranks' replicas, have no gradient in some micro-batches or whole steps.
        absent: Whether a rank whose parameters are in no loss of a micro-batch may pass None as the loss.
        overflow: The step in which one element of a drawn parameter's gradient is infinite, if the parameter has a
            gradient in this step; or None.
        vetoed: The step that one rank rejects through ``commit=``, or None.
        added: The step before which a param group is added; None: it exists from the beginning.
        frozen: A parameter, the step before which it is frozen (0: before the optimizer is constructed), and the step
            before which it is unfrozen, or None.
        written: The step before which the user writes weights (some are zeros), and how: ``"in place"``, ``"loaded"``
            (`load_state_dict`), ``"moved"`` (new memory) or ``"relaid"`` (another memory format).
        differing: The key of `DIFFERING` whose option (or initial weights) differs on one rank. If ranks compare it,
            all ranks must raise an error. None: no rank differs.
    """

    setting: Setting
    resumed: Setting | None
    saved_at: int
    stepped_before: bool
    kind: str
    implementation: str
    precision: str
    small: bool
    norm_type: float
    max_norm: float | None
    group_max_norm: float | None
    idle: bool
    absent: bool
    overflow: int | None
    vetoed: int | None
    added: int | None
    frozen: tuple[str, int, int | None] | None
    written: tuple[int, str] | None
    differing: str | None
    seed: int

    @property
    def mode(self) -> Mode:
        return PRECISIONS[self.precision]

    @property
    def names(self) -> list[str]:
        if self.small:
            return [name for name in MODEL if name in SMALL or (self.added is not None and _is_added(name))]
        return [name for name in MODEL if self.resumed is None or name not in UNEVEN]

    def has(self, name: str, step: int) -> bool:
        return self.added is None or self.added <= step or not _is_added(name)

    def is_frozen(self, name: str, step: int) -> bool:
        if self.frozen is None or self.frozen[0] != name:
            return False
        _, start, end = self.frozen
        return start <= step and (end is None or step < end)

    def is_written(self, step: int) -> bool:
        return self.written is not None and self.written[0] == step

    def setting_of(self, step: int) -> Setting:
        return self.setting if self.resumed is None or step < self.saved_at else self.resumed

    def draw(self, *key: object) -> int:
        """Return a pseudo-random number below 2**32."""
        return zlib.crc32(repr((self.seed, *key)).encode())


# The data of a rank ------------------------------------------------------------------------------------------------


def weight(case: Case, setting: Setting, at: Coordinate, step: int, micro: int) -> int:
    """Return the weight of the micro-batch on this data coordinate; 0: the micro-batch is empty."""
    where = tuple(at[axis] for axis in setting.at.topology.data_axes)
    drawn = case.draw("weight", step, micro, where) % 4 if any(where) or micro else 1
    return drawn if setting.weighted or not setting.managed else min(drawn, 1)


def is_masked(case: Case, setting: Setting, at: Coordinate, step: int, micro: int) -> bool:
    """Return whether the micro-batch has the weight 0, and the rank passes its loss instead of None."""
    where = tuple(at[axis] for axis in setting.at.topology.data_axes)
    passed = setting.weighted and case.draw("masked", step, micro, where) % 2 == 1
    return passed and not weight(case, setting, at, step, micro)


def is_idle(case: Case, setting: Setting, name: str, at: Coordinate, step: int, micro: int) -> bool:
    """Return whether the shard of the rank at ``at`` is in no loss of this micro-batch.

    Replicas over data-parallel axes, partial axes and tied stages may differ; replicas over model axes never do.
    """
    if not case.has(name, step) or case.is_frozen(name, step):
        return True
    if not case.idle or name in ALWAYS_USED:
        return False
    spec = setting.at.spec(name)
    piece = [(axis, at[axis]) for axis in spec.sharded_axes]
    mine = [(axis, at[axis]) for axis in (*setting.at.topology.data_axes, *spec.partial, *dict(spec.tied))]
    everywhere, here = case.draw("idle", name, step, piece) % 3, case.draw("idle", name, step, micro, piece, mine) % 3
    return not everywhere or not here


def numbers(case: Case, setting: Setting, name: str, at: Coordinate, step: int, micro: int) -> Tensor:
    """Return the constants (float64) with which the rank at ``at`` multiplies its shard. The parameters' dtype
    represents them exactly; their float32 sums are rounded, so they depend on the order of summation."""
    layout, (shape, _) = setting.at, MODEL[name]
    spec, topology = layout.spec(name), layout.topology
    axes = sorted({*topology.data_axes, *spec.partial, *dict(spec.tied)})
    generator = torch.Generator().manual_seed(
        case.draw("numbers", name, step, micro, [(axis, at[axis]) for axis in axes])
    )
    sizes = 2.0 ** torch.randint(-8, 3, shape, generator=generator)
    full = (torch.randn(shape, generator=generator) * sizes).to(case.mode.dtype)
    names = case.names
    overflows = step == case.overflow and micro == 0 and name == names[case.draw("overflow") % len(names)]
    if overflows and not any(at[axis] for axis in axes):
        full.view(-1)[case.draw("element") % full.numel()] = inf
    return slice_of(full.double(), spec, topology, topology.rank(**at))


def start_of(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(-8, 9, MODEL[name].shape, generator=generator).double() / 8


def written_to(case: Case, name: str) -> Tensor:
    """Return the full parameter that the user writes: about half of the elements are zeros of both signs."""
    generator = torch.Generator().manual_seed(case.draw("written", name))
    value = torch.randint(-8, 9, MODEL[name].shape, generator=generator).double() / 8
    return value * torch.randint(0, 2, value.shape, generator=generator)


# Memory formats ---------------------------------------------------------------------------------------------------------


def memory_format(case: Case, setting: Setting, name: str, relaid: bool = False) -> str:
    """Return the memory format of a rank's shard of the parameter; DTensors are contiguous."""
    if not setting.memory or name in setting.at.meshes:
        return "contiguous"
    return MEMORY_FORMATS[case.draw("memory", setting.memory, name, relaid) % len(MEMORY_FORMATS)]


def laid_out(value: Tensor, how: str) -> Tensor:
    """Return a copy of ``value`` in one of `MEMORY_FORMATS`; all but the last are non-overlapping and dense."""
    reverse = tuple(range(value.dim()))[::-1]
    if how == "channels_last" and value.dim() == 4:
        return value.clone(memory_format=torch.channels_last)
    if how == "permuted" or how == "channels_last":
        order = (*reverse[2:], *reverse[:2])
        inverse = [order.index(dim) for dim in range(value.dim())]
        return value.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)
    if how == "expanded":
        turned = value.permute(reverse)
        return turned[:1].expand(turned.shape).clone().permute(reverse).copy_(value) if value.dim() else value.clone()
    if how == "offset":
        return value.new_empty(value.numel() + 1)[1:].view(value.shape).copy_(value)
    if how == "strided":
        return value.new_empty((*value.shape, 2))[..., 1].copy_(value)
    return value.clone(memory_format=torch.contiguous_format)


def _is_added(name: str) -> bool:
    return MODEL[name].group == ADDED_GROUP


# Drawing random cases ---------------------------------------------------------------------------------------------------

WAYS_OF_WRITING = ("in place", "loaded", "moved", "relaid")

# Options that one rank alone passes differently, with the name that the error must contain; "weights" differ in values
# and must be detected in the first step.
DIFFERING = {
    "max_norm": "max_norm",
    "norm_type": "norm_type",
    "reduction": "reduction",
    "check_replicas": "check_replicas",
    "accumulation_steps": "accumulation_steps",
    "offload": "states",
    "max_skips_in_a_row": "on_nonfinite",
    "precision": "precision",
    "lr": "lr of param group 0",
    "threshold": "max_norm of param group 1",
    "kind": "the optimizer",
    "weights": "the parameter differs",
}

# Layouts drawn more often than others: those where shards differ in the number of steps because their gradients are
# summed over a single rank, where replicas share buckets with different parameters, and where a rank holds nothing.
_OFTEN = [
    "folded",
    "two meshes of DTensors",
    "tensor=3",
    "row=2,col=2",
    "row=2,col=2, diagonal",
    "experts, other samples",
    "experts, same samples",
    "data=3,row=2",
    "owned elsewhere",
    "owned elsewhere, data=2",
    "a stage without parameters in the middle",
]


def setting_of(rng: random.Random) -> Setting:
    return Setting(
        layout=rng.choice(sorted(LAYOUTS) + _OFTEN),
        memory=rng.choice([0, rng.randint(1, 9)]),
        named=rng.random() < 0.3,
        states=rng.choice(["whole", "overlap", "zero1", "zero2"]),
        shard_axis=rng.randrange(2),
        offload=rng.choice([None, 0.5, 1.0]),
        micro=rng.randint(1, 3),
        managed=rng.random() < 0.5,
        weighted=rng.random() < 0.5,
        reduction=rng.choice(["packed", "per_group"]),
        check_replicas=rng.choice([True, "first", False]),
        bucket=rng.choice([64, 200, 2**25]),
    )


def case_of(number: int) -> Case:
    """Draw a case from the seed ``number``, independently of other cases. Hypothesis would often vary an earlier case, but
    a few dozen cases must cover all kinds of cases."""
    rng = random.Random(number)
    setting, resumed = setting_of(rng), setting_of(rng)
    goes_on = rng.choice(["on", "on", "same", "other states", "other layout", "other layout"])
    precision = rng.choice([*sorted(PRECISIONS), "fp32", "bf16, split masters"])
    if goes_on == "other states":
        resumed = replace(resumed, layout=setting.layout)
    if PRECISIONS[precision].dtype != torch.float32:  # torch accumulates gradients of a DTensor in the DTensor's dtype
        setting, resumed = (s if not s.at.meshes else replace(s, micro=1) for s in (setting, resumed))
    if precision == "bf16, half gradients":  # this mode rejects options that accumulate gradients
        setting, resumed = (replace(s, states="whole", offload=None, micro=1) for s in (setting, resumed))
    differing = rng.choice([None] * 5 + [*DIFFERING, "weights", "weights"])
    if precision == "bf16, half gradients" and differing == "offload":  # the differing rank alone would raise
        differing = None
    small = rng.random() < 0.15
    added = rng.choice([None, None, *range(1, STEPS)])
    return Case(
        setting,
        {"on": None, "same": setting}.get(goes_on, resumed),
        saved_at=rng.randint(1, STEPS - 1),
        stepped_before=rng.random() < 0.5,
        kind=rng.choice(["SGD", "AdamW", "AdamW"]),
        implementation=rng.choice(["fused", "fused", "foreach", "for-loop"]),
        precision=precision,
        small=small,
        norm_type=rng.choice([1.0, 2.0, 3.0, inf]),
        max_norm=rng.choice([None, 0.7, 30.0]),
        group_max_norm=rng.choice([None, 0.3]),
        idle=rng.random() < 0.7,
        absent=rng.random() < 0.6,
        overflow=rng.choice([None, None, None, 0, 1, 2, 3]),
        vetoed=rng.choice([None, None, *range(STEPS)]),
        added=added,
        frozen=None if small or rng.random() < 0.5 else _frozen(rng, added),
        written=rng.choice([None, (rng.randint(1, STEPS - 1), rng.choice(WAYS_OF_WRITING))]),
        differing=differing,
        seed=number,
    )


def _frozen(rng: random.Random, added: int | None) -> tuple[str, int, int | None]:
    """Draw the frozen parameter, the step before which it is frozen, and the step before which it is unfrozen, or None.

    A parameter that is frozen at construction or when a param group is added stays frozen.
    """
    name = rng.choice([name for name in MODEL if name not in (*ALWAYS_USED, *UNEVEN) and not _is_added(name)])
    start, end = rng.randrange(STEPS), rng.choice([None, *range(1, STEPS)])
    stays = end is None or end <= start or start == 0 or (added is not None and start <= added <= end)
    return name, start, None if stays else end


CASES = st.integers(0, 2**32 - 1).map(case_of)


def data_ranks(setting: Setting) -> int:
    topology = setting.at.topology
    return prod(topology.size(axis) for axis in topology.data_axes)
