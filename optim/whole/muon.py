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
from math import inf, sqrt
from typing import Any, Literal

import torch
from torch import Tensor

from ...parallel.layout.pieces import Box, Shape
from ...parallel.layout.spec import P
from .adamw import ADAMW, adamw_update, moments
from .homes import Homes
from .layout import LogicalTensor
from .matrices import Blocks, matrices_of
from .newton_schulz import COEFFICIENTS, flops, newton_schulz
from .on_demand import OnDemand
from .optimizer import Slot, Update, WholeOptimizer
from .rounds import Matrix
from .tensors import WholeTensors, narrowed

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
    Memory: three rounds of whole matrices at most (`meshstep.optim.whole.homes.ROUND_BYTES` each, half of it where float32
    weights travel in bfloat16); on a CPU two of them, and what this rank sends and gets in them, are kept for the next
    step.
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
