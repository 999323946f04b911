"""The precision mode `Fp8`: linear layers multiply in 8 bits, all other operations run as in a base mode."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..parallel.interop.local_parameters import has_dtensors, local_parameter, spec_of
from ..parallel.layers.embedding import Classifier2D
from ..parallel.layers.summa import Grid, summa
from ..parallel.layers.tensor_1d import ColumnParallelLinear, RowParallelLinear
from ..parallel.layers.tensor_2d import Linear2D
from ..parallel.layers.tensor_3d import Classifier3D, Linear3D
from ..parallel.layout.annotation import annotation_of
from ..parallel.layout.spec import P
from ..parallel.mesh.deprecation import renamed_fields
from ..parallel.mesh.registry import ProcessGroupRegistry
from ..parallel.mesh.text import some
from .fp8_linear import (
    E4M3,
    E5M2,
    Fp8Linear,
    Fp8Matmul,
    Fp8RowMatmul,
    cache_of,
    cache_rounded,
    check_dtypes,
    fits,
    global_amax,
    quantize,
    round_both,
)
from .loss_scale import LossScale
from .modes import Bf16, Criterion, Fp32, Precision, register_mode

# SUMMA with 8-bit operands, the ``matmul`` of `Linear2D` under the mode `Fp8` ------------------------------------------


def fp8_summa(a: Tensor, b: Tensor, grid: Grid, inner: int | None = None, *, data_axes: tuple[str, ...] = ()) -> Tensor:
    """Return this rank's block [m, n] of ``A @ B``, with A, B and the gradient of the product rounded to 8 bits.

    Each matrix is multiplied by a scale of its own and rounded to 8 bits. The rounded values are stored in the operands'
    dtype, which represents every 8-bit value exactly, and `summa` broadcasts and multiplies them in this dtype. The result
    therefore has the precision of an 8-bit product, but 8 bits save neither time nor traffic.

    If a dim of ``b`` is not a multiple of 16, nothing is rounded: the call returns `summa` of its arguments.

    Args:
        a, b: This rank's blocks [m, k/cols] of A and [k/rows, n] of B, both float32 or both bfloat16. If ``b`` is a
            weight of a model that `Fp8` has prepared, the rounded ``b`` may be cached, as described at `Fp8`.
        grid: The grid of ranks. The largest absolute values of A, B and the gradient are all-reduced over it, and over
            ``data_axes``.
        inner: k, as in `summa`.
    Collectives: those of `summa`. If values are rounded, also an all-reduce (MAX) of two numbers in forward and of one
    number in backward; none over a single rank. Differentiable once.
    """
    if not fits(b):
        return summa(a, b, grid, inner)
    check_dtypes(a, b)
    axes = (grid.row, grid.col, *data_axes)
    x, w = round_both(a, E4M3, b, cache_of(b), "summa", grid.registry, axes)
    scales = _Scales(grid.registry, axes, x.inverse_scale * w.inverse_scale)
    rounded_a = _Round.apply(a, x.values, w.inverse_scale, scales)
    rounded_b = _Round.apply(b, w.values, x.inverse_scale, scales)
    result: Tensor = _Descale.apply(summa(rounded_a, rounded_b, grid, inner), scales)
    return result


class _Scales:
    """The inverse scales of one product ``A @ B``: ``product``, and ``grad`` of its gradient, which backward sets."""

    def __init__(self, registry: ProcessGroupRegistry, axes: tuple[str, ...], product: Tensor) -> None:
        self.registry, self.axes = registry, axes
        self.product, self.grad = product, torch.empty(())


class _Round(torch.autograd.Function):
    """Autograd function that returns the scaled 8-bit values of an operand A or B, in the operand's dtype.

    Backward multiplies the operand's gradient by ``other``, the inverse scale of the other operand, and by the inverse
    scale of the product's gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, other: Tensor, scales: _Scales) -> Tensor:
        ctx.other, ctx.scales = other, scales
        return values.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.float() * (ctx.scales.grad * ctx.other), None, None, None


class _Descale(torch.autograd.Function):
    """Autograd function that multiplies the product of rounded operands by the operands' inverse scales.

    Backward scales the gradient of the product and rounds it to 8 bits.
    """

    @staticmethod
    def forward(ctx: Any, product: Tensor, scales: _Scales) -> Tensor:
        ctx.scales = scales
        return (product.float() * scales.product).to(product.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        scales: _Scales = ctx.scales
        values, scales.grad = quantize(grad, E5M2, global_amax(grad, scales.registry, scales.axes))
        return values.to(grad.dtype), None


# The precision mode `Fp8` ---------------------------------------------------------------------------------------------

Matmul = Callable[..., torch.Tensor]
_LOGGER = logging.getLogger(__name__)
_LINEAR = (nn.Linear, ColumnParallelLinear, RowParallelLinear, Linear2D)
_NO_PRODUCT = "not in 8 bits: there is no 8-bit product for"
_UNSUPPORTED = (Linear3D, Classifier2D, Classifier3D)  # linear layers without an 8-bit product
FELL_BACK = "not in 8 bits: a dim of this rank's weight is not a multiple of 16"
UNEVEN = "not in 8 bits: the layer's features do not divide evenly over the grid of ranks"


@renamed_fields(leave_out="exclude", across_data="sync_over_data")
@register_mode
@dataclass(frozen=True)
class Fp8(Precision):
    """Precision mode in which linear layers multiply in 8 bits. All other computations are as in a base mode.

        model = Fp8(exclude=("head",)).prepare(model, registry)
        print(fp8_layers(model))

    `nn.Linear` becomes `Fp8Linear`: the same object with another class. `ColumnParallelLinear`, `RowParallelLinear` and
    `Linear2D` get another function in their attribute ``matmul``. Subclasses of `nn.Linear`, and modules that multiply
    their weights without an `nn.Linear` (`nn.MultiheadAttention`), are unchanged. An `nn.Linear` that `parallelize_module`
    shards is not supported: its weight is a DTensor in forward. Name it in ``exclude``.

    Some layers multiply in the dtype of the base mode instead: layers in which a dim of this rank's weight shard is not a
    multiple of 16, every `Linear2D` whose features do not divide evenly over the grid, and every `Linear3D`,
    `Classifier2D` and `Classifier3D`. On rank 0, or without a registry in every process, `prepare` logs warnings with the
    names of these layers in this rank's model, at most ten per warning. `fp8_layers` returns for every linear layer on
    this rank whether it multiplies in 8 bits.

    The 8-bit weight is cached until the weight changes or an optimizer steps, so it is rounded once for all micro-batches
    between two steps. An in-place write through ``.data`` is not noticed before the next step of a torch optimizer. The
    cache takes 1 byte per element, or 2 with ``scales="row"``. There is no cache under `fully_shard`, in a CUDA graph, in a
    compiled model, and while gradients are disabled: the weight is then rounded at every use.

    With ``scales="tensor"`` every tensor has one scale, computed from the largest absolute value of the full tensor. This
    value is all-reduced over the mesh axes that shard the tensor. The spec of the layer's weight names these axes, as
    sharded or partial. A model that is sharded over them therefore rounds like the dense model.

    Args:
        base: The base mode, "bf16" or "fp32". It determines the dtype of parameters and of all other layers, and whether
            there are master weights. Default: "bf16".
        sync_over_data: If True, the largest absolute values are also all-reduced over the data-parallel axes. Replicas
            then round like a single process that sees the full batch. This adds collectives to every linear layer, and
            all replicas must run the same number of micro-batches. Default False: each replica computes the scales from
            its own samples.
        scales: "tensor": one scale per tensor. "row": one scale per row of each matrix, so that an outlier affects only
            its row; the operands are then saved for backward in the base's dtype. `Linear2D` supports only "tensor".
            Default: "tensor".
        exclude: Names or patterns of layers that multiply in the base's dtype (``"head"``, ``"blocks.*.out"``; ``*`` also
            matches dots). Default: none.

    Raises:
        ValueError: An argument has an unknown value. In `prepare`, before the model is changed: an `nn.Linear` that is
            not excluded has no spec, or a DTensor over them, but the registry has model axes larger than 1; a pattern of
            ``exclude`` matches no linear layer (not checked with pipeline stages); ``scales="row"``, and a `Linear2D` is
            not excluded; or as in `Precision.prepare`.
    Collectives: per layer and micro-batch at most one small all-reduce in forward and one in backward, or two in backward
    with ``scales="row"``; none over a single rank. Host synchronization: none.
    """

    base: Literal["bf16", "fp32"] = "bf16"
    sync_over_data: bool = False
    scales: Literal["tensor", "row"] = "tensor"
    exclude: tuple[str, ...] = ()

    name: ClassVar[str] = "fp8"

    def __post_init__(self) -> None:
        if self.base not in ("bf16", "fp32"):
            raise ValueError(f"base={self.base!r} is not a base mode of Fp8; give 'bf16' or 'fp32'")
        if self.scales not in ("tensor", "row"):
            raise ValueError(
                f"scales={self.scales!r} is unknown; give 'tensor' (one per tensor) or 'row' (one per row)"
            )
        given: Any = self.exclude
        patterns = None if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
        if patterns is None or not all(isinstance(pattern, str) for pattern in patterns):
            raise ValueError(
                f"exclude={given!r} is not a tuple of strings; give names or patterns like ('head', '*.out')"
            )
        object.__setattr__(self, "exclude", patterns)

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
        self._check_exclude(model, registry)
        matmuls = {}
        for name, module in model.named_modules():
            if any(fnmatchcase(name, pattern) for pattern in self.exclude):
                continue
            if (matmul := self._matmul_of(name, module, registry)) is not None:
                matmuls[module] = matmul
        self._base._prepare(model, registry)
        for module, matmul in matmuls.items():
            if type(module) is nn.Linear:
                module.__class__ = Fp8Linear
            module.matmul = matmul
            cache_rounded(_weight(module))
        self._log_fallbacks(model, registry)

    def _check_exclude(self, model: nn.Module, registry: ProcessGroupRegistry | None) -> None:
        """Raise ValueError if a pattern of ``exclude`` matches no linear layer.

        With several pipeline stages nothing is checked, because a pattern may match a layer of another stage.
        """
        topology = None if registry is None else registry.topology
        if topology is not None and topology.size(*topology.pipe_axes) > 1:
            return
        names = [name for name, module in model.named_modules() if isinstance(module, (*_LINEAR, *_UNSUPPORTED))]
        for pattern in self.exclude:
            if not any(fnmatchcase(name, pattern) for name in names):
                shown = some([name or "''" for name in names], 10)  # '' is the name of the model itself
                write = f"choose from {shown}" if names else "the model has none, so leave exclude out"
                raise ValueError(f"exclude={pattern!r} matches no linear layer; {write}")

    def _log_fallbacks(self, model: nn.Module, registry: ProcessGroupRegistry | None) -> None:
        found = fp8_layers(model)
        unaligned = [f"{name} {tuple(_weight(model, name).shape)}" for name, how in found.items() if how == FELL_BACK]
        if unaligned and (registry is None or registry.global_rank == 0):
            _LOGGER.warning(
                "%d of %d linear layers are computed in %s and not in 8 bits, because a dim of their weight is not a "
                "multiple of 16: %s",
                *(len(unaligned), len(found), self.base, some(unaligned, 10)),
            )
        unsupported = [f"{name}: {how}" for name, how in found.items() if how == UNEVEN or how.startswith(_NO_PRODUCT)]
        if unsupported and (registry is None or registry.global_rank == 0):
            more = f"; and {len(unsupported) - 10} more" if len(unsupported) > 10 else ""
            _LOGGER.warning(
                "these linear layers are computed in %s: %s%s", self.base, "; ".join(unsupported[:10]), more
            )

    def _matmul_of(self, name: str, module: nn.Module, registry: ProcessGroupRegistry | None) -> Matmul | None:
        if isinstance(module, Linear2D):
            if self.scales == "row":
                raise ValueError(
                    f"{name or 'the model'} is a Linear2D, which supports only one scale per tensor; use "
                    "scales='tensor', or name the layer in exclude"
                )
            if not _is_even(module):
                return None
            axes = (*spec_of(module.weight).partial, *self._data_axes(module.registry))
            return partial(fp8_summa, data_axes=_trim_axes(axes, module.registry))
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
            by_row = [_trim_axes(axes, registry) for axes in (in_axes, out_axes, batch_axes)]
            return Fp8RowMatmul(registry, *by_row) if any(by_row) else Fp8RowMatmul()
        forward = _trim_axes((*out_axes, *in_axes, *batch_axes), registry)
        # Without axes the layer stores no registry, so that it can be unpickled in a process without process groups.
        return Fp8Matmul(registry, forward, _trim_axes((*out_axes, *batch_axes), registry)) if forward else Fp8Matmul()

    def _data_axes(self, registry: ProcessGroupRegistry) -> tuple[str, ...]:
        return registry.topology.data_axes if self.sync_over_data else ()


def _trim_axes(axes: tuple[str, ...], registry: ProcessGroupRegistry) -> tuple[str, ...]:
    atoms = {atom for axis in axes for atom in registry.topology.expand_aliases(axis)}
    return tuple(axis for axis in registry.topology.axes if axis in atoms and registry.size(axis) > 1)


def _spec_of_linear(name: str, module: nn.Linear, registry: ProcessGroupRegistry | None) -> P:
    annotation, label = annotation_of(module.weight), f"{name}.weight" if name else "weight"
    model_axes = _trim_axes(registry.topology.model_axes, registry) if registry is not None else ()
    if registry is not None and has_dtensors((module.weight,)):
        local = annotation_of(local_parameter(module.weight, registry.topology))
        over = [axis for axis in model_axes if local is not None and axis in local.mesh_axes_on(registry.topology)]
        if over:
            raise ValueError(
                f"{label} is a DTensor over mesh axes {', '.join(over)}, which Fp8 does not support; name the layer in "
                "exclude, or use ColumnParallelLinear and RowParallelLinear instead of parallelize_module"
            )
    if annotation is not None:
        return annotation.spec
    if model_axes:
        raise ValueError(
            f"{label} has no declared layout, so its sharding over mesh axes {', '.join(model_axes)} is unknown; call "
            f"declare(model, {{{label!r}: P(...)}}) before you prepare the model, with P() for replicated"
        )
    return P()


def fp8_layers(model: nn.Module) -> dict[str, str]:
    """Return for each linear layer and `nn.MultiheadAttention` on this rank whether it multiplies in 8 bits, or why not.

        print(fp8_layers(model))      # {'0': '8 bits', 'head': 'not in 8 bits: left out'}

    Args:
        model: A model that `Fp8` has prepared.
    Returns:
        A dict. The key is the name of a layer. The value is ``"8 bits"``, or ``"not in 8 bits: "`` followed by the reason.
    Collectives: none. Host synchronization: none.
    """
    return {
        name: _describe_layer(module)
        for name, module in model.named_modules()
        if isinstance(module, (*_LINEAR, *_UNSUPPORTED, nn.MultiheadAttention))
    }


def _describe_layer(module: nn.Module) -> str:
    if isinstance(module, nn.MultiheadAttention):
        return "not in 8 bits: nn.MultiheadAttention multiplies its weights without nn.Linear"
    matmul = getattr(module, "matmul", None)
    if isinstance(matmul, (Fp8Matmul, Fp8RowMatmul)) or getattr(matmul, "func", None) is fp8_summa:
        return "8 bits" if fits(_weight(module)) else FELL_BACK
    if isinstance(module, _UNSUPPORTED):
        return f"{_NO_PRODUCT} {type(module).__name__}"
    if isinstance(module, Linear2D) and not _is_even(module):
        return UNEVEN
    if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
        return f"not in 8 bits: {type(module).__name__} is a subclass of nn.Linear, which the mode does not change"
    return "not in 8 bits: left out"


def _is_even(layer: Linear2D) -> bool:
    """Return True if the layer's features divide evenly over the grid. `fits` then gives the same result on every rank."""
    rows, cols = layer.registry.size(layer.row), layer.registry.size(layer.col)
    return layer.in_features % rows == layer.in_features % cols == layer.out_features % cols == 0


def _weight(model: nn.Module, name: str = "") -> Tensor:
    weight = model.get_submodule(name).weight
    assert isinstance(weight, Tensor)
    return weight
