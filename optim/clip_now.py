"""Explicit clipping, between the last backward of a window and its step: the stages that come before the update, now."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .capture import Parts, check_captured
from .clip.clipper import Divisor, Verdict
from .clip.rule import Clip, ClipState
from .clip.rules import in_use
from .norm.measure import GradStats


class ClippingParts(Parts, Protocol):
    """What is asked of an optimizer."""

    _clip: ClipState | None
    _scale: Tensor | None

    def _divisor(self, scale: Tensor | None) -> Divisor: ...

    @property
    def clip(self) -> Clip | None:
        """Its own rule."""


def clip_or_ask(parts: ClippingParts, call: str, clip: Clip) -> GradStats | None:
    """`clip_now`, by the public call of that name, where the window is full; else None, and the step at its end does it."""
    parts._window.captured = check_captured(parts, call)
    in_use(clip)  # is checked
    if parts._window.is_full:
        return clip_now(parts, clip).stats
    parts._window.asked = clip
    return None


def clip_now(parts: ClippingParts, clip: Clip | None) -> Verdict:
    """Complete, measure, unscale and clip the gradients, in place. Collectives: those of a step. Host reads: none."""
    window = parts._window
    before = window.explicit
    window.explicit = (*before, clip)
    try:
        problem = parts._completion(window, parts._switch)
        divisor = parts._divisor(parts._scale)
        rule = parts._clip if clip is parts.clip else in_use(clip)
        verdict = parts._clipping(rule, divisor, now=True, earlier=window.verdict, captured=window.captured)
    except BaseException:
        window.explicit = before
        raise
    window.clipped(verdict)
    if problem is not None:
        raise problem  # only now: `step` must do on this rank what it does on the others
    return verdict
