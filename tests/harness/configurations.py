"""Configurations of a run, drawn at random: the model's layout, precision, states, accumulation, clipping, rarer turns.

The loss is a sum of products of parameters with numbers that a seed gives, so that the gradient of every piece can be
written down from the definition of its layout alone; `dense_steps` does.
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
from meshstep.amp import NaiveFp16
from meshstep.parallel import P, Topology, blocks
from torch import Tensor

STEPS = 5
Coordinate = dict[str, int]

# The model --------------------------------------------------------------------------------------------------------------


class Logical(NamedTuple):
    """A parameter of the whole model."""

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
}
ALWAYS_USED = ("first", "second")  # in every window some gradient must come on every stage
WHOLE = P()
UNEVEN = ("uneven", "few")  # their pieces are of unequal sizes, some empty, which a checkpoint can't have


class Layout(NamedTuple):
    """A mesh, and what is not replicated on it.

    Args:
        specs: In axes.
        stages: The only pipeline stage that has a parameter.
        said: What parameters are declared, where that is in aliases.
        meshes: What is a DTensor: the axes of each dim of its mesh, and the tensor dim that it cuts; None: it has copies.
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
    return {name: P(axis) for name in ("split", "experts", *UNEVEN)}


_TENSOR = {**_over("tensor"), "fused": P(blocks("tensor", 2)), "terms": P(partial="tensor")}
_STAGES = {"first": 0, "split": 0, "terms": 0, "experts": 0, "second": 1, "vector": 1, "fused": 1, "gain": 1}
_TIED = {"tied": P(tied={"pipe": (0, -1)}), "bias": P(owned={"pipe": 1})}
_GRID = {"split": P("row"), "fused": P(("col", "row")), "experts": P("row", "col"), "uneven": P("col"), "few": P("row")}
_ALIASES = {"data": ("edp", "mid"), "expert": ("mid", "tensor")}
_FOLDED = {
    "split": P("tensor"),
    "fused": P(("mid", "tensor")),
    "terms": P(partial="tensor"),
    "bias": P(owned={"mid": 1, "tensor": 0}),
    "experts": P(None, ("mid", "tensor")),
    "uneven": P(("mid", "tensor")),
    "few": P(("edp", "mid")),
}
_SAID = {
    "fused": P("expert"),
    "bias": P(owned={"expert": 2}),
    "experts": P(None, "expert"),
    "uneven": P("expert"),
    "few": P("data"),
}
_MESHES: dict[str, tuple[tuple[tuple[str, ...], int | None], ...]] = {
    "first": ((("tensor",), None),),
    "split": ((("tensor",), 0),),
    "fused": ((("mid", "tensor"), 0),),
    "experts": ((("mid",), 1), (("tensor",), 1)),
}
_UNEVEN_STAGES = {"uneven": 1, "few": 0}
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
}

# A case -----------------------------------------------------------------------------------------------------------------

PRECISIONS: dict[str, tuple[Any, torch.dtype, float]] = {  # the rounding of the weights, relative to each
    "fp32": ("fp32", torch.float32, 0.0),
    "bf16": ("bf16", torch.bfloat16, 2**-8),
    "fp16_naive": (NaiveFp16(init_scale=64.0), torch.float16, 2**-11),
}


@dataclass(frozen=True)
class Setting:
    """How a model is spread and stepped: what may be another one after a checkpoint."""

    layout: str
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
        """Over which states are sharded; not over stages, which have other parameters."""
        topology = self.at.topology
        axes = [axis for axis in topology.axes if axis not in topology.pipe_axes]
        axes = [*(["data"] if topology.aliases else []), *axes]
        return axes[self.shard_axis % len(axes)] if axes and self.states in ("zero1", "zero2") else None


@dataclass(frozen=True)
class Case:
    """A run.

    Args:
        resumed: How it goes on after a checkpoint; the same setting: bit for bit. None: there is none.
        saved_at: Steps before it.
        stepped_before: What the checkpoint is loaded into has stepped already.
        idle: Pieces, and some ranks' copies, are without a gradient in some micro-batches or whole steps.
        overflow: The step in which one element of one gradient is infinite.
        differing: What one rank is told otherwise than the others, who must all refuse.
    """

    setting: Setting
    resumed: Setting | None
    saved_at: int
    stepped_before: bool
    kind: str
    precision: str
    norm_type: float
    max_norm: float | None
    group_max_norm: float | None
    idle: bool
    overflow: int | None
    differing: str | None
    seed: int

    @property
    def names(self) -> list[str]:
        return [name for name in MODEL if self.resumed is None or name not in UNEVEN]

    def setting_of(self, step: int) -> Setting:
        return self.setting if self.resumed is None or step < self.saved_at else self.resumed

    def draw(self, *key: object) -> int:
        """A number below 2**32."""
        return zlib.crc32(repr((self.seed, *key)).encode())


# What a rank computes with ------------------------------------------------------------------------------------------------


def weight(case: Case, setting: Setting, at: Coordinate, step: int, micro: int) -> int:
    """Of the micro-batch on this data coordinate; 0: there is nothing in it."""
    where = tuple(at[axis] for axis in setting.at.topology.data_axes)
    drawn = case.draw("weight", step, micro, where) % 4 if any(where) or micro else 1
    return drawn if setting.weighted or not setting.managed else min(drawn, 1)


def is_idle(case: Case, setting: Setting, name: str, at: Coordinate, step: int, micro: int) -> bool:
    """Whether the piece of the rank at ``at`` is in no loss of this micro-batch; copies are or are not together."""
    if not case.idle or name in ALWAYS_USED:
        return False
    spec = setting.at.spec(name)
    piece = [(axis, at[axis]) for axis in spec.sharded_axes]
    mine = [(axis, at[axis]) for axis in (*setting.at.topology.data_axes, *spec.partial, *dict(spec.tied))]
    everywhere, here = case.draw("idle", name, step, piece) % 3, case.draw("idle", name, step, micro, piece, mine) % 3
    return not everywhere or not here


def numbers(case: Case, setting: Setting, name: str, at: Coordinate, step: int, micro: int) -> Tensor:
    """What this rank's piece is multiplied with: of the parameters' dtype, but sums of them are rounded in float32, and are
    others in another order."""
    layout, (shape, _) = setting.at, MODEL[name]
    spec, topology = layout.spec(name), layout.topology
    axes = sorted({*topology.data_axes, *spec.partial, *dict(spec.tied)})
    generator = torch.Generator().manual_seed(
        case.draw("numbers", name, step, micro, [(axis, at[axis]) for axis in axes])
    )
    sizes = 2.0 ** torch.randint(-8, 3, shape, generator=generator)
    full = (torch.randn(shape, generator=generator) * sizes).to(PRECISIONS[case.precision][1])
    names = case.names
    overflows = step == case.overflow and micro == 0 and name == names[case.draw("overflow") % len(names)]
    if overflows and not any(at[axis] for axis in axes):
        full.view(-1)[case.draw("element") % full.numel()] = inf
    return slice_of(full.double(), spec, topology, topology.rank(**at))


def start_of(name: str) -> Tensor:
    """The full parameter before the first step."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(-8, 9, MODEL[name].shape, generator=generator).double() / 8


# Drawing ----------------------------------------------------------------------------------------------------------------

# What one rank alone is told, which the error must name; and "weights", which the first step must find.
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

# Drawn more often than others: where a piece's gradients are summed with nobody's, and pieces so differ in what they have
# seen; and where ranks with copies of a parameter have others in their buckets.
_OFTEN = [
    "folded",
    "two meshes of DTensors",
    "tensor=3",
    "row=2,col=2",
    "row=2,col=2, diagonal",
    "experts, other samples",
    "experts, same samples",
    "data=3,row=2",
]


def setting_of(rng: random.Random) -> Setting:
    """The next one that ``rng`` draws."""
    return Setting(
        layout=rng.choice(sorted(LAYOUTS) + _OFTEN),
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
    """Drawn evenly, unlike by hypothesis, which stays near what it has drawn before: a few dozen are to be all kinds."""
    rng = random.Random(number)
    setting, resumed = setting_of(rng), setting_of(rng)
    goes_on = rng.choice(["on", "on", "same", "other states", "other layout", "other layout"])
    precision = rng.choice(sorted(PRECISIONS))
    if goes_on == "other states":
        resumed = replace(resumed, layout=setting.layout)
    if precision != "fp32":  # torch adds the gradients of a DTensor up in its own dtype
        setting, resumed = (s if not s.at.meshes else replace(s, micro=1) for s in (setting, resumed))
    return Case(
        setting,
        {"on": None, "same": setting}.get(goes_on, resumed),
        saved_at=rng.randint(1, STEPS - 1),
        stepped_before=rng.random() < 0.5,
        kind=rng.choice(["SGD", "AdamW", "AdamW"]),
        precision=precision,
        norm_type=rng.choice([1.0, 2.0, 3.0, inf]),
        max_norm=rng.choice([None, 0.7, 30.0]),
        group_max_norm=rng.choice([None, 0.3]),
        idle=rng.random() < 0.7,
        overflow=rng.choice([None, None, None, 0, 1, 2, 3]),
        differing=rng.choice([None] * 5 + [*DIFFERING, "weights", "weights"]),
        seed=number,
    )


CASES = st.integers(0, 2**32 - 1).map(case_of)


def data_ranks(setting: Setting) -> int:
    """How many ranks see other samples."""
    topology = setting.at.topology
    return prod(topology.size(axis) for axis in topology.data_axes)
