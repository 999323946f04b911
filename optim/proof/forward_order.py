"""The order in which modules run, and the first tensor in that order that differs between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...parallel.interop.local_parameters import local_tensor
from ...parallel.mesh.agreement import gather_objects
from ...parallel.mesh.registry import ProcessGroupRegistry
from .measured import KnownParameter, bits_of


class HookPoint(NamedTuple):
    """The first tensor that a module receives (side "input") or returns (side "output")."""

    module: str
    side: str

    def __str__(self) -> str:
        return f"the {self.side} of {self.module}"


class ForwardRecord:
    """The hook points of one forward on this rank, in order, each with a hash of its tensor."""

    def __init__(self, model: nn.Module) -> None:
        self.hashes: dict[HookPoint, tuple[tuple[int, ...], int] | None] = {}
        self._model = model

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the hook points of a forward that runs inside the context."""
        handles: list[Any] = []
        for name, module in self._model.named_modules():
            if name:
                handles.append(module.register_forward_pre_hook(self._before(HookPoint(name, "input"))))
                handles.append(module.register_forward_hook(self._after(HookPoint(name, "output"))))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, site: HookPoint) -> Any:
        return lambda _, inputs: self._record(site, inputs)

    def _after(self, site: HookPoint) -> Any:
        return lambda _, inputs, output: self._record(site, output)

    def _record(self, site: HookPoint, values: Any) -> None:
        value = first_tensor(values)
        hashed = None
        if value is not None and not value.is_complex():
            value = local_tensor(value)
            hashed = tuple(value.shape), bits_of(value)
        self.hashes[site] = hashed  # a repeated call overwrites the hash


def first_tensor(values: Any) -> Tensor | None:
    """Return the first tensor of a module's arguments or results; None if there is none."""
    while isinstance(values, tuple | list) and values:
        values = values[0]
    return values if isinstance(values, Tensor) else None


class ForwardOrder:
    """The forward records of all ranks.

    Collectives: an object all-gather over the world.
    """

    def __init__(self, mine: ForwardRecord, known: Iterable[KnownParameter], registry: ProcessGroupRegistry) -> None:
        self._hashes = gather_objects(mine.hashes, registry)
        self._topology = registry.topology
        self._known = list(known)
        self._at = {known.label: self._position(known) for known in self._known}

    def _position(self, known: KnownParameter) -> int:
        """Return the index of the module's input, or of the closest enclosing module that is called.

        Returns -1 if there is none.
        """
        order = list(self._hashes[min(known.seen)])
        module = known.module
        while module:
            if HookPoint(module, "input") in order:
                return order.index(HookPoint(module, "input"))
            module = module.rpartition(".")[0]
        return -1

    def sorted(self) -> list[KnownParameter]:
        """Return the parameters in the order in which their modules are entered, stage by stage."""
        by_stage = bool(self._topology.pipe_axes)
        return sorted(self._known, key=lambda known: (min(known.seen) if by_stage else 0, self._at[known.label]))

    def until_right(self, last: KnownParameter, wrong: Sequence[KnownParameter]) -> list[HookPoint]:
        """Return the hook points up to the end of the first module after ``last`` whose parameters are right."""
        rank, labels = min(last.seen), {known.label for known in wrong}
        order = list(self._hashes[rank])
        later = [
            self._at[known.label]
            for known in self._known
            if rank in known.seen and known.label not in labels and self._at[known.label] > self._at[last.label]
        ]
        if not later:
            return order
        module = order[min(later)].module
        return order[: max(index for index, site in enumerate(order) if site.module == module) + 1]

    def before_unequal(self, axis: str, until: HookPoint | None) -> tuple[HookPoint | None, list[str]]:
        """Find the last tensor that is equal on all ranks along ``axis``.

        Args:
            axis: The axis along which the ranks differ.
            until: A later hook point that differs and must not; None: the loss.
        Returns:
            The last hook point with equal tensors (None if there is none), and the modules with parameters that ran
                after it.
        """
        groups = list(self._topology.groups(axis))
        order = list(self._hashes[groups[0][0]])
        end = len(order) if until is None else order.index(until)
        recorded = [index for index in range(end) if self._hashes[groups[0][0]][order[index]] is not None]
        equal = (index for index in recorded if all(self._equal(order[index], ranks) for ranks in groups))
        last = max(equal, default=-1)
        owners = {known.module for known in self._known}
        inside = (site.module for site in order[last + 1 : end + 1] if site.side == "output" and site.module in owners)
        return (order[last] if last >= 0 else None), list(inside)

    def _equal(self, site: HookPoint, ranks: Sequence[int]) -> bool:
        return len({self._hashes[rank].get(site) for rank in ranks}) == 1
