"""`torch.amp.GradScaler` for parallel models: an overflow on one rank is an overflow on all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel.mesh.calls import in_call
from ..parallel.mesh.registry import ProcessGroupRegistry


class GradScaler(torch.amp.GradScaler):
    """A drop-in `torch.amp.GradScaler` whose found_inf is agreed over all axes of a registry.

        scaler = GradScaler(registry)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    torch's own decides on each rank alone: after an overflow in one shard the other ranks step, their scales drift
    apart and the model with them. Here all ranks of the world skip, and all scales back off once.

    Every rank must call `scale`, `unscale_`, `step` and `update` for the same optimizers in the same order; `scale` is
    for the ranks that have a loss, the others (pipeline stages before the last) may leave it out. A rank whose
    parameters have no gradients takes part with found_inf = 0, and skips or steps with the others. Several optimizers
    may share one scaler, as in torch: each skips for its own overflow only, and the scale backs off once for all.

    Args:
        registry: Where this rank is, and the process groups.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: As in `torch.amp.GradScaler`.
        device: Device type of the scale, "cuda" or "cpu"; by default that of the registry's collectives.

    Collectives: one all-reduce (MAX, one number, over the world) for each optimizer and step, where its gradients are
    checked: in `unscale_`, or else in `step`. With one rank or ``enabled=False`` none.
    Host reads: none by optimizers that skip on the device (torch's ``fused=True``). For others torch reads found_inf in
    `step`, once. `get_scale` and `state_dict` read the scale. If ``device`` isn't the collectives' device, so does the
    agreement.

    Not picklable while the registry has groups: keep its `state_dict`.
    """

    def __init__(
        self,
        registry: ProcessGroupRegistry,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        device: str | None = None,
    ) -> None:
        super().__init__(
            device or registry.device.type,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self._registry = registry

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As torch's; a `meshstep.optim.ParallelOptimizer` unscales and skips itself, on the device.

        Raises:
            RuntimeError: It steps other tensors than the model's, or has a loss scale of its own.
        """
        optimizer._overflow_is_agreed = True  # type: ignore[attr-defined]
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            del optimizer._overflow_is_agreed  # type: ignore[attr-defined]

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        # torch makes the scale when `scale` is first called, which only a rank with a loss does.
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return super()._check_scale_growth_tracker(funcname)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # Both ways to a found_inf end here: `unscale_`, and the check that `step` makes for a fused optimizer, which
        # skips `unscale_`. (torch's ShardedGradScaler synchronises in the first alone.)
        per_device = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        for local in per_device.values():
            found_inf = torch.maximum(found_inf, local.to(found_inf.device, non_blocking=True))
        return {found_inf.device: self._agreed(found_inf)}

    def _agreed(self, found_inf: Tensor) -> Tensor:
        """The maximum over the world of a 0-dim tensor that is never NaN (which MAX may lose)."""
        if self._registry.topology.world_size == 1:
            return found_inf
        agreed = found_inf.to(self._registry.device)
        with in_call(self._registry, "GradScaler.step"):
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._registry.group(*self._registry.topology.axes))
        return agreed.to(found_inf.device)
