"""Optimizer states that are kept in bfloat16 between steps and converted to float32 for each update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...amp.by_bucket import Bucket, split_groups, step_by_bucket
from ...amp.casting import float32_of
from ...amp.master_weights import is_half_kept
from ...amp.stochastic_rounding import BUCKET_NUMEL, Drawn, Noise, round_all_
from ...parallel.layout.annotation import Annotation, annotation_of
from ...parallel.layout.spec import P
from ...parallel.mesh.value_checks import check_count, fields
from ..kernels.rounding import round_by_kernels
from ..norm.param_table import ParamPosition
from ..step.update_request import Update, UpdateRequest
from .elementwise import check_in_buckets
from .param_transform import ParamTransform, PlacementContext, Position, Replacements, StatePlacement


@dataclass(frozen=True)
class HalfStates(StatePlacement):
    """The state placement that keeps optimizer states of float32 parameters and masters in bfloat16.

        optimizer = ParallelOptimizer(adamw, registry, states=HalfStates())

    Updates run in float32.

    Memory of AdamW's states and masters, in bytes per element:

    | | float32 states | `HalfStates` |
    |---|---|---|
    | float32 parameters | 8 | 4 |
    | master weights | 12 | 8 |
    | split master weights | 10 | 6 |

    With `Sharded`, a rank has only its shards of states and masters. A step also needs float32 copies of the states of
    4 million elements, or of one larger parameter. Step counts and other scalars keep their dtypes.

    Rounding is stochastic. An update such as ``v += 0.001 * (g * g - v)`` often changes ``v`` by less than half a unit
    in the last place of bfloat16, and rounding to nearest would lose the change.

    Ranks with replicas of a shard use equal random bits. These depend on the seed, the step count, the shard's position
    on the mesh, and the parameter's name (of a tied parameter: its layout and shape). torch's kernels (see
    `use_kernels`) draw other bits on a CPU than on a GPU; meshstep's kernels draw equal bits.

    Args:
        dtype: The dtype of the states between steps. Only ``torch.bfloat16``, the default, is accepted: float16 would
            underflow most second moments to 0.
        seed: The seed of the stochastic rounding, an integer, equal on all ranks. Default 0.
    Raises:
        ValueError: By the constructor of `ParallelOptimizer`, on every rank: ``dtype`` is another dtype; the precision
            rounds stochastically or has ``main_grads=False``; or the optimizer computes a value from all of its parameters
            together, or its step uses collectives.
    Collectives: none. Host synchronization: none, except that of the optimizer's step. The optimizer steps bucket by
    bucket, so if its step synchronizes with the host, it does so once per bucket.
    """

    position: ClassVar[Position] = Position.STATE
    rounds_stochastically: ClassVar[bool] = True
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    def check(self, context: PlacementContext) -> None:
        if self.dtype != torch.bfloat16:
            raise ValueError(f"HalfStates(dtype={self.dtype}): give torch.bfloat16, which has the range of float32")
        if context.precision.stochastic_rounding:
            raise ValueError(
                f"precision={context.precision!r} keeps optimizer states in bfloat16 already: leave HalfStates out of "
                "states="
            )
        check_in_buckets(context.optimizer, "HalfStates updates parameters in several calls of the optimizer's step()")

    def transform(self, context: PlacementContext) -> ParamTransform:
        return HalfStatesTransform(self, context)


class HalfStatesTransform(ParamTransform):
    """The transform of `HalfStates`: converts states to float32 before an update, and rounds them to bfloat16 after it."""

    def __init__(self, how: HalfStates, context: PlacementContext) -> None:
        self.how, self.registry, self.optimizer, self.steps = how, context.registry, context.optimizer, 0
        self._split = context.precision.split_masters  # True: states of bfloat16 tensors are converted too
        self._keys: dict[Tensor, str] = {}  # the part of the random seed that depends on the tensor

    def not_captured(self) -> str | None:
        return (
            "HalfStates seeds its random bits on the host in each step, and all replays would use the same bits: leave it "
            "out of states="
        )

    def install(self, optimizer: torch.optim.Optimizer, positions: Sequence[ParamPosition]) -> Replacements:
        for at in positions:
            tensor = at.tensor
            if tensor.dtype == torch.float32 or (self._split and tensor.dtype == torch.bfloat16):
                spec = (annotation_of(tensor) or Annotation(P())).spec_on(self.registry.topology)
                # Pipeline stages must draw the same random bits for a tied parameter, but may use different names for
                # it.
                name = f"{spec} {tuple(tensor.shape)}" if spec.tied else at.name
                where = [self.registry.coordinate[axis] for axis in spec.distinct_axes(self.registry.topology)]
                self._keys[tensor] = f"{name} {where}"
        self.write_back()
        return {}

    @torch.no_grad()
    def step(self, request: UpdateRequest, update: Update) -> None:
        """Per bucket, convert the states to float32, call ``update``, and round the states to bfloat16.

        A skipped update changes no state, because a bfloat16 value that was converted to float32 rounds to itself.
        """

        def step_one(bucket: Bucket) -> None:
            self._lend(chain.from_iterable(bucket))
            update(request)
            self._round(chain.from_iterable(bucket))

        groups = (group["params"] for group in self.optimizer.param_groups)
        step_by_bucket(self.optimizer, split_groups(groups, lambda _: True, BUCKET_NUMEL), step_one)
        self.steps += 1

    @torch.no_grad()
    def write_back(self) -> None:
        self._round(self._keys)

    def _kept(self, params: Iterable[Tensor]) -> Iterator[tuple[Tensor, dict[str, Any], list[str]]]:
        for param in params:
            state = self.optimizer.state.get(param, {}) if param in self._keys else {}
            # Sorted, because ranks with replicas may have created their states in different orders.
            if keys := [key for key in sorted(state) if is_half_kept(key, state[key], param)]:
                yield param, state, keys

    def _lend(self, params: Iterable[Tensor]) -> None:
        kept = {(param, key): state[key] for param, state, keys in self._kept(params) for key in keys}
        for (param, key), value in float32_of(kept).items():
            self.optimizer.state[param][key] = value

    def _round(self, params: Iterable[Tensor]) -> None:
        everything = []
        for param, state, keys in self._kept(params):
            values = {key: state[key] for key in keys if state[key].dtype != self.how.dtype}
            state.update({key: torch.empty_like(value, dtype=self.how.dtype) for key, value in values.items()})
            if values:
                pairs = [(state[key], value) for key, value in values.items()]
                everything.append(Drawn(Noise(self.how.seed, self.steps, self._keys[param]), pairs))
        round_all_(everything, BUCKET_NUMEL // 4, round_by_kernels)

    def state_dict(self) -> dict[str, Any]:
        return {"half_states": {"steps": self.steps}}

    def check_state(self, state: Mapping[str, Any]) -> None:
        if "half_states" in state:
            fields({"steps": check_count})(state["half_states"], "half_states")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the number of steps, which seeds the rounding. `write_back` rounds the loaded states afterwards."""
        self.check_state(state)
        self.steps = state.get("half_states", {"steps": self.steps})["steps"]
