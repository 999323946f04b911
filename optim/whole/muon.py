"""Muon: momentum, made orthogonal. The matrices' update; everything else by AdamW, in the same object.

    m <- mu m + (1 - mu) g                                   momentum
    u <- (1 - mu) g + mu m   (nesterov; else m)
    o <- newton_schulz(u)                                    at the matrix's home
    w <- w - lr (wd w + scale(shape) o)

Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); the scale that matches AdamW's:
Liu et al., "Muon is Scalable for LLM Training" (arXiv:2502.16982).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from math import frexp, inf, sqrt
from typing import Any, Literal

import torch
from torch import Tensor

from ...parallel.layout.regions import Box, Shape
from ...parallel.layout.spec import P
from .exchange import Homes, Matrix
from .layout import Blocks, LogicalTensor, matrices_of
from .optimizer import ADAMW, OnDemand, Slot, Update, WholeOptimizer, adamw_update, moments
from .tensors import WholeTensors, narrowed

# The orthogonal matrix nearest to another, by five steps of a polynomial: all singular values go to about 1 -----------

#     X <- a X + (b A + c A A) X,  A = X X^T          on the matrix: each step reads and writes all of X, [short, long]
#     X <- Q X,  Q = P_3 P_2 P_1                      on its Gram matrix: three steps of [short, short] alone,
#        P_k = a I + b A_k + c A_k A_k                then one product with X
#        A_1 = X X^T,  A_k+1 = P_k A_k P_k
#
# Both are one polynomial of X, equal but for rounding. The second one takes fewer operations where X is long. After three
# steps A is made of X anew: rounding makes small eigenvalues of it negative, and those grow by a^2 a step, 12-fold, away
# from those of X X^T. Five steps on end are up to thousands of times their result off in bfloat16; three and two as
# little as the first form, within a factor of 3 on random numbers and less than it where singular values fall.
#
# Keller Jordan et al. (2024); the second form, and that it must begin anew: "Gram Newton-Schulz" (Dao AI Lab, 2026).

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's: the steepest slope at 0, and a spread of singular values between 0.7 and 1.2 at the end."""

RUN = 3
"""Steps on a Gram matrix until it is made anew."""

WORTH, SMALLEST = 0.9, 128
"""On the Gram matrix where that takes at most so much of the other form's operations (of five steps: a matrix that is 1.9
times as long as it is short, or longer), and the short side is so long: below, it is calls that cost, of which there are
more."""


def newton_schulz(
    matrix: Tensor, coefficients: tuple[float, float, float] = COEFFICIENTS, steps: int = 5, eps: float = 0.0
) -> Tensor:
    """As above, from X = matrix / |matrix|, on its short side; in which form, its shape says alone.

    Args:
        matrix: [rows, columns], of the dtype to compute in.
        eps: The least norm that the matrix is divided by. 0: there is none; zeros stay zeros.
    """
    tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.mT if tall else matrix
    x = x / x.norm().clamp(min=eps) if eps else normalize(x)
    x = (on_gram if goes_on_gram(tuple(x.shape), steps) else on_matrix)(x, coefficients, steps)
    return x.mT if tall else x


def normalize(matrix: Tensor) -> Tensor:
    """Return ``matrix`` divided by its Frobenius norm, whatever its scale; zeros where it is zero. Host reads: none.

    It is multiplied by a power of two first, so that no square underflows or overflows. That is exact: where plain
    division is right, the bits are the same.
    """
    if not matrix.numel():
        return matrix.clone()
    largest = matrix.abs().amax().to(torch.promote_types(matrix.dtype, torch.float32))
    limit = frexp(torch.finfo(matrix.dtype).max)[1] - 1  # of the largest power of two that the dtype has
    exponent = torch.frexp(largest).exponent.clamp(-limit, limit)
    x = matrix * torch.ldexp(torch.ones_like(largest), -exponent).to(matrix.dtype)
    norm = x.norm()
    return x.div_(torch.where(norm > 0, norm, torch.ones_like(norm)))


def on_matrix(x: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Of X, [short, long], with singular values up to 1, whose memory is written to."""
    a, b, c = coefficients
    # Memory is taken once: fresh one in each step would cost as much again.
    after, gram, polynomial = x.new_empty(x.shape), x.new_empty(2 * x.shape[:1]), x.new_empty(2 * x.shape[:1])
    for _ in range(steps):
        torch.mm(x, x.mT, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        x, after = torch.addmm(x, polynomial, x, beta=a, out=after), x
    return x


def on_gram(x: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """As `on_matrix`."""
    a, b, c = coefficients
    after = x.new_empty(x.shape)
    gram, p, q, spare = (x.new_empty(2 * x.shape[:1]) for _ in range(4))
    for first in range(0, steps, RUN):
        torch.mm(x, x.mT, out=gram)
        for step in range(first, min(first + RUN, steps)):
            if step > first:
                torch.mm(torch.mm(p, gram, out=spare), p, out=gram)
            torch.addmm(gram, gram, gram, beta=b, alpha=c, out=p).diagonal().add_(a)
            if step > first:
                q, spare = torch.mm(p, q, out=spare), q
            else:
                q.copy_(p)
        x, after = torch.mm(q, x, out=after), x
    return x


def goes_on_gram(shape: Shape, steps: int = 5) -> bool:
    """Which form a matrix takes."""
    return min(shape) >= SMALLEST and _flops_on_gram(shape, steps) <= WORTH * _flops_on_matrix(shape, steps)


def flops(shape: Shape) -> float:
    """Of five steps, about: what a matrix costs relative to others."""
    return _flops_on_gram(shape, 5) if goes_on_gram(shape) else _flops_on_matrix(shape, 5)


def _flops_on_matrix(shape: Shape, steps: int) -> float:
    short, long = sorted(shape)
    return steps * (4.0 * short * short * long + 2.0 * short**3)


def _flops_on_gram(shape: Shape, steps: int) -> float:
    """Of each run the first product and the last; of each step A A; of each but a run's first one 3 products more."""
    short, long = sorted(shape)
    runs = -(-steps // RUN)
    return runs * 4.0 * short * short * long + (2.0 * steps + 6.0 * (steps - runs)) * short**3


# Muon -----------------------------------------------------------------------------------------------------------------

Scale = Literal["original", "match_rms_adamw", "spectral_unclamped"]
NO_MATRICES = ("*embed*", "*wte*", "*wpe*", "*head.weight", "*classifier*")


def scale_of(rule: Scale | None, shape: Shape) -> float:
    """What the orthogonal update of a matrix is multiplied by, besides the learning rate.

    Args:
        rule: ``"original"`` (None): Keller Jordan's sqrt(max(1, rows / columns)). ``"match_rms_adamw"``: Moonshot's
            0.2 sqrt(max(rows, columns)). ``"spectral_unclamped"``: sqrt(rows / columns).
    """
    rows, columns = shape
    if rule == "match_rms_adamw":
        return 0.2 * sqrt(max(rows, columns))
    return sqrt(rows / columns) if rule == "spectral_unclamped" else sqrt(max(1.0, rows / columns))


class Muon(WholeOptimizer):
    """Muon for matrices, AdamW for the rest.

    Which is which: a parameter of two dims or more is a matrix (three: a stack of them, such as experts; four and more: a
    convolution's, of rows of all the other dims), unless its name matches ``no_matrices``: embeddings and heads. A param
    group may say it itself, with ``"algorithm": "muon"`` or ``"adamw"``.

    Args:
        params: Parameters, ``model.named_parameters()`` (which the rule needs), or groups of them.
        lr, weight_decay, momentum, nesterov, ns_coefficients, ns_steps, adjust_lr_fn: As `torch.optim.Muon`.
        eps: The least norm that a matrix is divided by before it is made orthogonal. 0: there is none, and the update does
            not depend on the scale of the gradient. `torch.optim.Muon` has 1e-7: gradients below it give smaller updates.
        adamw: AdamW's own options: lr (default: ``lr``), betas, eps, weight_decay.
        no_matrices: Globs over names.
        blocks: By glob, the blocks of a fused weight along its rows, each a matrix of its own: their number (``3`` for
            q, k and v; the number of heads for Muon per head) or sizes. Where none matches and a layout has
            `meshstep.parallel.blocks` along the rows, or along the columns, those.
        ns_dtype: Of the iteration; None: the parameter's. torch's is bfloat16. In float16 elements below 6e-8 are 0. A
            matrix that is about twice as long as it is short, or longer, goes on its Gram matrix: other last bits than
            torch's (see `newton_schulz`).
    A layer that keeps its weight transposed, [in, out], as those in two dimensions do, has the scale of that shape:
    ``"match_rms_adamw"`` is the same for both.

    Raises:
        ValueError: An option is out of range.
    Collectives: for each round of matrices, at most two all-to-alls among the ranks that have pieces of them.
    Memory: three rounds of whole matrices at most (`meshstep.optim.whole.exchange.ROUND_BYTES` each, half of it where
    float32 weights travel in bfloat16); on a CPU two of them, and what this rank sends and gets in them, are kept for the
    next step.
    """

    kept = ("no_matrices", "blocks", "ns_dtype", "_adamw")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 0.0,
        ns_steps: int = 5,
        adjust_lr_fn: Scale | None = None,
        *,
        adamw: Mapping[str, Any] | None = None,
        no_matrices: Sequence[str] = NO_MATRICES,
        blocks: Blocks | None = None,
        ns_dtype: torch.dtype | None = torch.bfloat16,
    ) -> None:
        if not lr >= 0 or not weight_decay >= 0 or not 0 <= momentum < 1:
            raise ValueError(f"lr={lr}, weight_decay={weight_decay}, momentum={momentum}: give >= 0, >= 0, in [0, 1)")
        if not 0 <= eps < inf:
            raise ValueError(
                f"eps={eps}: give a finite number >= 0, such as 0 (the default) or 1e-7 (torch.optim.Muon's)"
            )
        if adjust_lr_fn not in (None, "original", "match_rms_adamw", "spectral_unclamped"):
            raise ValueError(
                f"adjust_lr_fn={adjust_lr_fn!r}: give 'original', 'match_rms_adamw' or 'spectral_unclamped'"
            )
        if unknown := {*(adamw or {})} - {*ADAMW, "lr"}:
            raise ValueError(f"adamw={adamw!r}: there is no {', '.join(sorted(unknown))}; give lr, {', '.join(ADAMW)}")
        self.no_matrices, self.blocks, self.ns_dtype = tuple(no_matrices), dict(blocks or {}), ns_dtype
        self._adamw: dict[str, Any] = {"lr": lr, **ADAMW, **(adamw or {})}
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__([group for given in groups_of(params) for group in self._sorted(given)], defaults)

    def _sorted(self, group: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """A group of matrices and one of others, where it does not say which it is."""
        if "algorithm" in group:
            yield dict(group)
            return
        for algorithm in ("muon", "adamw"):
            own = [item for item in group["params"] if self.algorithm_of(*_named(item)) == algorithm]
            # Empty too: ranks then have the same groups. torch wants names in all of them or in none.
            named = any(_named(item)[0] for item in group["params"])
            names: dict[str, Any] = {"param_names": []} if named and not own else {}
            yield {**group, **names, "params": own, "algorithm": algorithm}

    def algorithm_of(self, name: str | None, param: Tensor) -> str:
        """``"muon"`` or ``"adamw"``, by the rule."""
        no_matrix = name is not None and any(fnmatchcase(name, pattern) for pattern in self.no_matrices)
        return "adamw" if param.dim() < 2 or no_matrix else "muon"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Raises ValueError where it has matrices and others, and does not say which algorithm they are for."""
        group = groups_of([param_group])[0]
        own, *rest = sorted(self._sorted(group), key=lambda part: -len(part["params"]))
        if any(part["params"] for part in rest):
            raise ValueError("the param group has matrices and others: give them in two, or say its 'algorithm'")
        super().add_param_group({**self._adamw, **own} if own["algorithm"] == "adamw" else own)

    # What is a matrix -----------------------------------------------------------------------------------------------

    def said_of(self, name: str | None, shape: Shape, group: Mapping[str, Any], spec: P | None) -> Any:
        if group["algorithm"] != "muon":
            return ()
        if len(shape) < 2:
            raise ValueError(f"{name} of shape {shape} is no matrix: give it in a group with 'algorithm': 'adamw'")
        return tuple(matrices_of(name, shape, self.blocks, spec))

    def bound(self, tensors: WholeTensors) -> None:
        super().bound(tensors)
        # Rounded before they travel, elements are what they would be if they were rounded at home.
        self._homes = Homes(tensors, _boxes, lambda shape: flops(as_matrix(shape)), dtype=self.ns_dtype)
        self._scales: dict[int, float | Tensor] = {}

    # The step -------------------------------------------------------------------------------------------------------

    def initial(self, slot: Slot) -> dict[str, Any]:
        if slot.group["algorithm"] == "adamw":
            return moments(slot)
        return {"momentum_buffer": torch.zeros_like(slot.param, memory_format=torch.contiguous_format)}

    def updates(self, slots: Sequence[Slot]) -> Iterator[Update]:
        matrices = {slot.position: slot for slot in slots if slot.group["algorithm"] == "muon"}
        for slot in matrices.values():
            mu = slot.group["momentum"]
            self.descend(slot.state["momentum_buffer"], slot.grad, -(1 - mu), -1.0)  # m + (1 - mu) (g - m)

        def orthogonal(matrix: Matrix, lists: list[Tensor]) -> Tensor:
            group = matrices[self.tensors.positions(matrix.tensor)[0]].group
            whole = lists[0].reshape(as_matrix(matrix.shape))
            return newton_schulz(whole, group["ns_coefficients"], group["ns_steps"], group["eps"]).reshape(matrix.shape)

        towards = OnDemand(list(matrices.values()), _towards)
        device = next((slot.param.device for slot in matrices.values()), None)
        for position, o in self._homes.map([towards], orthogonal, device):
            slot = matrices[position]
            lr, decay, scale = slot.group["lr"], slot.group["weight_decay"], self._scale(slot)
            if isinstance(scale, Tensor):
                o, scale = o * scale, 1.0
            self.descend(slot.param, o, lr * scale, decay / scale)
            yield Update(slot, slot.param, {})
        for slot in slots:
            if slot.group["algorithm"] == "adamw":
                yield adamw_update(slot)

    def _scale(self, slot: Slot) -> float | Tensor:
        """What the orthogonal matrices of a position are multiplied by; of its shape where they differ."""
        if slot.position not in self._scales:
            tensor, rule = self.tensors.tensors[slot.position], slot.group["adjust_lr_fn"]
            by_box = [(box, scale_of(rule, as_matrix(box.sizes))) for box in tensor.said]
            if len({scale for _, scale in by_box}) == 1:
                self._scales[slot.position] = by_box[0][1]
            else:
                whole = slot.param.new_empty(tensor.shape)
                for box, scale in by_box:
                    narrowed(whole, box).fill_(scale)
                self._scales[slot.position] = self.tensors.of_whole(slot.position, whole)
        return self._scales[slot.position]


def _towards(slot: Slot) -> Tensor:
    """u, of the new momentum."""
    m: Tensor = slot.state["momentum_buffer"]
    return slot.grad.lerp(m, slot.group["momentum"]) if slot.group["nesterov"] else m


def _boxes(tensor: LogicalTensor) -> Sequence[Box]:
    return tensor.said or ()


def as_matrix(shape: Shape) -> Shape:
    """The two dims of a matrix: of a stack's, its last ones; of a convolution's, its rows and all the rest."""
    if len(shape) == 3:
        return shape[1:]
    rest = 1
    for size in shape[1:]:
        rest *= size
    return shape[0], rest


def groups_of(params: Any) -> list[dict[str, Any]]:
    """Param groups, of what an optimizer may be given."""
    items: list[Any] = [params] if isinstance(params, Tensor) else list(params)
    if not items or not isinstance(items[0], dict):
        return [{"params": items}]
    return [
        {**group, "params": [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])}
        for group in items
    ]


def _named(item: Any) -> tuple[str | None, Tensor]:
    return item if isinstance(item, tuple) else (None, item)
