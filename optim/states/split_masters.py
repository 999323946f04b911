"""Float32 masters kept as the bfloat16 weights and 16 bits more; see `meshstep.amp.split_masters`.

No tensor stands for a weight: the param groups hold it, its gradient is the main grad, and its state that of the master, in
float32. Whoever steps joins the masters where it steps them (`meshstep.optim.step.split_weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...amp.master_weights import check_saved, use_main_grad_
from ...amp.optimizer_state import load_states_exactly
from ...amp.split_masters import join, split
from ..step.split_weights import SplitWeights, offered
from .elementwise import check_in_buckets
from .link import Binding, Link
from .pieces import Held, StandIns


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

    Attributes:
        remainders: int16, of each of them; 0 where none was loaded: the master is the weight.
    """

    divisible = True

    def __init__(self, binding: Binding) -> None:
        self.optimizer = binding.optimizer
        self.remainders: dict[Tensor, Tensor] = {}
        load_states_exactly(self.optimizer, self.remainders)

    @torch.no_grad()
    def install(self, optimizer: torch.optim.Optimizer, held: Sequence[Held], tensors: Sequence[Tensor]) -> StandIns:
        for tensor in tensors:
            if tensor.dtype == torch.bfloat16 and tensor.requires_grad and tensor not in self.remainders:
                self.remainders[tensor] = torch.zeros_like(tensor, dtype=torch.int16)
                use_main_grad_(tensor)
        return {}

    def step(self, update: Callable[[], object]) -> None:
        before = offered.set(SplitWeights(self.remainders))
        try:
            update()
        finally:
            offered.reset(before)

    def kept(self, tensor: Tensor) -> Mapping[str, Tensor]:
        remainder = self.remainders.get(tensor)
        return {} if remainder is None else {"remainder": remainder}

    @torch.no_grad()
    def master_of(self, tensor: Tensor) -> Tensor | None:
        remainder = self.remainders.get(tensor)
        return None if remainder is None else join(tensor.detach(), remainder)

    def step_as_masters(self, step: Callable[[], object]) -> None:
        """Call the optimizer's own ``step``, which knows nothing of split weights, with masters in their place."""
        SplitWeights(self.remainders).step(self.optimizer, step)

    # Saving ----------------------------------------------------------------------------------------------------------

    def _by_position(self) -> Iterator[tuple[int, Tensor]]:
        params = (param for group in self.optimizer.param_groups for param in group["params"])
        return ((position, param) for position, param in enumerate(params) if param in self.remainders)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """``{"masters": {position: float32 tensor}}``, as with whole masters; 4 bytes an element while somebody has it."""
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
