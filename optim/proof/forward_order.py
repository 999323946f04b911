"""The order in which modules run, and where in it ranks begin to differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...parallel.interop.local_parameters import local_tensor
from ...parallel.mesh.agreement import gather_objects
from ...parallel.mesh.registry import ProcessGroupRegistry
from .measured import KnownParameter, bits_of


class Site(NamedTuple):
    """The first tensor that goes into a module, or comes out of it."""

    module: str
    side: str

    def __str__(self) -> str:
        return f"the {self.side} of {self.module}"


class Recorded:
    """What happens in one forward on this rank: sites in order, and a hash of what was there."""

    def __init__(self, model: nn.Module) -> None:
        self.hashes: dict[Site, tuple[tuple[int, ...], int] | None] = {}
        self._model = model

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """While the model runs."""
        handles: list[Any] = []
        for name, module in self._model.named_modules():
            if name:
                handles.append(module.register_forward_pre_hook(self._before(Site(name, "input"))))
                handles.append(module.register_forward_hook(self._after(Site(name, "output"))))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, site: Site) -> Any:
        return lambda _, inputs: self._record(site, inputs)

    def _after(self, site: Site) -> Any:
        return lambda _, inputs, output: self._record(site, output)

    def _record(self, site: Site, values: Any) -> None:
        value = first_tensor(values)
        hashed = None
        if value is not None and not value.is_complex():
            value = local_tensor(value)
            hashed = tuple(value.shape), bits_of(value)
        self.hashes[site] = hashed  # of the last call


def first_tensor(values: Any) -> Tensor | None:
    """Of what a module was given, or returned."""
    while isinstance(values, tuple | list) and values:
        values = values[0]
    return values if isinstance(values, Tensor) else None


class ForwardOrder:
    """Of all ranks. Collectives: an object all-gather over the world."""

    def __init__(self, mine: Recorded, known: Iterable[KnownParameter], registry: ProcessGroupRegistry) -> None:
        self._hashes = gather_objects(mine.hashes, registry)
        self._topology = registry.topology
        self._known = list(known)
        self._at = {known.label: self._position(known) for known in self._known}

    def _position(self, known: KnownParameter) -> int:
        """Of the input of its module; of the one that has it, where that is not called itself; -1: of none."""
        order = list(self._hashes[min(known.seen)])
        module = known.module
        while module:
            if Site(module, "input") in order:
                return order.index(Site(module, "input"))
            module = module.rpartition(".")[0]
        return -1

    def sorted(self) -> list[KnownParameter]:
        """Parameters by when their module is entered, stage by stage."""
        by_stage = bool(self._topology.pipe_axes)
        return sorted(self._known, key=lambda known: (min(known.seen) if by_stage else 0, self._at[known.label]))

    def until_right(self, last: KnownParameter, wrong: Sequence[KnownParameter]) -> list[Site]:
        """The sites up to the end of the first module after that of ``last`` whose parameters are right."""
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

    def before_unequal(self, axis: str, until: Site | None) -> tuple[Site | None, list[str]]:
        """Where ranks along ``axis`` begin to differ.

        Args:
            until: Where it was found that they do, and should not; None: in their losses.
        Returns:
            The last site before at which they had the same, and the modules with parameters that ran from there.
        """
        groups = list(self._topology.groups(axis))
        order = list(self._hashes[groups[0][0]])
        end = len(order) if until is None else order.index(until)
        told = [index for index in range(end) if self._hashes[groups[0][0]][order[index]] is not None]
        equal = (index for index in told if all(self._equal(order[index], ranks) for ranks in groups))
        last = max(equal, default=-1)
        owners = {known.module for known in self._known}
        inside = (site.module for site in order[last + 1 : end + 1] if site.side == "output" and site.module in owners)
        return (order[last] if last >= 0 else None), list(inside)

    def _equal(self, site: Site, ranks: Sequence[int]) -> bool:
        return len({self._hashes[rank].get(site) for rank in ranks}) == 1
