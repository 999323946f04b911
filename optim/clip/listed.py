"""A list of parameters that was given to a function, and what is to be true of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...parallel.interop.local import local_gradients
from ...parallel.layout.annotation import Annotation
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..gradients.axes import sync_axes
from ..gradients.in_place import is_complete, mark_complete
from ..norm.entries import check_dense_real, check_unused, entries_of
from ..norm.plan import ReductionPlan

Params = Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
Pending = list[tuple[int, Annotation]]
NamedParam = tuple[str | None, Tensor]


def given_in(params: Params) -> list[NamedParam]:
    """(name, parameter), each parameter once."""
    check_unused(params)
    items: list[Any] = [params] if isinstance(params, Tensor) else list(params)
    if not any(issubclass(kind, tuple) for kind in {*map(type, items)}):
        return [(None, param) for param in {id(param): param for param in items}.values()]
    pairs = [item if isinstance(item, tuple) else (None, item) for item in items]
    return [*{id(param): (name, param) for name, param in pairs}.values()]


@dataclass
class Listed:
    """Parameters, each once: their names, themselves or the local ones of DTensors, their gradients and annotations."""

    names: list[str | None]
    params: list[Tensor]
    gradients: list[Tensor | None]
    annotations: list[Annotation | None]

    @classmethod
    def of(cls, given: Sequence[NamedParam], registry: ProcessGroupRegistry) -> Listed:
        """Raises ValueError: the layout of a DTensor or of its gradient is none that can be worked with."""
        return cls([name for name, _ in given], *local_gradients([param for _, param in given], registry.topology))

    @cached_property
    def pending(self) -> Pending:
        """The positions of those whose gradients may be sums that are still to be made."""
        return [
            (index, annotation)
            for index, annotation in enumerate(self.annotations)
            if annotation is not None and ((spec := annotation.spec).partial or spec.tied)
        ]

    def change(self, change: Callable[[list[Tensor | None]], None]) -> None:
        """Change the gradients in place; sums that have been made stay so."""
        complete = [
            (self.params[i], self.gradients[i])
            for i, _ in self.pending
            if is_complete(self.params[i], self.gradients[i])
        ]
        change(self.gradients)
        for param, gradient in complete:
            mark_complete(param, gradient)

    @property
    def sizes(self) -> list[int]:
        """Elements of each gradient; of the parameter where there is none."""
        return [
            (param if grad is None else grad).numel() for param, grad in zip(self.params, self.gradients, strict=True)
        ]

    def plan(self, registry: ProcessGroupRegistry) -> ReductionPlan:
        """As this rank sees it. Raises ValueError, TypeError: as `entries_of` and `ReductionPlan.of`."""
        named = [param if name is None else (name, param) for name, param in zip(self.names, self.params, strict=True)]
        return ReductionPlan.of(entries_of([named], registry.topology), registry.topology, registry.global_rank)


def check_gradients(listed: Listed, registry: ProcessGroupRegistry) -> None:
    """Raise TypeError for a gradient that is sparse or complex, and ValueError for one that is still a pending sum."""
    gradients = [gradient for gradient in listed.gradients if gradient is not None]
    dense = {gradient.layout for gradient in gradients} <= {torch.strided}
    if not dense or any(dtype.is_complex for dtype in {gradient.dtype for gradient in gradients}):
        for index, gradient in enumerate(listed.gradients):
            if gradient is not None:
                check_dense_real(gradient, f"the gradient of {_name(listed, index)}")
    for index, annotation in listed.pending:
        if not is_complete(listed.params[index], listed.gradients[index]):
            over = sync_axes(annotation.spec_on(registry.topology), registry.topology, average_data=False)
            if registry.topology.size(*over) > 1:
                raise ValueError(
                    f"the gradient of {_name(listed, index)} ({annotation.spec}) is still a pending sum over "
                    f"{', '.join(over)}: call sync_gradients(params, registry) after the last backward, or use "
                    "ParallelOptimizer, which does"
                )


def _name(listed: Listed, index: int) -> str:
    annotation = listed.annotations[index]
    return listed.names[index] or (annotation.name if annotation else None) or f"parameter {index}"
