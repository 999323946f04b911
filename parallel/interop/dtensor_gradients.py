"""Gradients of DTensor parameters, converted to gradients of their local tensors.

The operations of backward choose the placements of a gradient, which may differ from the placements of the parameter.
Along a mesh dim:

    parameter   gradient    gradient of the local parameter
    any         equal       the local tensor
    Shard       Replicate   this rank's slice; torch replicates the gradient of a vocabulary embedding
    Replicate   Partial     a partial gradient, which the step sums together with all others
    Shard       Partial     this rank's slice of the sum, which is computed here

The sums are collectives, in which ranks without a gradient must take part too. In the first step, all ranks therefore
exchange the partial axes of their gradients (`sums_seen`) and store the union (`settle`). From then on these gradients
are summed in every step, as if they were declared partial. If such a gradient is complete in a later step, the first
rank contributes the gradient and the other ranks contribute zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from ..layout.annotation import ATTRIBUTE, Annotation, Sums, annotation_of
from ..layout.spec import cut_spans
from ..mesh.topology import Topology
from .dtensor import (
    SEEN,
    follow_version,
    label,
    local_parameter,
    mesh_axes,
    mesh_ranks,
    placement_spec,
    settle_sums,
    settled_sums,
    waited,
)


def share_gradient(param: DTensor, piece: nn.Parameter, *, to_sum: bool = False) -> None:
    """Set ``piece.grad`` to the local tensor of the DTensor's gradient.

    The two share memory unless ``piece.grad_dtype`` requires a cast. Args, Raises and Collectives: as in
    `local_gradient`.
    """
    local, wanted = local_gradient(param, piece, to_sum=to_sum), piece.grad_dtype
    piece.grad = local if local is None or wanted is None or wanted == local.dtype else local.to(wanted)


def local_gradient(param: DTensor, piece: nn.Parameter, *, to_sum: bool = False) -> Tensor | None:
    """Return the local tensor of the DTensor's gradient, with its memory and in the layout of the local parameter.

    A gradient whose placements differ from the parameter's placements is replaced.

    Args:
        param: A DTensor parameter.
        piece: Its local parameter.
        to_sum: If True, the caller is about to sum the partial gradient over the axes in the spec of ``piece``, in
            place. The DTensor's gradient is then marked as complete. Default: False.
    Returns:
        None if there is no gradient, and none has to be summed.
    Raises:
        ValueError: The gradient's placements are not supported: it is partial over an axis that the ranks have not
            agreed on, or (``to_sum``) it is declared partial and is complete.
    Collectives: with ``to_sum``, an all-reduce per axis that shards the parameter and over which the gradient was
    agreed to be partial.
    """
    grad: Tensor | None = param.grad
    if not isinstance(grad, DTensor):
        if grad is not None:
            raise ValueError(
                f"the gradient of {label(param)} is a {type(grad).__name__}, but the parameter is a DTensor; give it a "
                "DTensor gradient, as autograd does"
            )
        return _match_layout(param, piece, grad, to_sum) if to_sum else None
    if grad.placements != param.placements or (to_sum and (_partial_axes(piece) or settled_sums(piece))):
        return _match_layout(param, piece, grad, to_sum)
    local = grad._local_tensor if type(grad._local_tensor) is Tensor else waited(grad._local_tensor)
    if to_sum:
        follow_version(grad, local)
    return local


def return_gradient(param: DTensor, piece: nn.Parameter) -> None:
    """Remove the gradient from ``piece``, and set it as the DTensor's gradient if the DTensor has none."""
    if piece.grad is not None:
        if param.grad is None:
            param.grad = _wrap_like(param, piece.grad.to(param.dtype))
        piece.grad = None


def poison_gradient(param: DTensor, piece: nn.Parameter) -> None:
    """Set the gradient of ``piece`` to NaN after `share_gradient` raised, so that all ranks skip the step.

    Collectives: as in `share_gradient`.
    """
    if sum_axes := _sharded_sum_axes(piece):
        _all_reduce(torch.full_like(_zeros(param, sum_axes), torch.nan), param, sum_axes)
    piece.grad = torch.full_like(piece, torch.nan, dtype=piece.grad_dtype or piece.dtype)


# Agreement of all ranks on partial axes ----------------------------------------------------------------------------------


def sums_seen(params: Iterable[Tensor]) -> Sums:
    """Return the axes over which gradients of DTensors are partial although they are not declared partial.

    Args:
        params: Any parameters; plain tensors are ignored.
    Raises:
        ValueError: `share_gradient` would raise even after these axes were settled.
    """
    seen = {}
    for key, param in _keyed(params):
        if isinstance(grad := param.grad, DTensor):
            declared = {*_partial_axes(local_parameter(param))} - {*settled_sums(local_parameter(param))}
            sums = [axis for axis, has, _ in _zip_placements(param, grad) if _is_sum(has) and axis not in declared]
            for axis, has, wanted in _zip_placements(param, grad):
                _check(param, axis, has, wanted, {*declared, *sums}, declared)
            _check_slice(
                param,
                [axis for axis, has, wanted in _zip_placements(param, grad) if has != wanted and _is_shard(wanted)],
            )
            seen[key] = tuple(sums)
    return seen


def settle(params: Iterable[Tensor], seen: Sequence[Sums]) -> bool:
    """Store the partial axes that all ranks have found, and return True if an axis is new.

    Args:
        params: As in `sums_seen`.
        seen: The result of `sums_seen` on each rank.
    """
    changed = False
    for key, param in _keyed(params):
        settled = settled_sums(local_parameter(param))
        axes = {axis for sums in seen for axis in sums.get(key, ())}.difference(settled)
        if axes:
            settle_sums(param, tuple(axis for axis in mesh_axes(param) if axis in {*settled, *axes}))
            changed = True
    return changed


def _keyed(params: Iterable[Tensor]) -> Iterator[tuple[tuple[tuple[int, ...], int], DTensor]]:
    counts: dict[tuple[int, ...], int] = {}
    for param in params:
        if isinstance(param, DTensor):
            ranks = mesh_ranks(param)
            yield (ranks, counts.setdefault(ranks, 0)), param
            counts[ranks] += 1


# One gradient ------------------------------------------------------------------------------------------------------------


def _match_layout(param: DTensor, piece: nn.Parameter, grad: DTensor | None, to_sum: bool) -> Tensor | None:
    """Return the local gradient in the layout of the parameter.

    The gradient stays partial over the axes that the spec declares partial.
    """
    partial_axes, settled, sum_axes = {*_partial_axes(piece)}, {*settled_sums(piece)}, _sharded_sum_axes(piece)
    if grad is None:
        return _take_slice(_all_reduce(_zeros(param, sum_axes), param, sum_axes), param, sum_axes) if sum_axes else None
    given = local = waited(grad._local_tensor)
    follow_version(grad, local)
    coordinate = param.device_mesh.get_coordinate() or ()
    stays_partial, sliced_axes = False, []
    summed, declared = (partial_axes | settled, partial_axes - settled) if to_sum else (partial_axes, set[str]())
    for index, (axis, has, wanted) in enumerate(_zip_placements(param, grad)):
        _check(param, axis, has, wanted, summed, declared)
        if has.is_partial("avg"):
            local = local / param.device_mesh.size(index)
        elif to_sum and axis in settled and not _is_sum(has) and coordinate[index] > 0:
            local = torch.zeros_like(local)
        if axis in sum_axes and has == wanted:
            raise ValueError(
                _describe_mismatch(param, axis, has, wanted)
                + ", although it was a partial gradient in the first step; make backward "
                "return the same placements in every step"
            )
        stays_partial |= _is_sum(has) and axis in partial_axes and not to_sum
        sliced_axes += [axis] if has != wanted and _is_shard(wanted) else []
    _check_slice(param, sliced_axes)
    if to_sum and sum_axes:
        local = _all_reduce(local, param, sum_axes)
    if sliced_axes:
        local = _take_slice(local, param, sliced_axes)
    if not stays_partial and (local is not given or grad.placements != param.placements):
        param.grad = _wrap_like(param, local)
    return local


def _check(
    param: DTensor, axis: str, has: Placement, wanted: Placement, summed: Iterable[str], declared: Iterable[str]
) -> None:
    """Raise ValueError if a gradient with placement ``has`` over ``axis`` can't be converted.

    Args:
        summed: Axes over which the gradient may be partial.
        declared: Axes over which the gradient must be partial.
    """
    if _is_sum(has):
        if axis not in summed:
            hint = "redistribute it" if _is_shard(wanted) else f"declare the parameter P(partial={axis!r})"
            raise ValueError(f"{_describe_mismatch(param, axis, has, wanted)}; {hint}, or let ParallelOptimizer sum it")
    elif axis in declared:
        raise ValueError(
            f"{label(param)} is declared partial over {axis!r}, but its gradient is complete ({has!r}) and would be "
            f"summed twice; leave {axis!r} out of partial="
        )
    elif has != wanted and not (has.is_replicate() and _is_shard(wanted)):
        raise ValueError(f"{_describe_mismatch(param, axis, has, wanted)}; redistribute the gradient")


def _describe_mismatch(param: DTensor, axis: str, has: Placement, wanted: Placement) -> str:
    return f"the gradient of {label(param)} is {has!r} over {axis!r}, but the parameter is {wanted!r}"


def _zip_placements(param: DTensor, grad: DTensor) -> Iterator[tuple[str, Placement, Placement]]:
    """Return (mesh dim, placement of the gradient, placement of the parameter) per mesh dim."""
    return zip(mesh_axes(param), grad.placements, param.placements, strict=True)


def _is_sum(placement: Placement) -> bool:
    return placement.is_partial("sum") or placement.is_partial("avg")


def _is_shard(placement: Placement) -> bool:
    return not placement.is_replicate() and not placement.is_partial()


def _partial_axes(piece: nn.Parameter) -> tuple[str, ...]:
    annotation = annotation_of(piece)
    return () if annotation is None else annotation.spec.partial


def _sharded_sum_axes(piece: nn.Parameter) -> list[str]:
    """Return the axes over which the gradient is partial and the parameter is sharded, which no spec can describe."""
    return [axis for axis in settled_sums(piece) if axis not in _partial_axes(piece)]


def _all_reduce(local: Tensor, param: DTensor, axes: Sequence[str]) -> Tensor:
    """Return the sum of ``local`` over these mesh dims, computed in place if ``local`` is contiguous."""
    local = local.contiguous()
    for axis in axes:
        dist.all_reduce(local, group=param.device_mesh.get_group(axis))
    return local


def _zeros(param: DTensor, axes: Sequence[str]) -> Tensor:
    """Return zeros in the shape of this rank's local tensor without the sharding over ``axes``."""
    shape = [sum(length for _, length in _spans(param, dim, length, axes)) for dim, length in enumerate(param.shape)]
    return torch.zeros(shape, dtype=param.grad_dtype or param.dtype, device=param.device)


def _take_slice(local: Tensor, param: DTensor, axes: Sequence[str]) -> Tensor:
    """Return this rank's part of ``local``, which has the parameter's layout without the sharding over ``axes``."""
    spec = placement_spec(param)
    for dim in range(param.dim()):
        rest = [axis for axis in spec.dim_axes(dim) if axis not in axes]
        if len(rest) < len(spec.dim_axes(dim)):
            parts = [local.narrow(dim, *span) for span in _spans(param, dim, local.shape[dim], rest)]
            local = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return local.clone() if local._is_view() else local  # a view would keep the memory of the full gradient


def _check_slice(param: DTensor, axes: Sequence[str]) -> None:
    """Raise ValueError if a gradient that is not sharded over ``axes`` lacks elements of this rank's shard."""
    spec = placement_spec(param)
    for dim in range(param.dim()):
        over = tuple(axis for axis in spec.dim_axes(dim) if axis in axes)
        if over and spec.dim_axes(dim)[-len(over) :] != over:
            raise ValueError(
                f"the gradient of {label(param)} ({spec}) is sharded over axes that come after {', '.join(over)} in its "
                f"spec, but is not sharded over {', '.join(over)}; redistribute the gradient"
            )


def _spans(param: DTensor, dim: int, length: int, without: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Return the spans of ``length`` elements that belong to this rank, ignoring the sharding over ``without``."""
    spec, mesh = placement_spec(param), param.device_mesh
    indices = dict(zip(mesh_axes(param), zip(mesh.shape, mesh.get_coordinate() or (), strict=True), strict=True))
    spans: tuple[tuple[int, int], ...] = ((0, length),)
    for axis in spec.dim_axes(dim):
        if axis not in without:
            spans = cut_spans(spans, *indices[axis], spec.block_sizes(axis))
    return spans


def _wrap_like(param: DTensor, local: Tensor) -> DTensor:
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


# Local parameters and gradients of a list, with a cache ---------------------------------------------------------------

# For a thousand small DTensors, looking up local parameters and gradients dominates the cost of the norm. The result is
# therefore cached on each DTensor. It is valid while its local tensor, layout, annotation and gradient layout are the same
# objects.


def of_each(
    params: Iterable[Tensor], topology: Topology
) -> tuple[list[Tensor], list[Tensor | None], list[Annotation | None]]:
    """Return the local parameter, the local gradient and the annotation of each parameter.

    Plain parameters are their own local parameters.

    Args:
        params: Parameters; some may be DTensors.
        topology: The mesh axes.
    Raises:
        ValueError: As in `local_parameter` and `local_gradient`.
    """
    local_params, gradients, annotations = list[Tensor](), list[Tensor | None](), list[Annotation | None]()
    for param in params:
        grad: Any = param.grad
        attributes = param.__dict__
        cached = attributes.get(SEEN)
        if cached is not None and grad is not None:
            piece, annotation, local, layout, declared, cached_topology, grad_layout = cached
            local_grad = grad._local_tensor
            if (
                type(local_grad) is Tensor
                and grad_layout is grad._spec
                and local is param._local_tensor  # type: ignore[attr-defined]
                and layout is param._spec  # type: ignore[attr-defined]
                and declared is attributes.get(ATTRIBUTE)
                and cached_topology is topology
            ):
                local_params.append(piece)
                gradients.append(local_grad)
                annotations.append(annotation)
                continue
        if isinstance(param, DTensor):
            piece = local_parameter(param, topology)
            local_params.append(piece)
            gradients.append(local_gradient(param, piece))
            annotations.append(annotation_of(piece))
            if isinstance(grad, DTensor) and grad.placements == param.placements:
                key = (param._local_tensor, param._spec, annotation_of(param), topology, grad._spec)
                setattr(param, SEEN, (piece, annotation_of(piece), *key))
        else:
            local_params.append(param)
            gradients.append(grad)
            annotations.append(annotation_of(param))
    return local_params, gradients, annotations
