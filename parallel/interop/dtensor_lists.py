"""A list of parameters, some of them DTensors, and what is local of each, found quickly.

Most of what the norm of a thousand small DTensors costs is to look at each of them. So what was found of one is kept in one
place, and taken from there while its tensor, layout and annotation, and the layout of its gradient, are the same objects.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..layout.annotation import ATTRIBUTE, Annotation, annotation_of
from ..mesh.topology import Topology
from .dtensor import SEEN, local_parameter
from .dtensor_gradients import local_gradient


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
