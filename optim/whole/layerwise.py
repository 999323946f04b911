"""Optimizers that scale the step of each tensor by norms of the full tensor: LAMB, LARS and StableAdamW.

The formulas of LARS and StableAdamW are in comments above their classes. LAMB (You et al., arXiv:1904.00962):

    m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
    r <- (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + wd w
    w <- w - lr (|w| / |r|) r                                |w|, |r|: L2 norms of the full tensors
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from ..norm.powers import powers_by_torch
from .batching import LazyTensors, PackedTensors, by_position, chunks, grouped
from .optimizer import Slot, Update, WholeOptimizer, fused_adamw, late_steps, moments, next_moments


class LAMB(WholeOptimizer):
    """LAMB, with the main options of NVIDIA's and timm's implementations.

        optimizer = ParallelOptimizer(LAMB(model.parameters()), registry, max_norm=1.0)

    It does not clip gradients; `ParallelOptimizer` can. The learning rate of a tensor is multiplied by its trust ratio,
    |weights| / |update|. The trust ratio is 1 if one of these norms is 0. It is also 1 in param groups without weight
    decay (biases, weights of norm layers), unless ``always_adapt`` is True.

    Args:
        params: Parameters or param groups.
        lr: A number or a 0-dim tensor. Default 1e-3.
        betas, eps: As in Adam. Defaults (0.9, 0.999) and 1e-6.
        weight_decay: The weights times this number are added to the update, before the norm of the update is taken.
            Default 0.01.
        bias_correction: True (default): divide the moments m and v by 1 - b1^t and 1 - b2^t.
        always_adapt: True: use the trust ratio in param groups without weight decay too. Default: False.

    Raises:
        ValueError: An option is out of range.

    Collectives: per step, one all-reduce over the world if any tensor is sharded.
    Host synchronization: none if parameters and process groups are on one device.
    Memory: on a GPU, in a step, the update directions of sharded tensors, and about 128 MB or one tensor of the size of the
        largest parameter. There, gradients that are clipped or scaled are changed in place, as by torch's fused
        optimizers.
    """

    divides_gradients = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        always_adapt: bool = False,
    ) -> None:
        if not lr >= 0 or not eps >= 0 or not weight_decay >= 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"lr={lr}, eps={eps}, weight_decay={weight_decay}, betas={betas}: lr, eps and weight_decay must be >= 0, "
                "and betas in [0, 1)"
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "always_adapt": always_adapt,
        }
        super().__init__(params, defaults)

    def initial(self, slot: Slot) -> dict[str, Any]:
        return moments(slot)

    def updates(self, slots: Sequence[Slot]) -> Iterator[Update]:
        if slots and all(slot.is_batched for slot in slots):
            yield from self._updates_together(slots)
            return
        adapted = [slot for slot in slots if _is_adapted(slot)]
        params = {slot.position: slot.param for slot in adapted}
        w_norms, r_norms = self.tensors.norms_of(params, LazyTensors(adapted, lambda slot: _direction(slot)[2]))
        for slot in slots:
            m, v, r = _direction(slot)
            rate = slot.group["lr"]
            if slot.position in params:
                w_norm, r_norm = w_norms[slot.position], r_norms[slot.position]
                rate = rate * _trust(w_norm, r_norm)
            yield Update(slot, slot.param - rate * r, {"exp_avg": m, "exp_avg_sq": v})

    def _updates_together(self, slots: Sequence[Slot]) -> Iterator[Update]:
        """Make the step of `updates` in place, with few kernels.

        Yield an `Update` without new states for each slot without bias correction, so that `step` counts its step. For
        the other slots, torch's kernel has increased the step counts already.
        """
        sharded = [slot for slot in slots if self.tensors.is_split(slot.position)]
        local = [slot for slot in slots if not self.tensors.is_split(slot.position)]
        for chunk in _chunks(local):
            directions = self._directions(chunk)
            if _is_adapted(chunk[0]):
                directions.multiply(_trust(_norms([slot.param for slot in chunk]), _norms(directions.tensors)))
            self.descend_each([slot.param for slot in chunk], directions.tensors, chunk[0].group["lr"])
        kept = [(chunk, self._directions(chunk)) for chunk in _chunks(sharded)]
        params, found = dict[int, Tensor](), dict[int, Tensor]()
        for chunk, directions in kept:
            if _is_adapted(chunk[0]):
                params |= {slot.position: slot.param for slot in chunk}
                found |= by_position(chunk, directions.tensors)
        w_norms, r_norms = self.tensors.norms_of(params, found)
        for chunk, directions in kept:
            if _is_adapted(chunk[0]):
                w, r = (torch.stack([norms[slot.position] for slot in chunk]) for norms in (w_norms, r_norms))
                directions.multiply(_trust(w, r))
            self.descend_each([slot.param for slot in chunk], directions.tensors, chunk[0].group["lr"])
        yield from (Update(slot, slot.param, {}) for slot in slots if not slot.group["bias_correction"])

    def _directions(self, chunk: Sequence[Slot]) -> PackedTensors:
        """Update the moments in place, and return the update direction of each slot."""
        group, counts = chunk[0].group, [slot.state["step"] for slot in chunk]
        if not group["bias_correction"]:
            counts = late_steps(chunk)
        # AdamW with the learning rate -1, on zeros, writes m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps).
        directions = PackedTensors.like(chunk)
        directions.flat.zero_()
        fused_adamw(chunk, directions.tensors, counts, self.found_inf, -1.0, 0.0, group["betas"], group["eps"])
        if decay := group["weight_decay"]:
            torch._foreach_add_(directions.tensors, [slot.param for slot in chunk], alpha=decay)
        return directions


def _trust(w: Tensor, r: Tensor) -> Tensor:
    return torch.where((w > 0) & (r > 0), w / r, 1.0)


def _is_adapted(slot: Slot) -> bool:
    """Return True if the learning rate of a tensor is multiplied by a trust ratio."""
    return slot.group["weight_decay"] != 0 or bool(slot.group["always_adapt"])


def _direction(slot: Slot) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's shards of the new first moment, the new second moment, and the update direction of LAMB."""
    group, t, (m, v) = slot.group, slot.step, next_moments(slot)
    beta1, beta2 = group["betas"]
    m_hat, v_hat = (m / (1 - beta1**t), v / (1 - beta2**t)) if group["bias_correction"] else (m, v)
    return m, v, m_hat / (v_hat.sqrt() + group["eps"]) + group["weight_decay"] * slot.param


# LARS: SGD with a learning rate per tensor, from the norms of tensor and gradient (You et al., arXiv:1708.03888) ------

# u <- eta |w| / (|g| + wd |w| + eps) * (g + wd w)         |w|, |g|: L2 norms of the full tensors
# b <- mu b + u
# w <- w - lr b                                            (nesterov: u + mu b)


class LARS(WholeOptimizer):
    """LARS, with the main options of timm's implementation, but without dampening and clipping of the trust ratio.

        optimizer = ParallelOptimizer(LARS(model.parameters(), lr=1.0, momentum=0.9), registry, max_norm=1.0)

    A param group without weight decay (biases, weights of norm layers) uses plain SGD unless ``always_adapt`` is True.
    A tensor whose norm or gradient norm is 0 uses plain SGD too.

    Args:
        params: Parameters or param groups.
        lr: A number or a 0-dim tensor, applied after the momentum as in `torch.optim.SGD`. Default 1.0.
        momentum, weight_decay, nesterov: As in `torch.optim.SGD`. Defaults 0, 0 and False.
        trust_coeff: The gradient plus ``weight_decay`` times the weights is multiplied by the trust ratio
            trust_coeff |weights| / (|gradient| + weight_decay |weights| + eps). Default 0.001.
        eps: Added to this denominator. Default 1e-8.
        always_adapt: True: use the trust ratio in param groups without weight decay too. Default: False.

    Raises:
        ValueError: An option is out of range, or ``nesterov`` is True without momentum.

    Collectives: per step, one all-reduce over the world if any tensor is sharded.
    Host synchronization: none if parameters and process groups are on one device.
    Memory: on a GPU with momentum, in a step, about 128 MB or one more tensor of the size of the largest parameter.
    """

    divides_gradients = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        trust_coeff: float = 0.001,
        eps: float = 1e-8,
        *,
        always_adapt: bool = False,
    ) -> None:
        if not lr >= 0 or not momentum >= 0 or not weight_decay >= 0 or not trust_coeff > 0 or not eps >= 0:
            raise ValueError(
                f"lr={lr}, momentum={momentum}, weight_decay={weight_decay}, eps={eps}, trust_coeff={trust_coeff}: "
                "trust_coeff must be > 0, and lr, momentum, weight_decay and eps >= 0"
            )
        if nesterov and momentum == 0:
            raise ValueError(f"nesterov=True with momentum={momentum}: give momentum > 0, or nesterov=False")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "trust_coeff": trust_coeff,
            "eps": eps,
            "always_adapt": always_adapt,
        }
        super().__init__(params, defaults)

    def initial(self, slot: Slot) -> dict[str, Any]:
        return {"momentum_buffer": torch.zeros_like(slot.param, memory_format=torch.contiguous_format)}

    def updates(self, slots: Sequence[Slot]) -> Iterator[Update]:
        if slots and all(slot.is_batched and slot.group["momentum"] for slot in slots):
            yield from self._updates_together(slots)
            return
        adapted = [slot for slot in slots if _is_adapted(slot)]
        params = {slot.position: slot.param for slot in adapted}
        w_norms, g_norms = self.tensors.norms_of(params, {slot.position: slot.grad for slot in adapted})
        for slot in slots:
            group, u = slot.group, slot.grad
            mu, decay = group["momentum"], group["weight_decay"]
            if slot.position in params:
                w_norm, g_norm = w_norms[slot.position], g_norms[slot.position]
                trust = group["trust_coeff"] * w_norm / (g_norm + decay * w_norm + group["eps"])
                u = torch.where((w_norm > 0) & (g_norm > 0), trust, 1.0) * (u + decay * slot.param)
            b = mu * slot.state["momentum_buffer"] + u
            param = slot.param - group["lr"] * (u + mu * b if group["nesterov"] else b)
            yield Update(slot, param, {"momentum_buffer": b})

    def _updates_together(self, slots: Sequence[Slot]) -> Iterator[Update]:
        """Make the step of `updates` in place, with few kernels. Yield an `Update` without new states for each slot."""
        adapted = [slot for slot in slots if _is_adapted(slot)]
        params = {slot.position: slot.param for slot in adapted}
        # The norm is divided by the scale later, instead of the gradient, so that no unscaled gradient must be stored.
        w_norms, g_norms = self.tensors.norms_of(
            params, {slot.position: slot.scaled_grad.contiguous() for slot in adapted}
        )
        for chunk in _chunks(slots):
            group, weights = chunk[0].group, [slot.param for slot in chunk]
            along, scale = _gradients(chunk), chunk[0].grad_scale
            if _is_adapted(chunk[0]):
                w, g = (torch.stack([norms[slot.position] for slot in chunk]) for norms in (w_norms, g_norms))
                g = g if scale is None else g / scale.to(g.device)
                trust = group["trust_coeff"] * w / (g + group["weight_decay"] * w + group["eps"])
                torch._foreach_add_(along.tensors, weights, alpha=group["weight_decay"])
                along.multiply(torch.where((w > 0) & (g > 0), trust, 1.0))
            sgd(
                weights,
                along.tensors,
                [slot.state["momentum_buffer"] for slot in chunk],
                fused=True,
                found_inf=self.found_inf,
                lr=group["lr"],
                weight_decay=0.0,
                momentum=group["momentum"],
                dampening=0.0,
                nesterov=group["nesterov"],
                maximize=False,
            )
        for slot in slots:
            yield Update(slot, slot.param, {})


# StableAdamW: AdamW with smaller steps for a tensor whose gradient is large compared with its second moment -----------

#     m <- b1' m + (1 - b1') g        v <- b2' v + (1 - b2') g^2        b' = b (1 - b^(t-1)) / (1 - b^t)
#     k <- max(1, RMS(g / sqrt(max(v, eps^2))))                         RMS over the full tensor
#     w <- w - lr / k (wd w + m / (sqrt(v) + eps))
#
# Wortsman et al., "Stable and low-precision training for large-scale vision-language models" (arXiv:2304.13013).


class StableAdamW(WholeOptimizer):
    """AdamW with Adafactor's update clipping, with the main options of the packages optimi and pytorch_optimizer.

        optimizer = ParallelOptimizer(StableAdamW(model.parameters()), registry, max_norm=1.0)

    The learning rate of a tensor is divided by the RMS, over the full tensor, of gradient / sqrt(second moment) if this
    RMS is above 1.

    Args:
        params: Parameters or param groups.
        lr: A number or a 0-dim tensor. Default 1e-3.
        betas, eps, weight_decay: As in AdamW. Defaults (0.9, 0.99), 1e-8 and 0.01.

    Raises:
        ValueError: An option is out of range.

    Collectives: per step, one all-reduce over the world if any tensor is sharded.
    Host synchronization: none if parameters and process groups are on one device.
    Memory: on a GPU, in a step, about 400 MB, or three tensors of the size of the largest parameter if that is more.
    """

    divides_gradients = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        if not lr >= 0 or not eps > 0 or not weight_decay >= 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"lr={lr}, eps={eps}, weight_decay={weight_decay}, betas={betas}: lr and weight_decay must be >= 0, eps "
                "> 0, and betas in [0, 1)"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def initial(self, slot: Slot) -> dict[str, Any]:
        return moments(slot)

    def updates(self, slots: Sequence[Slot]) -> Iterator[Update]:
        if slots and all(slot.is_batched for slot in slots):
            yield from self._updates_together(slots)
            return
        (norms,) = self.tensors.norms_of(LazyTensors(slots, _normalized))
        for slot in slots:
            group, v = slot.group, _second_moment(slot)
            m = slot.state["exp_avg"].lerp(slot.grad, _rate(slot, 0).to(slot.grad.dtype))
            k = (norms[slot.position] / sqrt(max(prod(self._shape(slot)), 1))).clamp(min=1)
            descent = group["weight_decay"] * slot.param + m / (v.sqrt() + group["eps"])
            yield Update(slot, slot.param - group["lr"] / k * descent, {"exp_avg": m, "exp_avg_sq": v})

    def _updates_together(self, slots: Sequence[Slot]) -> Iterator[Update]:
        """Make the step of `updates` in place, with few kernels. Yield an `Update` without new states for each slot."""
        found: dict[int, Tensor] = {}
        for chunk in _chunks(slots):
            grads, change = _gradients(chunk), PackedTensors.like(chunk)
            for which, (key, power) in enumerate((("exp_avg", 1), ("exp_avg_sq", 2))):
                old = [slot.state[key] for slot in chunk]
                torch.pow(grads.flat, power, out=change.flat)
                torch._foreach_sub_(change.tensors, old)
                change.multiply(_rates(chunk, which))
                self.descend_each(old, change.tensors, -1.0)
            least = chunk[0].group["eps"] ** 2
            made = list(torch._foreach_clamp_min([slot.state["exp_avg_sq"] for slot in chunk], least))
            torch._foreach_rsqrt_(made)
            torch._foreach_mul_(made, grads.tensors)
            found |= self.tensors.local_powers(by_position(chunk, made))
        (norms,) = self.tensors.norms_of_powers(found)
        for chunk in _chunks(slots):
            params, group = [slot.param for slot in chunk], chunk[0].group
            along = PackedTensors.like(chunk).fill([slot.state["exp_avg"] for slot in chunk])
            roots = list(torch._foreach_sqrt([slot.state["exp_avg_sq"] for slot in chunk]))
            torch._foreach_add_(roots, group["eps"])
            torch._foreach_div_(along.tensors, roots)
            torch._foreach_add_(along.tensors, params, alpha=group["weight_decay"])
            sizes = [sqrt(max(prod(self._shape(slot)), 1)) for slot in chunk]
            means = torch._foreach_div([norms[slot.position] for slot in chunk], sizes)
            along.multiply(torch.stack(means).clamp(min=1).reciprocal())
            self.descend_each(params, along.tensors, group["lr"])
        for slot in slots:
            yield Update(slot, slot.param, {})

    def _shape(self, slot: Slot) -> tuple[int, ...]:
        return self.tensors.tensors[slot.position].shape


def _chunks(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Divide stepped tensors into lists that are computed together, each of one param group, device and dtype."""
    kinds = grouped(slots, lambda slot: (id(slot.group), slot.param.device, slot.param.dtype)).values()
    return (chunk for kind in kinds for chunk in chunks(kind, lambda slot: slot.param.numel()))


def _gradients(chunk: Sequence[Slot]) -> PackedTensors:
    """Return the unscaled gradients of the slots."""
    grads, scale = PackedTensors.like(chunk), chunk[0].grad_scale
    if any(slot.scaled_grad.dtype != slot.param.dtype for slot in chunk):
        return grads.fill([slot.grad for slot in chunk])
    grads.fill([slot.scaled_grad for slot in chunk])
    if scale is not None:
        grads.flat.div_(scale.to(grads.flat.device))
    return grads


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    return powers_by_torch(tensors, 2.0).sqrt_()


def _rates(slots: Sequence[Slot], which: int) -> Tensor:
    """Return `_rate` of each slot, [slots]. All slots must be of one param group."""
    beta: float = slots[0].group["betas"][which]
    steps = torch.stack([slot.state["step"] for slot in slots]).double() + 1
    rates: Tensor = (1 - beta) / (1 - beta**steps)
    return rates


def _rate(slot: Slot, which: int) -> Tensor:
    """Return (1 - b) / (1 - b^t), 0-dim: the weight of the new gradient in a moment. b is ``betas[which]``."""
    beta: float = slot.group["betas"][which]
    return (1 - beta) / (1 - beta**slot.step)


def _second_moment(slot: Slot) -> Tensor:
    v: Tensor = slot.state["exp_avg_sq"]
    return v.lerp(slot.grad.square(), _rate(slot, 1).to(slot.grad.dtype))


def _normalized(slot: Slot) -> Tensor:
    return slot.grad / _second_moment(slot).clamp(min=slot.group["eps"] ** 2).sqrt()
