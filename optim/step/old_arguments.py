"""What arguments of version 0.1 are called now."""

from __future__ import annotations

from collections.abc import Iterable

_NOW = {
    "norm_type": "measure=Measure(norm_type=...)",
    "reduction": "measure=Measure(reduction=...)",
    "per_parameter_norms": "measure=Measure(per_parameter=True)",
    "check_replicas": "measure=Measure(check_replicas=True)",
    "clip_value": "max_norm=ByValue(...)",
    "average_data": "data_parallel=Reduce(average_data=False)",
    "shard_states": "states=Sharded('data')",
    "shard_gradients": "states=Sharded('data', gradients=True)",
    "offload": "states=Offloaded(0.5)",
    "max_skips_in_a_row": "on_nonfinite=Skip(most_in_a_row=...)",
}


def wrong_arguments(given: Iterable[str]) -> TypeError | None:
    """The error for arguments that there are not, with what to write; None where none is given."""
    for name in given:
        return renamed(name) or TypeError(f"ParallelOptimizer has no argument {name}=")
    return None


def renamed(name: str) -> TypeError | None:
    """The error for an argument that has another name now."""
    if name not in _NOW:
        return None
    return TypeError(f"{name}= was an argument in version 0.1; write {_NOW[name]}, all from meshstep.optim")
