"""`stop_gradient`: a tensor that is a constant in backward, and that `prove` keeps constant too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


def stop_gradient(tensor: Tensor) -> Tensor:
    """Return the tensor detached, as a quantity that counts as constant in backward on purpose.

    It is ``tensor.detach()``. But `prove` compares gradients with changes of the loss, and would see that the loss depends
    on a detached tensor. During a proof this function therefore returns the values of the first forward.

        scale = stop_gradient(torch.ones(4).norm())     # gradients ignore that the norm depends on the weights

    Every forward of the module must call it equally often, in the same order.

    Args:
        tensor: Any tensor.
    Raises:
        ValueError: Only during a proof: a forward calls it more often than the first one, or with another shape.
    Collectives: none. Host synchronization: none.
    """
    return tensor.detach() if _RECORD is None else _RECORD.next(tensor.detach())


class ConstantRecord:
    """The constants of the first forward in a `recorded` block, which later forwards use again."""

    def __init__(self) -> None:
        self._values: list[Tensor] = []
        self._is_complete = False
        self._position = 0

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context manager for one forward (and its backward): the first one records constants, the others repeat them."""
        global _RECORD
        before, _RECORD, self._position = _RECORD, self, 0
        try:
            yield
            self._is_complete = True
        finally:
            _RECORD = before

    def next(self, tensor: Tensor) -> Tensor:
        """Return the recorded value for this call of `stop_gradient`; in the first forward, record ``tensor``."""
        if not self._is_complete:
            self._values.append(tensor.clone())
            return tensor
        if self._position >= len(self._values):
            raise ValueError(
                f"a forward called stop_gradient more often than the first forward, {len(self._values)} times; call it "
                "equally often in every forward"
            )
        value, self._position = self._values[self._position], self._position + 1
        if value.shape != tensor.shape:
            raise ValueError(
                f"stop_gradient got shape {tuple(tensor.shape)}, but the first forward gave {tuple(value.shape)}; call it "
                "in the same order in every forward"
            )
        return value.to(tensor.dtype)


_RECORD: ConstantRecord | None = None
