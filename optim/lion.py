"""The Lion optimizer (Chen et al. 2023, arXiv:2302.06675) with torch's foreach kernels.

It reads the skip flag (``found_inf``) and the gradient scale (``grad_scale``) on the device, without host
synchronization.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .kernels.native import Kind
from .step.c_engine import SUPPORTED_OPTIMIZERS, FusedOptimizerSpec


class Lion(torch.optim.Optimizer):
    """Lion optimizer: subtracts ``lr`` times the sign of a weighted average of momentum and gradient from every weight.

    ```text
    w: weight, g: gradient, m: momentum (state ``"exp_avg"``), b1 and b2: betas
    w <- w (1 - lr weight_decay) - lr sign(b1 m + (1 - b1) g)
    m <- b2 m + (1 - b2) g
    ```

        optimizer = ParallelOptimizer(Lion(model.parameters(), lr=1e-4), registry, max_norm=1.0)

    Like torch's fused optimizers, it reads its attributes ``grad_scale`` and ``found_inf`` (0-dim tensors, or None) on
    the device. It divides gradients by ``grad_scale``. If ``found_inf`` is positive, weights and momenta stay
    unchanged, even if gradients are non-finite. Weights may be sharded, because the update is elementwise. Gradient
    clipping does not reduce the size of an update, which is a sign times ``lr``. It only reduces the share of a large
    gradient in the weighted average and in the momentum.

    Sparse gradients, complex gradients and ``maximize`` are not supported. A step updates together the parameters of a
    param group that have the same device, dtype and gradient dtype, in about ten foreach calls. With ``found_inf`` it
    makes one more call per parameter, and for half-precision parameters up to three casts each. Its temporary memory is
    three float32 tensors per parameter of a param group (float64 for float64 parameters), or five for half-precision
    parameters. Weights and momenta in bfloat16 and float16 are computed in float32 and rounded to nearest, so small
    updates are lost; use float32 master weights. In a `ParallelOptimizer`, compiled loops step float32 weights on a CPU in
    one pass, with the same bits, unless ``lr`` is a tensor. meshstep has no Triton kernels for Lion.

    Args:
        params: Parameters or param groups, as for torch's optimizers.
        lr: Learning rate: a number or a 0-dim tensor, >= 0. Default: 1e-4.
        betas: (b1, b2), each >= 0 and < 1. Default: (0.9, 0.99).
        weight_decay: Decoupled weight decay, >= 0. Default: 0, no weight decay.

    Raises:
        ValueError: ``lr``, ``betas`` or ``weight_decay`` is out of range, or ``params`` is empty.
        TypeError: ``params`` is a tensor, or has items that torch's optimizers reject.

    Collectives: none.
    Host synchronization: one in the constructor if ``lr`` is a tensor on a GPU.
    """

    elementwise = True
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if not lr >= 0 or not weight_decay >= 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"lr={lr}, weight_decay={weight_decay}, betas={betas}: lr and weight_decay must be >= 0, and both betas in "
                "[0, 1)"
            )
        # Because of the option "fused", `ParallelOptimizer` sets the attributes ``found_inf`` and ``grad_scale`` before
        # a step.
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "fused": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient.

        Args:
            closure: Function that computes gradients. It is called once before the update, with autograd enabled. None
                (default): the current gradients are used.

        Returns:
            The result of ``closure``; None without a closure.

        Collectives: none.
        Host synchronization: none, if the tensors ``lr``, ``found_inf`` and ``grad_scale`` are on the parameters'
        device.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        skip, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        for group in self.param_groups:
            kinds: dict[tuple[torch.device, torch.dtype, torch.dtype], list[Tensor]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    kinds.setdefault((param.device, param.dtype, param.grad.dtype), []).append(param)
            for params in kinds.values():
                self._step(group, params, skip, scale)
        return loss

    def _step(self, group: Mapping[str, Any], params: list[Tensor], skip: Tensor | None, scale: Tensor | None) -> None:
        """Update parameters that have the same device, dtype and gradient dtype.

        A positive ``skip`` leaves weights and momenta unchanged. The gradients are divided by ``scale``. Both are
        0-dim.
        """
        (b1, b2), lr, device = group["betas"], group["lr"], params[0].device
        for param in params:
            if not self.state[param]:
                self.state[param]["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        states: list[Tensor] = [self.state[param]["exp_avg"] for param in params]
        work = torch.float64 if params[0].dtype == torch.float64 else torch.float32
        lr = lr.to(device, work) if isinstance(lr, Tensor) else lr
        skips = None if skip is None else skip.to(device) > 0

        def number(value: float | Tensor, if_skipped: float) -> Tensor:
            # torch.full does not synchronize with the host; a copy of a CPU tensor to the GPU would
            made = (
                value.to(device, work)
                if isinstance(value, Tensor)
                else torch.full((), value, dtype=work, device=device)
            )
            return made if skips is None else made.masked_fill(skips, if_skipped)

        grads: list[Tensor] = [param.grad.to(work) for param in params if param.grad is not None]
        one = torch.ones((), dtype=work, device=device) if scale is None else scale.to(device, work)
        grads = list(torch._foreach_div(grads, one))
        if skips is not None:
            for grad in grads:
                grad.masked_fill_(skips, -0.0)  # x + -0.0 is bitwise x; 0 times NaN would be NaN
        weights, momenta = _in(work, params), _in(work, states)
        # Products and sums are separate calls. A kernel that computes both may use fused multiply-add for some elements
        # and not for the last elements of a shard. Then the rounding of an element would depend on the sharding.
        updates = torch._foreach_mul(momenta, number(b1, 0.0))
        torch._foreach_add_(updates, torch._foreach_mul(grads, 1 - b1))
        torch._foreach_sign_(updates)  # in a skipped step +0; the product with -0 is -0, and w + -0 is bitwise w
        torch._foreach_mul_(updates, number(-lr, -0.0))
        if group["weight_decay"]:
            torch._foreach_mul_(weights, number(1 - lr * group["weight_decay"], 1.0))
        torch._foreach_add_(weights, updates)
        torch._foreach_mul_(momenta, number(b2, 1.0))
        torch._foreach_mul_(grads, 1 - b2)
        torch._foreach_add_(momenta, grads)
        if weights[0].dtype != params[0].dtype:
            torch._foreach_copy_([param.detach() for param in params], weights)
        if momenta[0].dtype != states[0].dtype:
            torch._foreach_copy_(states, momenta)


def _in(dtype: torch.dtype, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().to(dtype) for tensor in tensors]


# `Lion` computes 1 - lr weight_decay in float64, but in float32 if lr is a tensor; the loops always in float64.
SUPPORTED_OPTIMIZERS[Lion] = FusedOptimizerSpec(
    Kind.LION, ("lr", "betas", "weight_decay"), ("exp_avg",), counted=False, in_triton=False, tensors=False
)
