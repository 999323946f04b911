"""What the optimizer steps by the precision mode: its own dtype, masters, whole or split, or bfloat16 rounded at random."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...amp.master_weights import MasterWeights
from ...amp.stochastic_rounding import StochasticRounding
from ...parallel.mesh.plain_values import check_text, list_of
from ..gradients.in_place import clear_gradients
from ..step.half_copies import HalfCopies, offered_copies
from .link import AnyWindow, Binding, Link
from .pieces import Held, StandIns
from .split_masters import SplitMasters


def precision_link(binding: Binding) -> Link:
    """The link that the precision mode needs."""
    if binding.precision.split_masters:
        return SplitMasters(binding)
    if binding.precision.masters:
        return Masters(binding.main_grads, cast=binding.precision.main_grads)
    if binding.precision.stochastic_rounding:
        return Rounded(binding)
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

    def install(self, optimizer: torch.optim.Optimizer, held: Sequence[Held], tensors: Sequence[Tensor]) -> StandIns:
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

    def bring(self, window: AnyWindow, averaged: bool) -> None:
        self._made.collect()

    def step(self, update: Callable[[], object]) -> None:
        masters = self._made
        late = []
        for tensor, master in masters.held():
            if master.grad is None and tensor.grad is not None:  # it came only now, to a copy on the CPU
                master.grad = tensor.grad.float()
                late.append(master)
        copies = HalfCopies(masters.param_of)
        before = offered_copies.set(copies)
        try:
            update()
        finally:
            offered_copies.reset(before)
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


class Rounded(Link):
    """bfloat16 tensors, stepped in float32 and rounded stochastically; see `StochasticRounding`."""

    def __init__(self, binding: Binding) -> None:
        self._registry = binding.registry
        self._rounding: StochasticRounding | None = None

    def not_captured(self) -> str | None:
        return "stochastic rounding draws by the number of the step, and replays would round by the same bits"

    def install(self, optimizer: torch.optim.Optimizer, held: Sequence[Held], tensors: Sequence[Tensor]) -> StandIns:
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

    def step(self, update: Callable[[], object]) -> None:
        self._made.step(update)

    def state_dict(self) -> dict[str, Any]:
        return self._made.state_dict()

    def check_state(self, state: Mapping[str, Any]) -> None:
        self._made.check_state(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._made.load_state_dict(state)
