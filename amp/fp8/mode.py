"""The mode `Fp8`: linear layers multiply in 8 bits, everything else as in a base mode."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...parallel.interop.local_parameters import spec_of
from ...parallel.layers.embedding import Classifier2D
from ...parallel.layers.summa import Grid, summa
from ...parallel.layers.tensor_1d import ColumnParallelLinear, RowParallelLinear
from ...parallel.layers.tensor_2d import Linear2D
from ...parallel.layers.tensor_3d import Classifier3D, Linear3D
from ...parallel.layout.annotation import annotation_of
from ...parallel.layout.spec import P
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.text import some
from ..loss_scale import LossScale
from ..modes import Bf16, Fp32
from ..precision import Criterion, Precision, register_mode
from .linear import Fp8Linear, Fp8Matmul, Fp8RowMatmul, fits
from .tensor import E4M3, E5M2, Quantized, agreed_amax, check_dtypes, quantize
from .weights import keep_rounded, kept, round_both

# SUMMA with 8-bit operands: what `Linear2D` multiplies with under the mode `Fp8` --------------------------------------


def fp8_summa(a: Tensor, b: Tensor, grid: Grid, inner: int | None = None, *, data_axes: tuple[str, ...] = ()) -> Tensor:
    """This rank's block [m, n] of ``A @ B`` with A, B and the gradient rounded as by `Fp8Matmul`.

    Every 8-bit value is a value of the operands' dtype too, so the blocks are rounded and then sent around and
    multiplied by `summa` in that dtype. The numbers are those of an 8-bit product, but that the sums are made in the
    dtype; time and traffic are those of the dtype. Where the dims of ``b`` aren't multiples of 16 nothing is rounded.

    Args:
        a, b: Blocks [m, k] and [k, n], both float32 or both bfloat16. In a model that `Fp8` has prepared ``b``, the
            weight, is rounded once a step.
        inner: As for `summa`.
        grid: The grid of ranks, over which the maxima of all three tensors are agreed.
        data_axes: Further axes to agree over.
    Raises:
        TypeError: a or b is float64.
    Collectives: those of `summa`, and an all-reduce (MAX) of two numbers in forward, of one in backward. Host reads:
        none. Differentiable once.
    """
    if not fits(b):
        return summa(a, b, grid, inner)
    check_dtypes(a, b)
    scales = _Scales(grid.registry, (grid.row, grid.col, *data_axes))
    how = "summa", grid.registry, scales.axes
    rounded = round_both(a, E4M3, b, kept(b), how, scales.registry, scales.axes)
    x, w = (_Round.apply(each, rounded[which], scales, which) for which, each in enumerate((a, b)))
    result: Tensor = _Descale.apply(summa(x, w, grid, inner), scales)
    return result


class _Scales:
    """The inverse scales of the two operands and, from the start of backward on, of the gradient."""

    def __init__(self, registry: ProcessGroupRegistry, axes: tuple[str, ...]) -> None:
        self.registry, self.axes = registry, axes
        self.operands: list[Tensor] = [torch.empty(()), torch.empty(())]
        self.grad = torch.empty(())


class _Round(torch.autograd.Function):
    """An operand's 8-bit values, not descaled, in its dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Quantized, scales: _Scales, which: int) -> Tensor:
        ctx.scales, ctx.which = scales, which
        values, scales.operands[which] = rounded
        return values.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        other = ctx.scales.operands[1 - ctx.which]
        return grad.float() * (ctx.scales.grad * other), None, None, None


class _Descale(torch.autograd.Function):
    """Multiplies by the operands' inverse scales; the backward hands the 8-bit values of the gradient to `summa`."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, scales: _Scales) -> Tensor:
        ctx.scales = scales
        first, second = scales.operands
        return (product.float() * (first * second)).to(product.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        scales: _Scales = ctx.scales
        (amax,) = agreed_amax((grad,), scales.registry, scales.axes)
        values, scales.grad = quantize(grad, E5M2, amax)
        return values.to(grad.dtype), None


# Mode -----------------------------------------------------------------------------------------------------------------

Matmul = Callable[..., torch.Tensor]
_LOGGER = logging.getLogger(__name__)
_LINEAR = (nn.Linear, ColumnParallelLinear, RowParallelLinear, Linear2D)
_NO_PRODUCT = "not in 8 bits: there is no 8-bit product for"
_WITHOUT = (Linear3D, Classifier2D, Classifier3D)  # linear too, but nobody has written their products in 8 bits
FELL_BACK = "not in 8 bits: a dim of this rank's weight is no multiple of 16"
UNEVEN = "not in 8 bits: ranks have unequal pieces of its weight"


@register_mode
@dataclass(frozen=True)
class Fp8(Precision):
    """Linear layers in 8 bits; parameters, masters and everything that isn't a linear layer as in the base mode.

    `nn.Linear` becomes `Fp8Linear` (the same object, of another class); `ColumnParallelLinear`, `RowParallelLinear` and
    `Linear2D` get another ``matmul``. Subclasses of `nn.Linear` and layers that hold their weight otherwise
    (`nn.MultiheadAttention`) stay as they are. A layer falls back to the base's dtype where the dims of its weight, of
    this rank's piece, aren't multiples of 16: see `Fp8Matmul`; for `Linear2D` see `fp8_summa`.

    Of `Linear2D` also where ranks have unequal pieces. `Linear3D`, and classifiers on grids and cubes,
    always do.

    `prepare` logs a warning that names these layers, and `fp8_layers` lists what became of every one.

    A weight is rounded once in a window of micro-batches, and anew after every step of a torch optimizer or change of the
    weight; every time under `fully_shard`, in a CUDA graph, in a compiled model and where no gradients are computed. It is
    kept for so long: 1 byte an element, 2 with scales by row.

    Every tensor has one scale, from the maximum of the logical tensor: it is agreed over the axes that the spec of the
    layer's weight names, as sharded or as partial (the activations are split over those). So a model split over tensor
    axes rounds as the whole one does.

    Args:
        base: "bf16" or "fp32".
        scales: "tensor": one scale a tensor. "row": one for each row, see `Fp8RowMatmul`; more exact where there are
            outliers, but operands are kept for backward in the base's dtype. `Linear2D` has "tensor" only.
        leave_out: Layers that stay in the base's dtype, by their names or patterns (``"head"``, ``"blocks.*.out"``; ``*``
            crosses dots).
        across_data: Agree on the maxima of activations and their gradients over the data axes too, so that replicas
            round as one process does that sees the whole batch. Costs collectives in every linear layer, and binds the
            replicas to run the same number of micro-batches. Without, each replica scales for the samples it has.

    Raises:
        ValueError: The base is another; in `prepare`, an `nn.Linear` has no spec though the registry has model axes, a
            pattern of leave_out matches no linear layer (where there is one pipeline stage only), or a `Linear2D` is to
            have scales by row. Nothing is changed then.
    Collectives: per layer up to two small all-reduces, see `Fp8Matmul`. Host reads: none.
    """

    base: Literal["bf16", "fp32"] = "bf16"
    across_data: bool = False
    scales: Literal["tensor", "row"] = "tensor"
    leave_out: tuple[str, ...] = ()

    name: ClassVar[str] = "fp8"

    def __post_init__(self) -> None:
        if self.base not in ("bf16", "fp32"):
            raise ValueError(f"base={self.base!r} is no base for 8-bit layers; give 'bf16' or 'fp32'")
        if self.scales not in ("tensor", "row"):
            raise ValueError(f"scales={self.scales!r}: give 'tensor', one scale a tensor, or 'row', one for each row")
        given: Any = self.leave_out
        if isinstance(given, str) or not all(isinstance(pattern, str) for pattern in given):
            raise ValueError(f"leave_out={self.leave_out!r}: give a tuple of names or patterns, as ('head', '*.out')")
        object.__setattr__(self, "leave_out", tuple(self.leave_out))

    @property
    def _base(self) -> Precision:
        return Bf16() if self.base == "bf16" else Fp32()

    @property
    def masters(self) -> bool:
        return self._base.masters

    def make_loss_scale(self, device: torch.device | str | None = None) -> LossScale | None:
        return self._base.make_loss_scale(device)

    def prepare_criterion(self, criterion: Criterion) -> Criterion:
        return self._base.prepare_criterion(criterion)

    def export_state_dict(self, model: nn.Module) -> dict[str, Any]:
        return self._base.export_state_dict(model)

    def _prepare(self, model: nn.Module, registry: ProcessGroupRegistry | None) -> None:
        self._check_left_out(model, registry)
        matmuls = {}
        for name, module in model.named_modules():
            matmul = None if self._leaves_out(name) else self._matmul_of(name, module, registry)
            if matmul is not None:
                matmuls[module] = matmul
        self._base._prepare(model, registry)
        for module, matmul in matmuls.items():
            if type(module) is nn.Linear:
                module.__class__ = Fp8Linear
            module.matmul = matmul
            keep_rounded(_weight(module))
        self._tell(model, registry)

    def _leaves_out(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.leave_out)

    def _check_left_out(self, model: nn.Module, registry: ProcessGroupRegistry | None) -> None:
        """On a pipeline stage a pattern may be meant for another."""
        topology = None if registry is None else registry.topology
        if topology is not None and topology.size(*topology.pipe_axes) > 1:
            return
        names = [name for name, module in model.named_modules() if isinstance(module, (*_LINEAR, *_WITHOUT))]
        for pattern in self.leave_out:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"leave_out={pattern!r} matches no linear layer; there are {', '.join(names[:10]) or 'none'}"
                )

    def _tell(self, model: nn.Module, registry: ProcessGroupRegistry | None) -> None:
        found = fp8_layers(model)
        fell = [f"{name} {tuple(_weight(model, name).shape)}" for name, how in found.items() if how == FELL_BACK]
        if fell and (registry is None or registry.global_rank == 0):
            _LOGGER.warning(
                "%d of %d linear layers are computed in %s and not in 8 bits, because a dim of their weight is no multiple "
                "of 16: %s",
                *(len(fell), len(found), self.base, some(fell, 10)),
            )
        others = [f"{name}: {how}" for name, how in found.items() if how == UNEVEN or how.startswith(_NO_PRODUCT)]
        if others and (registry is None or registry.global_rank == 0):
            more = f"; and {len(others) - 10} more" if len(others) > 10 else ""
            _LOGGER.warning("these linear layers are computed in %s: %s%s", self.base, "; ".join(others[:10]), more)

    def _matmul_of(self, name: str, module: nn.Module, registry: ProcessGroupRegistry | None) -> Matmul | None:
        if isinstance(module, Linear2D):
            if self.scales == "row":
                raise ValueError(
                    f"{name or 'the model'} is a Linear2D, whose blocks travel as they are rounded, with one scale a "
                    "tensor: take scales='tensor', or name it in leave_out"
                )
            if not _is_even(module):
                return None
            axes = (*spec_of(module.weight).partial, *self._data_axes(module.registry))
            return partial(fp8_summa, data_axes=_split(axes, module.registry))
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            return self._fp8_matmul(spec_of(module.weight), module.registry)
        if type(module) is nn.Linear:
            return self._fp8_matmul(_spec_of_linear(name, module, registry), registry)
        return None

    def _fp8_matmul(self, spec: P, registry: ProcessGroupRegistry | None) -> Matmul:
        rows = self.scales == "row"
        if registry is None:
            return Fp8RowMatmul() if rows else Fp8Matmul()
        out_axes, in_axes = spec.dim_axes(0), spec.dim_axes(1)
        batch_axes = (*spec.partial, *self._data_axes(registry))
        if rows:
            by_row = [_split(axes, registry) for axes in (in_axes, out_axes, batch_axes)]
            return Fp8RowMatmul(registry, *by_row) if any(by_row) else Fp8RowMatmul()
        forward = _split((*out_axes, *in_axes, *batch_axes), registry)
        # Without a registry where none is needed: such a layer can be copied and pickled.
        return Fp8Matmul(registry, forward, _split((*out_axes, *batch_axes), registry)) if forward else Fp8Matmul()

    def _data_axes(self, registry: ProcessGroupRegistry) -> tuple[str, ...]:
        return registry.topology.data_axes if self.across_data else ()


def _split(axes: tuple[str, ...], registry: ProcessGroupRegistry) -> tuple[str, ...]:
    atoms = {atom for axis in axes for atom in registry.topology.atoms(axis)}
    return tuple(axis for axis in registry.topology.axes if axis in atoms and registry.size(axis) > 1)


def _spec_of_linear(name: str, module: nn.Linear, registry: ProcessGroupRegistry | None) -> P:
    annotation = annotation_of(module.weight)
    if annotation is not None:
        return annotation.spec
    model_axes = _split(registry.topology.model_axes, registry) if registry is not None else ()
    if model_axes:
        label = f"{name}.weight" if name else "weight"
        raise ValueError(
            f"{label} has no spec, so it can't be told over which of {', '.join(model_axes)} its maximum must be "
            f"agreed; say how it is laid out before the model is prepared: declare(model, {{{label!r}: P(...)}}), P() "
            "meaning replicated"
        )
    return P()


def fp8_layers(model: nn.Module) -> dict[str, str]:
    """What `Fp8` made of every linear layer of this rank's part of a model, by name: ``"8 bits"``, or why not.

    Collectives, host reads: none.
    """
    return {
        name: _how(module)
        for name, module in model.named_modules()
        if isinstance(module, (*_LINEAR, *_WITHOUT, nn.MultiheadAttention))
    }


def _how(module: nn.Module) -> str:
    if isinstance(module, nn.MultiheadAttention):
        return "not in 8 bits: nn.MultiheadAttention holds its weights otherwise"
    matmul = getattr(module, "matmul", None)
    if isinstance(matmul, (Fp8Matmul, Fp8RowMatmul)) or getattr(matmul, "func", None) is fp8_summa:
        return "8 bits" if fits(_weight(module)) else FELL_BACK
    if isinstance(module, _WITHOUT):
        return f"{_NO_PRODUCT} {type(module).__name__}"
    if isinstance(module, Linear2D) and not _is_even(module):
        return UNEVEN
    if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
        return f"not in 8 bits: {type(module).__name__} is a subclass of nn.Linear, which stays as it is"
    return "not in 8 bits: left out"


def _is_even(layer: Linear2D) -> bool:
    """Whether all ranks have equal pieces of the weight, and so decide alike whether it fits."""
    rows, cols = layer.registry.size(layer.row), layer.registry.size(layer.col)
    return layer.in_features % rows == layer.in_features % cols == layer.out_features % cols == 0


def _weight(model: nn.Module, name: str = "") -> Tensor:
    weight = model.get_submodule(name).weight
    assert isinstance(weight, Tensor)
    return weight
