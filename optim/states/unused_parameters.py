"""A warning about parameters of the optimizer that get no gradient on any rank, such as those of a replaced module."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence

from torch import Tensor

from ...parallel.mesh.agreement import gather_objects
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.text import some
from ..norm.agreement import Called, Holders
from ..norm.plan import ReductionPlan
from .overwritten_weights import check_not_overwritten

WINDOWS = 16  # an expert may lack tokens in some


class UnusedParameters:
    """Watches the first `WINDOWS` windows for parameters without a gradient, then warns once on rank 0.

    Args:
        params: The model's, in the order of the plan's entries.
        plan: Of the model's parameters, agreed.
        registry: The groups.
        reduces_in_backward: Gradients may be reduced, moved or cleared before a window ends, so hooks note their arrival.

    Attributes:
        windows: The number of windows that have ended.
    """

    def __init__(
        self, params: Sequence[Tensor], plan: ReductionPlan, registry: ProcessGroupRegistry, reduces_in_backward: bool
    ) -> None:
        self.plan, self.registry, self._params = plan, registry, list(params)
        self._reduces_in_backward, self.windows = reduces_in_backward, 0
        self._without = {index for index, param in enumerate(self._params) if param.requires_grad}
        if reduces_in_backward:
            for index in self._without:
                _note_first_gradient(self, index)

    def note(self, index: int) -> None:
        """Count a parameter as used."""
        self._without.discard(index)

    @property
    def is_last(self) -> bool:
        """Whether the next call of `end_window` gathers what ranks found."""
        return self.windows >= WINDOWS - 1

    def end_window(self, overwritten: str | None = None, has_fingerprints: bool = False) -> bool:
        """Look at the gradients before they are reduced; return False once there is nothing more to watch.

        Args:
            overwritten: In the last window: a parameter of this rank whose weights the step would undo.
            has_fingerprints: The argument of `check_not_overwritten`.
        Raises:
            RuntimeError: On every rank, in the last window, if a rank has such a parameter.
        Collectives: in the last window an object all-gather. Host reads: only there.
        """
        if not self._reduces_in_backward:
            self._without = {index for index in self._without if self._params[index].grad is None}
        self.windows += 1
        if self.windows < WINDOWS:
            return True
        self._warn(overwritten, has_fingerprints)
        self._params.clear()
        return False

    def _warn(self, overwritten: str | None, has_fingerprints: bool) -> None:
        topology, ranks_of = self.plan.topology, dict[Holders, int]()
        keys, names = Called.of(self.plan)[:2] if self._without else ([], [])
        mine = dict[tuple[str, str | int], tuple[str, int]]()
        for index in sorted(self._without):
            holders, position = keys[index]
            if self._params[index].requires_grad:
                if holders not in ranks_of:
                    ranks_of[holders] = sum(map(holders.include, map(topology.coordinate, range(topology.world_size))))
                mine[str(holders), position] = names[index], ranks_of[holders]
        found = gather_objects((mine, overwritten), self.registry)
        check_not_overwritten([name for _, name in found], has_fingerprints)
        by_rank = [of_rank for of_rank, _ in found]
        counted: dict[tuple[str, str | int], list[str]] = {}
        holding = {key: ranks for of_rank in by_rank for key, (_, ranks) in of_rank.items()}
        for of_rank in by_rank:
            for key, (name, _) in of_rank.items():
                counted.setdefault(key, []).append(name)
        unused = [names[0] for key, names in counted.items() if len(names) == holding[key]]
        if unused and self.registry.global_rank == 0:
            warnings.warn(
                f"in the first {WINDOWS} steps no rank had a gradient for {some(unused)}: the optimizer does not train "
                "them. A module or parameter that was replaced after the optimizer was made, as by model.head = ..., is "
                "not in it: replace it before, or add the new one with add_param_group. Call requires_grad_(False) on "
                "parameters that the loss does not use, before the optimizer is made",
                stacklevel=2,
            )


def _note_first_gradient(unused: UnusedParameters, index: int) -> None:
    """Call `UnusedParameters.note` once. It is held weakly, as the parameter would keep the optimizer alive."""
    reference = weakref.ref(unused)
    remove: list[Callable[[], None]] = []

    def hook(_: Tensor) -> None:
        if (alive := reference()) is not None:
            alive.note(index)
        remove[0]()

    remove.append(unused._params[index].register_post_accumulate_grad_hook(hook).remove)
