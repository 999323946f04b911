"""`stop_gradient`: detach a tensor, so that both backward and `prove` count it as a constant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


def stop_gradient(tensor: Tensor) -> Tensor:
    """Return ``tensor.detach()``; use this function for a tensor that backward ignores on purpose.

    `prove` compares gradients with changes of the loss, and would report that the loss depends on a detached tensor. While
    `prove` runs, every forward therefore gets the values that this function returned in the first forward.

        scale = stop_gradient(torch.ones(4).norm())     # backward treats the norm as a constant

    Each forward of the model must make the same number of calls of this function, in the same order.

    Args:
        tensor: Any tensor.
    Returns:
        The detached tensor, which shares memory with ``tensor``. While `prove` runs, later forwards get the tensor that was
        recorded in the first forward instead, cast to the dtype of ``tensor``.
    Raises:
        ValueError: Only while `prove` runs: a forward calls this function more often than the first forward, or with a
            tensor of another shape.
    Collectives: none.
    Host synchronization: none.
    """
    return tensor.detach() if _RECORD is None else _RECORD.next(tensor.detach())


class ConstantRecord:
    """The results of `stop_gradient` in the first forward of a proof, which later forwards get instead of their own."""

    def __init__(self) -> None:
        self._values: list[Tensor] = []
        self._is_complete = False
        self._position = 0

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context manager for one forward and its backward. The first forward records the results of `stop_gradient`."""
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
                "prove runs the forward several times, and a later forward called stop_gradient more often than the first "
                f"(calls in the first forward: {len(self._values)}); make the same number of calls in every forward"
            )
        value, self._position = self._values[self._position], self._position + 1
        if value.shape != tensor.shape:
            raise ValueError(
                f"stop_gradient got a tensor of shape {tuple(tensor.shape)}, but the same call in the first forward that "
                f"prove ran got shape {tuple(value.shape)}; call stop_gradient in the same order in every forward"
            )
        return value.to(tensor.dtype)


_RECORD: ConstantRecord | None = None
