"""What the optimizer steps by the precision mode: its own dtype, masters, whole or split, or bfloat16 rounded at random."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ...amp.master_weights import MasterWeights, check_saved, label_of, load_states_exactly, use_main_grad_
from ...amp.split_masters import join, split
from ...amp.stochastic_rounding import StochasticRounding
from ...parallel.mesh.value_checks import check_text, list_of
from ..gradients.in_place import clear_gradients
from ..norm.hashing import TensorHash
from ..norm.param_table import ParamPosition
from ..step.split_weights import SplitWeights
from ..step.update_request import LowPrecisionOut, Update, UpdateRequest
from ..step.window import Window
from .chain import Binding, Link, Replacements
from .elementwise import check_in_buckets

# Split master weights -------------------------------------------------------------------------------------------------

# No tensor stands for a weight: the param groups hold it, its gradient is the main grad, and its state that of the
# master, in float32. Whoever steps joins the masters where it steps them (`SplitWeights`).

MANY_WRITES = 3
"""Steps in a row that find written weights, before a warning."""
_version: Callable[[Tensor], int] = attrgetter("_version")


def check_split(binding: Binding, params: Sequence[tuple[str | None, Tensor]]) -> None:
    """Raise ValueError where the mode has split masters and they don't fit the rest.

    Args:
        params: All that the optimizer steps, with names.
    """
    if not binding.precision.split_masters:
        return
    name = "Bf16(split_masters=True)"
    for label, param in params:
        if param.requires_grad and param.dtype == torch.float16:
            raise ValueError(
                f"{name}: {label or f'a parameter of shape {tuple(param.shape)}'} is float16, whose rounding leaves more "
                "than 16 bits of a master: prepare the model with this mode, or take 'fp16_naive', which has whole masters"
            )
    if binding.data_parallel is not None and not binding.main_grads:
        raise ValueError(
            f"{name} needs float32 gradients, which DistributedDataParallel does not make: leave data_parallel out, and "
            "the optimizer averages over the data axes itself, or leave split_masters out"
        )
    check_in_buckets(binding.optimizer, f"{name} steps bucket by bucket")


class SplitMasters(Link):
    """Keeps the remainders of bfloat16 tensors that are trained.

    A weight that was written between two steps drops its remainders: its master is the written value. A write is visible
    where it changes the tensor's version counter, or gives the tensor other memory with other values. The same values in
    other memory, as ``model.to(memory_format=...)`` sets, keep their remainders. For this comparison the previous memory,
    2 bytes per element, stays allocated until the next step. In-place writes through ``.data`` are invisible. Their
    remainders stay, and the master still rounds to the written value (`join`).

    Attributes:
        remainders: int16, of each trained bfloat16 tensor; 0 where none was loaded: the master is the weight.
    """

    divisible = True

    def __init__(self, binding: Binding) -> None:
        self.optimizer = binding.optimizer
        self.remainders: dict[Tensor, Tensor] = {}
        self._weights: list[Tensor] = []  # the keys, and what each was when its remainder was written
        self._index: dict[Tensor, int] = {}
        self._versions: list[int] = []
        self._addresses: list[int] = []
        self._memory: list[Tensor] = []  # aliases, so that replaced memory can be compared and is not allocated again
        self._loaded: list[int] = []  # sums over the bits of the weights, from a load until the next step
        self._writes = 0  # consecutive steps that found written weights
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
        """Take the remainders as those of the weights as they are now."""
        if len(self._weights) != len(self.remainders):
            self._weights = list(self.remainders)
            self._index = {weight: index for index, weight in enumerate(self._weights)}
            self._addresses = []
        self._versions = list(map(_version, self._weights))
        addresses = list(map(Tensor.data_ptr, self._weights))
        if addresses != self._addresses:
            self._addresses, self._memory = addresses, list(map(Tensor.detach, self._weights))

    @torch.no_grad()
    def _drop_written(self) -> list[Tensor]:
        """Set the remainders of written weights to 0. Return the weights that were written or have other memory."""
        weights, versions = self._weights, list(map(_version, self._weights))
        addresses = list(map(Tensor.data_ptr, weights))
        if versions == self._versions and addresses == self._addresses:
            return []
        written, moved = _changed(versions, self._versions), _changed(addresses, self._addresses)
        if self._loaded:  # the model may be loaded after the optimizer: with the same weights
            sums = _bit_sums([weights[index] for index in written])
            written = [index for index, found in zip(written, sums, strict=True) if found != self._loaded[index]]
        if written:
            torch._foreach_zero_([self.remainders[weights[index]] for index in written])
        for index in moved:
            _drop_if_other(self.remainders[weights[index]], weights[index], self._memory[index])
        self._note_weights()
        return [weights[index] for index in sorted({*written, *moved})]

    def bring(self, window: Window, averaged: bool) -> None:
        """Drop the remainders of written weights. Host synchronization: none, except once after a load.

        Raises:
            RuntimeError: The step is captured in a CUDA graph, whose replays would drop them each time.
        """
        dropped = self._drop_written()
        if dropped and window.captured:
            raise RuntimeError(
                f"{label_of(dropped[0])} was written since the last step, and every replay of the graph that is captured "
                "here would drop the remainders of its master: make one step without a graph after writing weights"
            )
        self._writes = self._writes + 1 if dropped else 0
        if self._writes == MANY_WRITES:
            warnings.warn(
                f"{label_of(dropped[0])} was written before each of {MANY_WRITES} steps in a row. With split masters a "
                "write drops what the master has beyond bfloat16, so small updates are lost: mask in the forward, or "
                "multiply gradients by the mask, instead of writing weights in every step",
                stacklevel=2,
            )

    def step(self, request: UpdateRequest, update: Update) -> None:
        try:
            update(replace(request, split_weights=SplitWeights(self.remainders)))
        finally:
            self._versions, self._loaded = list(map(_version, self._weights)), []

    def publish(self) -> None:
        """Keep all remainders: the library itself has written weights and remainders."""
        self._note_weights()
        if self._loaded:
            self._loaded = _bit_sums(self._weights)

    @torch.no_grad()
    def reload(self) -> None:
        if self.remainders:
            torch._foreach_zero_(list(self.remainders.values()))
        self._note_weights()
        self._loaded = []

    def _remainder(self, tensor: Tensor) -> Tensor | None:
        """Return the remainder of ``tensor``, if it has one, as the next step will see it."""
        remainder = self.remainders.get(tensor)
        if remainder is not None:
            index = self._index[tensor]
            if (tensor._version, tensor.data_ptr()) != (self._versions[index], self._addresses[index]):
                self._drop_written()
        return remainder

    def kept(self, tensor: Tensor) -> Mapping[str, Tensor]:
        remainder = self._remainder(tensor)
        return {} if remainder is None else {"remainder": remainder}

    @torch.no_grad()
    def master_of(self, tensor: Tensor) -> Tensor | None:
        remainder = self._remainder(tensor)
        return None if remainder is None else join(tensor.detach(), remainder)

    def step_as_masters(self, step: Callable[[], object]) -> None:
        """Call the optimizer's own ``step``, which knows nothing of split weights, with masters in their place."""
        self._drop_written()
        SplitWeights(self.remainders).step(self.optimizer, step)
        self._note_weights()

    # Saving ----------------------------------------------------------------------------------------------------------

    def _by_position(self) -> Iterator[tuple[int, Tensor]]:
        params = (param for group in self.optimizer.param_groups for param in group["params"])
        return ((position, param) for position, param in enumerate(params) if param in self.remainders)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """``{"masters": {position: float32 tensor}}``, as with whole masters; 4 bytes an element while somebody has it."""
        self._drop_written()
        masters = {position: join(weight.detach(), self.remainders[weight]) for position, weight in self._by_position()}
        return {"masters": masters}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError where `load_state_dict` would."""
        check_saved(state, dict(self._by_position()))

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Split the masters, of this mode or of whole ones, into weights and remainders. Raises: as `check_saved`."""
        weights = dict(self._by_position())
        saved = check_saved(state, weights)
        for position, weight in weights.items():
            master = torch.empty_like(weight, dtype=torch.float32).copy_(saved[position])
            for target, value in zip((weight, self.remainders[weight]), split(master), strict=True):
                target.copy_(value)
        self._note_weights()
        self._loaded = _bit_sums(self._weights)


def _changed(now: Sequence[int], before: Sequence[int]) -> list[int]:
    return [index for index, (one, other) in enumerate(zip(now, before, strict=True)) if one != other]


def _drop_if_other(remainder: Tensor, weight: Tensor, before: Tensor) -> None:
    """Set a weight's remainders to 0 unless its bits are those of ``before``. Host synchronization: none."""
    if (weight.shape, weight.dtype, weight.device) != (before.shape, before.dtype, before.device):
        remainder.zero_()
        return
    same = weight.detach().view(torch.int16) == before.view(torch.int16)
    remainder.mul_(same.all())


def _bit_sums(weights: Sequence[Tensor]) -> list[int]:
    """Return a number for the bits of each tensor. Host synchronization: one."""
    found: list[int] = TensorHash(torch.device("cpu"), exact=True)(weights).tolist() if weights else []
    return found


# Transforms of the precision modes ------------------------------------------------------------------------------------


def precision_link(binding: Binding) -> Link:
    """The link that the precision mode needs."""
    if binding.precision.split_masters:
        return SplitMasters(binding)
    if binding.precision.masters:
        return Masters(binding.main_grads, cast=binding.precision.main_grads)
    if binding.precision.stochastic_rounding:
        return StochasticallyRounded(binding)
    return AsTheyAre(binding.optimizer)


def check_main_grads(binding: Binding, accumulation_steps: int | None) -> None:
    """Raise ValueError where gradients in half precision would be added up."""
    if binding.precision.main_grads or not binding.precision.masters:
        return
    adds = [f"{type(placement).__name__}, which sums pieces over ranks" for placement in binding.placements]
    adds += ["Reduce(overlap=True), which sums over ranks"] if binding.overlap else []
    adds += [f"accumulation_steps={accumulation_steps}"] if accumulation_steps not in (None, 1) else []
    if adds:
        raise ValueError(
            f"{binding.precision!r} leaves gradients in half precision, and they would be rounded by {adds[0]}: "
            "leave main_grads=True"
        )


class AsTheyAre(Link):
    """The optimizer steps tensors of the model's own dtypes."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """``{"dtypes": names of the parameters' dtypes}``: the optimizer's own state says all else."""
        params = (param for group in self.optimizer.param_groups for param in group["params"])
        return {"dtypes": sorted({str(param.dtype) for param in params})}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError where the dtypes in ``state`` are no names."""
        list_of(check_text)(state.get("dtypes", ()), "dtypes")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the state is of parameters of the same dtypes; torch would cast any other without a word.

        Raises:
            ValueError: It is not, or has masters: it was saved in another mode.
        """
        own, saved = self.state_dict(), {key: value for key, value in state.items() if key != "shards"}
        if saved.get("dtypes") != own["dtypes"]:
            given = ", ".join(saved.get("dtypes", ())) or f"what has {', '.join(saved) or 'nothing'}"
            raise ValueError(
                f"the state was saved for parameters of {given}, but the optimizer steps {', '.join(own['dtypes'])}, "
                "without master weights; continue in the precision mode that it was saved in"
            )


class Masters(Link):
    """Float32 masters of half-precision tensors; see `MasterWeights`.

    Args:
        main_grads: Half-precision tensors have float32 gradients, which the masters share.
        cast: Else masters get float32 copies of them.
    """

    divisible = True

    def __init__(self, main_grads: bool, cast: bool = True) -> None:
        self._main_grads, self._cast = main_grads, cast
        self.masters: MasterWeights | None = None

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
        assert self.masters is not None, "a link is installed before it is used"
        return self.masters

    def move_state(
        self, optimizer: torch.optim.Optimizer, tensor: Tensor, targets: Sequence[tuple[Tensor, int]]
    ) -> None:
        """`MasterWeights` has done it, in float32."""

    def bring(self, window: Window, averaged: bool) -> None:
        self._made.collect()

    def step(self, request: UpdateRequest, update: Update) -> None:
        masters = self._made
        late = []
        for tensor, master in masters.held():
            if master.grad is None and tensor.grad is not None:  # it came only now, to a copy on the CPU
                master.grad = tensor.grad.float()
                late.append(master)
        copies = LowPrecisionOut(masters.param_of)
        update(replace(request, low_precision_out=copies))
        masters.publish(copies.written)
        if late:
            clear_gradients(late, set_to_none=True)  # the copy's memory gets another before the next step

    def publish(self) -> None:
        self._made.publish()

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


class StochasticallyRounded(Link):
    """bfloat16 tensors, stepped in float32 and rounded stochastically; see `StochasticRounding`."""

    def __init__(self, binding: Binding) -> None:
        self._registry = binding.registry
        self._rounding: StochasticRounding | None = None

    def not_captured(self) -> str | None:
        return "stochastic rounding draws by the number of the step, and replays would round by the same bits"

    def install(self, optimizer: torch.optim.Optimizer, positions: Sequence[ParamPosition]) -> Replacements:
        """Raises ValueError where on several ranks a parameter has no name."""
        if self._rounding is None:
            self._rounding = StochasticRounding(optimizer, self._registry)
        else:
            self._rounding.refresh()
        return {}

    @property
    def _made(self) -> StochasticRounding:
        assert self._rounding is not None, "a link is installed before it is used"
        return self._rounding

    def step(self, request: UpdateRequest, update: Update) -> None:
        self._made.step(partial(update, request))

    def state_dict(self) -> dict[str, Any]:
        return self._made.state_dict()

    def check_state(self, state: Mapping[str, Any]) -> None:
        self._made.check_state(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._made.load_state_dict(state)
