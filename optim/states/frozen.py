"""Parameters that are frozen or thawed after ranks have agreed whose gradients they average."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


class FrozenParameters:
    """Remembers which parameters were frozen when the optimizer was made."""

    def __init__(self) -> None:
        self._params: list[tuple[str | None, Tensor, bool]] = []

    def add(self, named: Iterable[tuple[str | None, Tensor]]) -> None:
        """Note parameters, with their names, as they are now."""
        self._params += [(name, param, param.requires_grad) for name, param in named]

    def since(self) -> set[int]:
        """Ids of those that have been frozen since, and have no gradient.

        Raises:
            RuntimeError: One is no longer frozen: no rank would average its gradient.
        """
        found = set()
        for name, param, trained in self._params:
            if param.requires_grad and not trained:
                raise RuntimeError(
                    f"{name or f'a parameter of shape {tuple(param.shape)}'} was frozen when the optimizer was made, and "
                    "is not now; whose gradients are averaged was agreed then: unfreeze before making "
                    "ParallelOptimizer, or leave it out and add it later with add_param_group"
                )
            if trained and not param.requires_grad and param.grad is None:
                found.add(id(param))
        return found
