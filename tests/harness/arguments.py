"""Convert the short option names of test tables into arguments of `ParallelOptimizer`."""

from __future__ import annotations

from typing import Any, TypeVar

from meshstep.optim import ByValue, Offloaded, ParallelOptimizer, ParamTransform, Sharded, Skip, StatePlacement

AnyTransform = TypeVar("AnyTransform", bound=ParamTransform)


def arguments(**options: Any) -> dict[str, Any]:
    """Return the arguments of `ParallelOptimizer` (or `Booster`) for options that test tables give as single words.

    ``shard_states``, ``shard_gradients``, ``offload``, ``clip_value`` and ``max_skips_in_a_row`` are converted; other
    options pass unchanged.
    """
    states: list[StatePlacement] = []
    axis, gradients = options.pop("shard_states", None), options.pop("shard_gradients", False)
    if axis is not None:
        states.append(Sharded(axis, gradients=gradients))
    fraction = options.pop("offload", None)
    if fraction is not None:
        states.append(Offloaded(fraction))
    if states:
        options["states"] = tuple(states)
    value = options.pop("clip_value", None)
    if value is not None:
        assert options.get("max_norm") is None, "pass clip_value or max_norm, not both"
        options["max_norm"] = ByValue(value)
    most = options.pop("max_skips_in_a_row", None)
    if most is not None:
        options["on_nonfinite"] = Skip(most)
    return options


def link_of(optimizer: ParallelOptimizer, kind: type[AnyTransform]) -> AnyTransform:
    """Return the first transform of this class."""
    return next(transform for transform in optimizer._chain.transforms if isinstance(transform, kind))
