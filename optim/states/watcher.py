"""Who looks on at a step: at gradients and weights as they come by, which it leaves as they are."""

from __future__ import annotations

from collections.abc import Callable

from .link import AnyWindow


class Watcher:
    """Is told, on every rank and in this order, at the end of a window; it may take part in collectives of its own, and
    changes nothing. Subclasses override what they need; `meshstep.optim.states.chain.Chain.watchers` has them."""

    def not_captured(self) -> str | None:
        """Why a step can't be captured in a CUDA graph with it: its name, and what it does in Python or on the host."""
        return None

    def local(self, window: AnyWindow) -> None:
        """Gradients are where backward has left them: this rank's own, but for what was reduced while backward ran."""

    def complete(self, window: AnyWindow) -> None:
        """They have come to what is stepped, averaged and summed; the loss scale and the window's weight are still in
        them, and nothing has been clipped."""

    def update(self, update: Callable[[], object]) -> None:
        """Call ``update``, which steps what the param groups hold, or skips, and brings it into the model."""
        update()
