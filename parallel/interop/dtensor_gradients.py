"""The gradients of DTensor parameters, as gradients of their local tensors.

Backward's operations lay a gradient out as it comes, which need not be as the parameter is. Along one dim of the mesh:

    parameter   gradient    the local parameter's gradient
    any         the same    the local tensor
    Shard       Replicate   this rank's slice of it: torch leaves that of a vocabulary embedding whole
    Replicate   Partial     a pending sum, which the step makes together with all others
    Shard       Partial     this rank's slice of the sum, which is made here

Sums are collectives, in which a rank must take part that has no gradient. So ranks tell each other, in the first step, what
each has seen (`sums_seen`), and keep it (`settle`): from then on these gradients are summed in every step, as if that had
been declared. One that comes complete later is the whole sum on the first of the ranks, and zeros on the others.
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
    """Give ``piece`` the local tensor of the DTensor's gradient: its memory, unless ``piece.grad_dtype`` wants a cast.

    Args, raises, collectives: as for `local_gradient`.
    """
    local, wanted = local_gradient(param, piece, to_sum=to_sum), piece.grad_dtype
    piece.grad = local if local is None or wanted is None or wanted == local.dtype else local.to(wanted)


def local_gradient(param: DTensor, piece: nn.Parameter, *, to_sum: bool = False) -> Tensor | None:
    """The local tensor of the DTensor's gradient, its memory, which fits ``piece``, its local parameter.

    A gradient that is laid out otherwise than the parameter is replaced by one that is not.

    Args:
        to_sum: The caller is about to make in place the sums that the spec of ``piece`` says are pending. The DTensor's
            gradient is then called complete.
    Raises:
        ValueError: The gradient is laid out in a way of which nothing can be made here: it is a pending sum of which ranks
            don't know, or (``to_sum``) declared to be one and is none.
    Collectives: with ``to_sum``, an all-reduce for each axis over which a split parameter's gradient was settled to be a
        pending sum.
    """
    grad: Tensor | None = param.grad
    if not isinstance(grad, DTensor):
        if grad is not None:
            raise ValueError(
                f"the gradient of {label(param)} is a {type(grad).__name__}; give it a DTensor, as autograd does"
            )
        return _laid_out(param, piece, grad, to_sum) if to_sum else None
    if grad.placements != param.placements or (to_sum and (_pending(piece) or settled_sums(piece))):
        return _laid_out(param, piece, grad, to_sum)
    local = grad._local_tensor if type(grad._local_tensor) is Tensor else waited(grad._local_tensor)
    if to_sum:
        follow_version(grad, local)
    return local


def return_gradient(param: DTensor, piece: nn.Parameter) -> None:
    """Take the gradient from ``piece``, and give it to the DTensor if that has none."""
    if piece.grad is not None:
        if param.grad is None:
            param.grad = _like(param, piece.grad.to(param.dtype))
        piece.grad = None


def poison_gradient(param: DTensor, piece: nn.Parameter) -> None:
    """Put NaN in the place of a gradient of which `share_gradient` could make nothing, so that all ranks skip the step.

    Collectives: those of `share_gradient`.
    """
    if here := _summed_here(piece):
        _sum(torch.full_like(_zeros(param, here), torch.nan), param, here)
    piece.grad = torch.full_like(piece, torch.nan, dtype=piece.grad_dtype or piece.dtype)


# What ranks agree on -----------------------------------------------------------------------------------------------------


def sums_seen(params: Iterable[Tensor]) -> Sums:
    """Over which axes the gradients that DTensors have are pending sums, of which nothing was declared.

    Raises:
        ValueError: As `share_gradient`, had they been settled.
    """
    seen = {}
    for key, param in _keyed(params):
        if isinstance(grad := param.grad, DTensor):
            declared = {*_pending(local_parameter(param))} - {*settled_sums(local_parameter(param))}
            sums = [axis for axis, has, _ in _dims(param, grad) if _is_sum(has) and axis not in declared]
            for axis, has, wanted in _dims(param, grad):
                _check(param, axis, has, wanted, {*declared, *sums}, declared)
            _check_slice(
                param, [axis for axis, has, wanted in _dims(param, grad) if has != wanted and _is_split(wanted)]
            )
            seen[key] = tuple(sums)
    return seen


def settle(params: Iterable[Tensor], seen: Sequence[Sums]) -> bool:
    """Keep what ranks have seen; whether that is more than was known.

    Args:
        seen: What `sums_seen` gave on each rank.
    """
    more = False
    for key, param in _keyed(params):
        known = settled_sums(local_parameter(param))
        axes = {axis for sums in seen for axis in sums.get(key, ())}.difference(known)
        if axes:
            settle_sums(param, tuple(axis for axis in mesh_axes(param) if axis in {*known, *axes}))
            more = True
    return more


def _keyed(params: Iterable[Tensor]) -> Iterator[tuple[tuple[tuple[int, ...], int], DTensor]]:
    counts: dict[tuple[int, ...], int] = {}
    for param in params:
        if isinstance(param, DTensor):
            ranks = mesh_ranks(param)
            yield (ranks, counts.setdefault(ranks, 0)), param
            counts[ranks] += 1


# One gradient ------------------------------------------------------------------------------------------------------------


def _laid_out(param: DTensor, piece: nn.Parameter, grad: DTensor | None, to_sum: bool) -> Tensor | None:
    """The local tensor of the gradient, laid out as the parameter; sums that its spec says are pending still are."""
    pending, settled, here = {*_pending(piece)}, {*settled_sums(piece)}, _summed_here(piece)
    if grad is None:
        return _slice(_sum(_zeros(param, here), param, here), param, here) if here else None
    given = local = waited(grad._local_tensor)
    follow_version(grad, local)
    at = param.device_mesh.get_coordinate() or ()
    left, cut = False, []
    for index, (axis, has, wanted) in enumerate(_dims(param, grad)):
        _check(param, axis, has, wanted, pending | settled if to_sum else pending, pending - settled if to_sum else ())
        if has.is_partial("avg"):
            local = local / param.device_mesh.size(index)
        elif to_sum and axis in settled and not _is_sum(has) and at[index] > 0:
            local = torch.zeros_like(local)
        if axis in here and has == wanted:
            raise ValueError(_unlike(param, axis, has, wanted) + ": it was a pending sum in the first step")
        left |= _is_sum(has) and axis in pending and not to_sum
        cut += [axis] if has != wanted and _is_split(wanted) else []
    _check_slice(param, cut)
    if to_sum and here:
        local = _sum(local, param, here)
    if cut:
        local = _slice(local, param, cut)
    if not left and (local is not given or grad.placements != param.placements):
        param.grad = _like(param, local)
    return local


def _check(
    param: DTensor, axis: str, has: Placement, wanted: Placement, summed: Iterable[str], declared: Iterable[str]
) -> None:
    """Raise ValueError where nothing can be made of a gradient that is ``has`` over ``axis``.

    Args:
        summed: Over which axes it may be a sum.
        declared: Over which it must be one.
    """
    if _is_sum(has):
        if axis not in summed:
            hint = "redistribute it" if _is_split(wanted) else f"declare it P(partial={axis!r})"
            raise ValueError(f"{_unlike(param, axis, has, wanted)}: {hint}, or let ParallelOptimizer sum it")
    elif axis in declared:
        raise ValueError(
            f"{label(param)} is declared partial over {axis!r}, but its gradient is complete ({has!r}): it would be "
            f"summed twice; leave {axis!r} out of partial="
        )
    elif has != wanted and not (has.is_replicate() and _is_split(wanted)):
        raise ValueError(f"{_unlike(param, axis, has, wanted)}: redistribute it")


def _unlike(param: DTensor, axis: str, has: Placement, wanted: Placement) -> str:
    return f"the gradient of {label(param)} is {has!r} over {axis!r}, but the parameter is {wanted!r}"


def _dims(param: DTensor, grad: DTensor) -> Iterator[tuple[str, Placement, Placement]]:
    """Over each dim of the mesh, what the gradient is and what the parameter."""
    return zip(mesh_axes(param), grad.placements, param.placements, strict=True)


def _is_sum(placement: Placement) -> bool:
    return placement.is_partial("sum") or placement.is_partial("avg")


def _is_split(placement: Placement) -> bool:
    return not placement.is_replicate() and not placement.is_partial()


def _pending(piece: nn.Parameter) -> tuple[str, ...]:
    annotation = annotation_of(piece)
    return () if annotation is None else annotation.spec.partial


def _summed_here(piece: nn.Parameter) -> list[str]:
    """The axes over which its gradient is a pending sum, and which split the parameter: no spec can say both."""
    return [axis for axis in settled_sums(piece) if axis not in _pending(piece)]


def _sum(local: Tensor, param: DTensor, axes: Sequence[str]) -> Tensor:
    """The sum of ``local``, in place if that can be, over these dims of the mesh."""
    local = local.contiguous()
    for axis in axes:
        dist.all_reduce(local, group=param.device_mesh.get_group(axis))
    return local


def _zeros(param: DTensor, axes: Sequence[str]) -> Tensor:
    """What this rank would have of the parameter if it were not split over ``axes``, zeros."""
    shape = [sum(length for _, length in _spans(param, dim, length, axes)) for dim, length in enumerate(param.shape)]
    return torch.zeros(shape, dtype=param.grad_dtype or param.dtype, device=param.device)


def _slice(local: Tensor, param: DTensor, axes: Sequence[str]) -> Tensor:
    """This rank's part of ``local``, which is laid out as the parameter but for ``axes``, over which it is whole."""
    spec = placement_spec(param)
    for dim in range(param.dim()):
        rest = [axis for axis in spec.dim_axes(dim) if axis not in axes]
        if len(rest) < len(spec.dim_axes(dim)):
            parts = [local.narrow(dim, *span) for span in _spans(param, dim, local.shape[dim], rest)]
            local = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return local.clone() if local._is_view() else local  # or the whole of it would be kept


def _check_slice(param: DTensor, axes: Sequence[str]) -> None:
    """Raise ValueError where a gradient that is whole over ``axes`` has not all of this rank's part of the parameter."""
    spec = placement_spec(param)
    for dim in range(param.dim()):
        over = tuple(axis for axis in spec.dim_axes(dim) if axis in axes)
        if over and spec.dim_axes(dim)[-len(over) :] != over:
            raise ValueError(
                f"the gradient of {label(param)} ({spec}) is whole over {', '.join(over)}, but split over axes that the "
                "parameter is split over only after those: redistribute it"
            )


def _spans(param: DTensor, dim: int, length: int, without: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Which of ``length`` elements the axes that split a dim, but for some, leave to this rank."""
    spec, mesh = placement_spec(param), param.device_mesh
    at = dict(zip(mesh_axes(param), zip(mesh.shape, mesh.get_coordinate() or (), strict=True), strict=True))
    spans: tuple[tuple[int, int], ...] = ((0, length),)
    for axis in spec.dim_axes(dim):
        if axis not in without:
            spans = cut_spans(spans, *at[axis], spec.block_sizes(axis))
    return spans


def _like(param: DTensor, local: Tensor) -> DTensor:
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


# A list of parameters, some of them DTensors, and what is local of each, found quickly --------------------------------

# Most of what the norm of a thousand small DTensors costs is to look at each of them. So what was found of one is kept in
# one place, and taken from there while its tensor, layout and annotation, and the layout of its gradient, are the same
# objects.


def of_each(
    params: Iterable[Tensor], topology: Topology
) -> tuple[list[Tensor], list[Tensor | None], list[Annotation | None]]:
    """For each parameter it, or the local one of a DTensor; the local part of its gradient; its annotation.

    Raises:
        ValueError: As `local_parameter` and `local_gradient`.
    """
    local_params, gradients, annotations = list[Tensor](), list[Tensor | None](), list[Annotation | None]()
    for param in params:
        grad: Any = param.grad
        said = param.__dict__
        seen = said.get(SEEN)
        if seen is not None and grad is not None:
            piece, annotation, local, laid_out, declared, of, alike = seen
            part = grad._local_tensor
            if (
                type(part) is Tensor
                and alike is grad._spec
                and local is param._local_tensor  # type: ignore[attr-defined]
                and laid_out is param._spec  # type: ignore[attr-defined]
                and declared is said.get(ATTRIBUTE)
                and of is topology
            ):
                local_params.append(piece)
                gradients.append(part)
                annotations.append(annotation)
                continue
        if isinstance(param, DTensor):
            piece = local_parameter(param, topology)
            local_params.append(piece)
            gradients.append(local_gradient(param, piece))
            annotations.append(annotation_of(piece))
            if isinstance(grad, DTensor) and grad.placements == param.placements:
                known = (param._local_tensor, param._spec, annotation_of(param), topology, grad._spec)
                setattr(param, SEEN, (piece, annotation_of(piece), *known))
        else:
            local_params.append(param)
            gradients.append(grad)
            annotations.append(annotation_of(param))
    return local_params, gradients, annotations
