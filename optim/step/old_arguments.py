"""What arguments of version 0.1 are called now."""

from __future__ import annotations

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


def refuse_arguments(given: dict[str, object]) -> None:
    """Raise TypeError for arguments that there are not, with what to write."""
    for name in given:
        refuse_renamed(name)
        raise TypeError(f"ParallelOptimizer has no argument {name}=")


def refuse_renamed(name: str) -> None:
    """Raise TypeError for an argument that has another name now."""
    if name in _NOW:
        raise TypeError(f"{name}= was an argument in version 0.1; write {_NOW[name]}, all from meshstep.optim")
