"""Parameter transforms of the precision modes: float32 masters, split masters, or stochastic rounding of the weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ...amp.master_weights import (
    MasterWeights,
    check_saved,
    join_master,
    load_states_exactly,
    split_master,
    use_main_grad_,
)
from ...amp.stochastic_rounding import StochasticRounding
from ...parallel.layout.annotation import label_of
from ...parallel.mesh.value_checks import check_text, list_of
from ..gradients.in_place import clear_gradients
from ..kernels.rounding import round_by_kernels
from ..norm.param_table import ParamPosition
from ..norm.replicas import TensorHash
from ..step.update_request import LowPrecisionOut, SplitWeights, Update, UpdateRequest
from ..step.window import Window
from ..step.wrapped_optimizer import params_of
from .elementwise import check_in_buckets
from .param_transform import ParamTransform, PlacementContext, Replacements

# Split master weights -------------------------------------------------------------------------------------------------

# A split weight is a bfloat16 weight with an int16 remainder. Together they store all bits of its float32 master: weight
# bits x 2^16 + remainder (see `split_master`). The weight is not replaced: the param groups hold the bfloat16 weight, its
# gradient is the float32 main gradient, and its optimizer state is float32 (bfloat16 with `HalfStates`). The update
# computes the master from weight and remainder, in registers or bucket by bucket (`SplitWeights`).

MANY_WRITES = 3
"""Number of consecutive steps: if other code wrote or moved weights before each of them, `SplitMasters` warns."""
_version: Callable[[Tensor], int] = attrgetter("_version")


def check_split(context: PlacementContext, params: Sequence[tuple[str | None, Tensor]]) -> None:
    """Raise ValueError if ``Bf16(split_masters=True)`` is used with an incompatible parameter, setting or optimizer."""
    if not context.precision.split_masters:
        return
    name = "Bf16(split_masters=True)"
    for label, param in params:
        if param.requires_grad and param.dtype == torch.float16:
            raise ValueError(
                f"{name}: {label or f'a parameter of shape {tuple(param.shape)}'} is float16, but only bfloat16 parameters "
                "can have split masters: prepare the model with this mode, or use 'fp16_naive', which has float32 "
                "master weights"
            )
    if context.data_parallel is not None and not context.main_grads:
        raise ValueError(
            f"{name} needs float32 gradients, {context.data_parallel.float32_grads_advice}, or leave split_masters out"
        )
    check_in_buckets(context.optimizer, f"{name} updates parameters in several calls of the optimizer's step()")


class SplitMasters(ParamTransform):
    """The transform that keeps remainders of trained bfloat16 tensors: the low 16 bits of their float32 masters.

    If other code writes a weight between two steps, the next step sets its remainder to 0, so that the master is the
    written value. A write is detected if it changes the tensor's version counter, or gives it new memory with other
    values. If the values in new memory are equal, as after ``model.to(memory_format=...)``, the remainder is kept. For
    this comparison the previous memory, 2 bytes per element, stays allocated until the next step. In-place writes
    through ``.data`` are not detected. Then the remainder is kept, and the master still rounds to the written value.

    Attributes:
        remainders: A remainder is 0, and the master equals the weight, until the tensor is stepped or a state is
            loaded.
    """

    supports_partial_step = True

    def __init__(self, context: PlacementContext) -> None:
        self.optimizer = context.optimizer
        self.remainders: dict[Tensor, Tensor] = {}
        self._index: dict[Tensor, int] = {}  # of each weight in `_seen` and `_memory`, in ascending order
        self._seen: list[tuple[int, int]] = []  # (version counter, address) of each weight
        self._memory: list[Tensor] = []  # aliases keep replaced memory allocated until it has been compared
        self._loaded: dict[Tensor, int] = {}  # after a load: a hash of each weight; empty from the next step on
        self._writes = 0  # number of consecutive steps before which other code wrote or moved weights
        load_states_exactly(self.optimizer, self.remainders)

    @torch.no_grad()
    def install(self, optimizer: torch.optim.Optimizer, positions: Sequence[ParamPosition]) -> Replacements:
        self._drop_written()
        for tensor in (at.tensor for at in positions):
            if tensor.dtype == torch.bfloat16 and tensor.requires_grad and tensor not in self.remainders:
                self.remainders[tensor] = torch.zeros_like(tensor, dtype=torch.int16)
                use_main_grad_(tensor)
        self._note_weights()
        return {}

    # Written weights -------------------------------------------------------------------------------------------------

    def _note_weights(self) -> None:
        if len(self._index) != len(self.remainders):
            self._index = {weight: index for index, weight in enumerate(self.remainders)}
        self._seen, self._memory = self._look(), list(map(Tensor.detach, self._index))

    def _look(self) -> list[tuple[int, int]]:
        return list(zip(map(_version, self._index), map(Tensor.data_ptr, self._index), strict=True))

    @torch.no_grad()
    def _drop_written(self) -> list[Tensor]:
        """Set to 0 the remainders of weights that other code has written.

        Until the first step after a load, a weight that was overwritten with equal values keeps its remainder.

        Return the weights that other code wrote (after a load: with other values), and the weights that have new
        memory.
        Host synchronization: none, except once if weights were written between a load and the next step.
        """
        now = self._look()
        if now == self._seen:
            return []
        written, moved = list[Tensor](), dict[Tensor, Tensor]()
        for weight, new, before, memory in zip(self._index, now, self._seen, self._memory, strict=True):
            if new[0] != before[0]:
                written.append(weight)
            if new[1] != before[1]:
                moved[weight] = memory
        if self._loaded:  # a script may load the model after the optimizer, which writes equal values
            found = _bit_sums(written)
            written = [weight for weight in written if found[weight] != self._loaded.get(weight)]
        if written:
            torch._foreach_zero_([self.remainders[weight] for weight in written])
        for weight, memory in moved.items():
            _drop_if_other(self.remainders[weight], weight, memory)
        self._note_weights()
        changed = {*written, *moved}
        return [weight for weight in self._index if weight in changed]

    def pull_grads(self, window: Window, averaged: bool) -> None:
        """Set to 0 the remainders of weights that other code has written.

        Warn if this happened before each of `MANY_WRITES` consecutive steps.

        If a weight was written and a CUDA graph captures the step, RuntimeError is raised: each replay would set the
        remainder to 0.
        Host synchronization: none, except once if weights were written right after a load.
        """
        dropped = self._drop_written()
        if dropped and window.captured:
            raise RuntimeError(
                f"{label_of(dropped[0])} was written, or moved to new memory, since the last step. Every replay of this "
                "CUDA graph would set the low 16 bits of the parameter's master weight to 0: make one step without a graph "
                "before the capture"
            )
        self._writes = self._writes + 1 if dropped else 0
        if self._writes == MANY_WRITES:
            warnings.warn(
                f"{label_of(dropped[0])} was written before each of {MANY_WRITES} steps in a row. With split masters a "
                "write drops the bits of the master weight beyond bfloat16, so small updates are lost: don't write weights "
                "in every step. Apply a pruning mask, for example, in the forward or to the gradients",
                stacklevel=2,
            )

    def step(self, request: UpdateRequest, update: Update) -> None:
        try:
            update(replace(request, split_weights=SplitWeights(self.remainders)))
        finally:
            self._seen, self._loaded = self._look(), {}

    def write_back(self) -> None:
        """Record that meshstep itself wrote the weights, so that their remainders are kept.

        Host synchronization: one after a load, else none.
        """
        self._note_weights()
        if self._loaded:
            self._loaded = _bit_sums([*self._index])

    @torch.no_grad()
    def reload(self) -> None:
        if self.remainders:
            torch._foreach_zero_(list(self.remainders.values()))
        self._note_weights()
        self._loaded = {}

    def _remainder(self, tensor: Tensor) -> Tensor | None:
        """Return the remainder of ``tensor``, or None. If other code wrote the tensor, its remainder is set to 0 first."""
        remainder = self.remainders.get(tensor)
        if remainder is not None and (tensor._version, tensor.data_ptr()) != self._seen[self._index[tensor]]:
            self._drop_written()
        return remainder

    def extra_state(self, tensor: Tensor) -> Mapping[str, Tensor]:
        remainder = self._remainder(tensor)
        return {} if remainder is None else {"remainder": remainder}

    @torch.no_grad()
    def master_of(self, tensor: Tensor) -> Tensor | None:
        remainder = self._remainder(tensor)
        return None if remainder is None else join_master(tensor.detach(), remainder)

    def step_as_masters(self, step: Callable[[], object]) -> None:
        """Call ``step``, the optimizer's own step, bucket by bucket, with the split weights replaced by float32 masters."""
        self._drop_written()
        SplitWeights(self.remainders).step(self.optimizer, step)
        self._note_weights()

    # Saving ----------------------------------------------------------------------------------------------------------

    def _by_position(self) -> Iterator[tuple[int, Tensor]]:
        params = enumerate(params_of(self.optimizer))
        return ((position, param) for position, param in params if param in self.remainders)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return ``{"masters": {index in the list of all parameters: float32 master}}``. Allocates 4 bytes per element."""
        self._drop_written()
        masters = {
            position: join_master(weight.detach(), self.remainders[weight]) for position, weight in self._by_position()
        }
        return {"masters": masters}

    def check_state(self, state: Mapping[str, Any]) -> None:
        check_saved(state, dict(self._by_position()))

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set weights and remainders from the saved masters.

        It raises ValueError, and changes nothing, if they don't fit this optimizer.
        Host synchronization: yes.
        """
        weights = dict(self._by_position())
        saved = check_saved(state, weights)
        for position, weight in weights.items():
            master = torch.empty_like(weight, dtype=torch.float32).copy_(saved[position])
            rounded, remainder = split_master(master)
            weight.copy_(rounded)
            self.remainders[weight].copy_(remainder)
        self._note_weights()
        self._loaded = _bit_sums([*self._index])


def _drop_if_other(remainder: Tensor, weight: Tensor, before: Tensor) -> None:
    """Set ``remainder`` to 0 unless ``weight`` is bitwise equal to ``before``, the weight's earlier memory.

    The comparison stays on the device, without host synchronization.
    """
    if (weight.shape, weight.dtype, weight.device) != (before.shape, before.dtype, before.device):
        remainder.zero_()
        return
    same = weight.detach().view(torch.int16) == before.view(torch.int16)
    remainder.mul_(same.all())


def _bit_sums(weights: Sequence[Tensor]) -> dict[Tensor, int]:
    """Return an exact integer hash of each tensor's bits. Host synchronization: one."""
    hashes = TensorHash(torch.device("cpu"), exact=True)(weights).tolist() if weights else []
    return dict(zip(weights, hashes, strict=True))


# Transforms of the precision modes ------------------------------------------------------------------------------------


def precision_transform(context: PlacementContext) -> ParamTransform:
    if context.precision.split_masters:
        return SplitMasters(context)
    if context.precision.masters:
        # DDP can keep gradients in half precision: they are cast to float32. With ``main_grads=False`` in the precision
        # they are not cast, and the update reads them in half precision.
        return Masters(context.main_grads, cast=context.precision.main_grads)
    if context.precision.stochastic_rounding:
        return StochasticallyRounded(context)
    return ModelDtypes(context.optimizer)


def check_main_grads(context: PlacementContext, accumulation_steps: int | None) -> None:
    """Raise ValueError if gradients are kept in half precision, and another setting needs float32 gradients."""
    if context.precision.main_grads or not context.precision.masters:
        return
    adds = [f"states={type(placement).__name__}(...)" for placement in context.placements]
    adds += ["overlap=True"] if context.overlap else []
    adds += [f"accumulation_steps={accumulation_steps}"] if accumulation_steps not in (None, 1) else []
    if adds:
        raise ValueError(
            f"{context.precision!r} keeps gradients in half precision, but {adds[0]} needs float32 gradients: "
            "leave main_grads=False out"
        )


class ModelDtypes(ParamTransform):
    """The transform of precision modes without masters and stochastic rounding, such as ``"fp32"``.

    It replaces no tensor. When a state is loaded, it checks that the parameters have the saved dtypes.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"dtypes": sorted({str(param.dtype) for param in params_of(self.optimizer)})}

    def check_state(self, state: Mapping[str, Any]) -> None:
        list_of(check_text)(state.get("dtypes", ()), "dtypes")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the state was saved for parameters of the same dtypes, because torch would cast states silently."""
        own, saved = self.state_dict(), {key: value for key, value in state.items() if key != "shards"}
        if saved.get("dtypes") != own["dtypes"]:
            given = ", ".join(saved.get("dtypes", ())) or f"unknown dtypes (it has {', '.join(saved) or 'no entries'})"
            raise ValueError(
                f"the state was saved for parameters of {given}, but the optimizer steps {', '.join(own['dtypes'])}, "
                "without master weights; convert the model to the saved dtypes before you make the optimizer"
            )


class Masters(ParamTransform):
    """The transform that replaces half-precision tensors by float32 masters (`MasterWeights`).

    With ``main_grads``, half-precision tensors have float32 gradients, which their masters share. Otherwise masters get
    float32 copies of the gradients (``cast``), or the half-precision gradients themselves.
    """

    supports_partial_step = True

    def __init__(self, main_grads: bool, cast: bool) -> None:
        self._main_grads, self._cast = main_grads, cast
        self.masters: MasterWeights | None = None
        self._has_failed = False  # True after an error of `pull_grads`, for example because other code wrote weights

    def install(self, optimizer: torch.optim.Optimizer, positions: Sequence[ParamPosition]) -> Replacements:
        if self.masters is None:
            self.masters = MasterWeights(optimizer, main_grads=self._main_grads, cast=self._cast)
            new = self.masters.pairs
        else:
            before = len(self.masters.pairs)
            self.masters.refresh()
            new = self.masters.pairs[before:]
        return {param: [(master, 0)] for param, master in new}

    @property
    def _made(self) -> MasterWeights:
        assert self.masters is not None, "a transform is installed before it is used"
        return self.masters

    def move_state(
        self, optimizer: torch.optim.Optimizer, tensor: Tensor, targets: Sequence[tuple[Tensor, int]]
    ) -> None:
        """Do nothing, because `MasterWeights` moves the state to the masters and converts it to float32."""

    def pull_grads(self, window: Window, averaged: bool) -> None:
        # `GradientCompletion` reports unfrozen parameters on every rank; an error here would be raised on one rank only.
        self._has_failed = False
        try:
            self._made.collect(check_unfrozen=False)
        except RuntimeError as error:
            self._has_failed = True
            window.defer(error)

    def step(self, request: UpdateRequest, update: Update) -> None:
        masters = self._made
        late = []
        for tensor, master in masters.held():
            # With CPU offload, ``tensor`` is a CPU copy. `OffloadTransform.step` sets its gradient, later than
            # `pull_grads`.
            if master.grad is None and tensor.grad is not None:
                master.grad = tensor.grad.float()
                late.append(master)
        copies = LowPrecisionOut(masters.param_of)
        update(replace(request, low_precision_out=copies))
        if not self._has_failed:  # else the step is skipped, and `write_back` could undo writes of other code
            masters.write_back(copies.written)
        if late:
            clear_gradients(late, set_to_none=True)  # the next step of CPU offload sets the copies' gradients again

    def write_back(self) -> None:
        self._made.write_back()

    def reload(self) -> None:
        self._made.reload_from_model()

    def has_copies(self) -> bool:
        return bool(self._made.pairs)

    def find_overwritten(self) -> Tensor | None:
        return self._made.find_overwritten()

    def clear(self, set_to_none: bool) -> None:
        self._made.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self._made.state_dict()

    def check_state(self, state: Mapping[str, Any]) -> None:
        self._made.check_state(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._made.load_state_dict(state)


class StochasticallyRounded(ParamTransform):
    """The transform that steps bfloat16 tensors in float32, and rounds the results stochastically to bfloat16."""

    def __init__(self, context: PlacementContext) -> None:
        self._registry = context.registry
        self._rounding: StochasticRounding | None = None

    def not_captured(self) -> str | None:
        return (
            "stochastic rounding seeds its random bits on the host in each step, and all replays would use the same bits: "
            "give a precision without it, such as 'bf16'"
        )

    def install(self, optimizer: torch.optim.Optimizer, positions: Sequence[ParamPosition]) -> Replacements:
        """Prepare the parameters for rounding. No parameter is replaced, so the result is empty."""
        if self._rounding is None:
            self._rounding = StochasticRounding(optimizer, self._registry)
            self._rounding.kernel = round_by_kernels
        else:
            self._rounding.refresh()
        return {}

    @property
    def _made(self) -> StochasticRounding:
        assert self._rounding is not None, "a transform is installed before it is used"
        return self._rounding

    def step(self, request: UpdateRequest, update: Update) -> None:
        rounding = self._made
        rounding.step(lambda: update(request.on_copies(rounding.copies)))

    def state_dict(self) -> dict[str, Any]:
        return self._made.state_dict()

    def check_state(self, state: Mapping[str, Any]) -> None:
        self._made.check_state(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._made.load_state_dict(state)
