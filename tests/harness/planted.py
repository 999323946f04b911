"""Models with given gradients in several layouts: the loss is the sum of <parameter, G>, so the gradient is G.

Ranks along data, pipeline and partial axes add different terms to a logical gradient, and so do micro-batches; see
`Layout.where`. `Dense` is one process that has all terms, in float64. All values are short binary fractions, which half
precision and a loss scale represent exactly.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from cases import slice_of
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import P, Topology, annotate
from meshstep.parallel.layout.shard import Region
from torch import Tensor, nn

SHAPES: dict[str, tuple[int, ...]] = {
    "up": (8, 4),
    "down": (4, 8),
    "bias": (8,),
    "table": (6, 4),
    "kernel": (4, 2, 3),
    "gain": (),
}
SIZES = {"up": 2.0, "down": 0.25, "bias": 1.0, "table": 0.5, "kernel": 0.125, "gain": 1.0}
GROUPS = (("up", "down"), ("bias", "table", "kernel", "gain"))

WHOLE = P()

Key = tuple[str, int]
"""A logical parameter: its name, and its stage if stages have different parameters of that name (else 0)."""


@dataclass(frozen=True)
class Layout:
    """A mesh, and the specs of the parameters on it (default: replicated)."""

    axes: tuple[tuple[str, int], ...]
    specs: dict[str, P] = field(default_factory=dict)

    @cached_property
    def topology(self) -> Topology:
        return Topology(roles=None, **dict(self.axes))

    def spec(self, name: str) -> P:
        return self.specs.get(name, WHOLE)

    def key(self, name: str, rank: int) -> Key:
        spec, topology = self.spec(name), self.topology
        own = [axis for axis in topology.pipe_axes if axis not in spec.named_axes]
        return name, sum(topology.coordinate_of(rank, axis) for axis in own)

    def holds(self, name: str, rank: int) -> bool:
        return self.spec(name).holds(self.topology.coordinate(rank), self.topology)

    def local(self, full: Tensor, name: str, rank: int) -> Tensor:
        return slice_of(full, self.spec(name), self.topology, rank)

    @property
    def keys(self) -> list[Key]:
        ranks = range(self.topology.world_size)
        return list(dict.fromkeys(self.key(name, rank) for name in SHAPES for rank in ranks if self.holds(name, rank)))

    def where(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the coordinates along which ranks contribute different terms."""
        spec, topology = self.spec(name), self.topology
        summed = {*topology.data_axes, *topology.pipe_axes, *spec.partial} - {*spec.sharded_axes}
        return tuple(topology.coordinate_of(rank, axis) for axis in topology.axes if axis in summed)

    def share(self, name: str, rank: int, step: int, micro: int = 0) -> Tensor:
        """Return the full-shape term that ``rank`` adds to the logical gradient. Must not be modified.

        Ranks with equal `where` add the same term.
        """
        return _share(name, self.where(name, rank), step, micro)

    def __reduce__(self) -> tuple[type[Layout], tuple[object, ...]]:
        """Pickle without the caches below."""
        return type(self), (self.axes, self.specs)

    def local_share(self, name: str, rank: int, step: int, micro: int) -> Tensor:
        """Return the shard of `share` that ``rank`` holds. Must not be modified."""
        at = name, rank, step, micro
        if at not in self._local_shares:
            self._local_shares[at] = self.local(self.share(name, rank, step, micro), name, rank)
        return self._local_shares[at]

    @cached_property
    def _local_shares(self) -> dict[tuple[str, int, int, int], Tensor]:
        """Cache of `local_share`: tests train many models on one layout."""
        return {}

    @cached_property
    def _gradients(self) -> dict[tuple[Key, int, int], Tensor]:
        """Cache of `gradient`: tests compare many optimizers with the same gradient."""
        return {}

    def gradient(self, key: Key, step: int, micros: int = 1) -> Tensor:
        """Return the gradient of the sum of all losses, over data ranks and micro-batches, in float64. Must not be
        modified.
        """
        if (key, step, micros) not in self._gradients:
            self._gradients[key, step, micros] = self._gradient(key, step, micros)
        return self._gradients[key, step, micros]

    def _gradient(self, key: Key, step: int, micros: int) -> Tensor:
        name, _ = key
        shares: dict[tuple[int, ...], Tensor] = {}
        for rank in range(self.topology.world_size):
            if self.holds(name, rank) and self.key(name, rank) == key:
                shares[self.where(name, rank)] = sum(
                    (self.share(name, rank, step, k) for k in range(micros)), torch.zeros(SHAPES[name])
                )
        return torch.stack(list(shares.values())).sum(0)


LAYOUTS = {
    "one rank": Layout(()),
    "tensor": Layout(
        (("tensor", 2),),
        {"up": P("tensor"), "down": P(None, "tensor"), "bias": P("tensor"), "kernel": P(None, "tensor", None)},
    ),
    "grid": Layout(
        (("row", 2), ("col", 2)),
        {
            "up": P("row", "col"),
            "down": P("col", "row"),
            "bias": P(("col", "row")),
            "table": P(None, "col", partial="row"),
            "kernel": P("col", None, None, owned={"row": 1}),
        },
    ),
    "data": Layout((("data", 2),)),
    "data x tensor": Layout(
        (("data", 2), ("tensor", 2)),
        {"up": P("tensor"), "down": P(None, "tensor"), "bias": P(partial="tensor"), "table": P(("tensor",))},
    ),
    "diagonal": Layout(
        (("input", 2), ("output", 2)),
        {
            "up": P("output", "input"),
            "down": P("input", "output"),
            "bias": P("input", partial="output"),
            "table": P(None, "output", owned={"input": "output"}),
            "kernel": P("input", owned={"output": "input"}),
        },
    ),
    "pipe, tied": Layout((("pipe", 2),), {"table": P(tied={"pipe": (0, -1)}), "gain": P(owned={"pipe": 1})}),
    "split over a pipeline": Layout((("pipe", 2),), {"up": P("pipe"), "down": P(None, "pipe"), "bias": P("pipe")}),
}


def fractions(seed: object, shape: tuple[int, ...], size: float = 1.0) -> Tensor:
    """Return random multiples of size / 16 between -4 * size and 4 * size, none of them 0, in float64."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
    values = torch.randint(1, 65, shape, generator=generator).double()
    return values * (torch.randint(2, shape, generator=generator) * 2 - 1) * (size / 16)


@lru_cache(maxsize=4096)
def _share(name: str, where: tuple[int, ...], step: int, micro: int) -> Tensor:
    smaller = 1.0 if step % 2 == 0 else 1 / 64
    return fractions((name, where, step, micro), SHAPES[name], SIZES[name] * smaller)


def start(key: Key) -> Tensor:
    return fractions(("start", key), SHAPES[key[0]], 0.5)


class Planted(nn.Module):
    def __init__(self, layout: Layout, rank: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layout, self.rank = layout, rank
        for name in SHAPES:
            if layout.holds(name, rank):
                local = layout.local(start(layout.key(name, rank)), name, rank).to(dtype)
                self.register_parameter(name, nn.Parameter(local))
                annotate(self.get_parameter(name), layout.spec(name), name, full_shape=SHAPES[name])

    def forward(self, step: int, micro: int = 0) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for name, param in self.named_parameters():
            share = self.layout.local_share(name, self.rank, step, micro)
            total = total + (param.to(share) * share).sum()
        return total

    def groups(self) -> list[dict[str, list[nn.Parameter]]]:
        held = dict(self.named_parameters())
        return [{"params": [held[name] for name in names if name in held]} for names in GROUPS]


def run_step(model: Planted, optimizer: ParallelOptimizer, step: int, micros: int = 1, weighted: bool = False) -> None:
    """Run forward and backward of a window, without the step; with ``weighted``, micro-batches have the weights of
    `weight_of`."""
    optimizer.zero_grad()
    topology = optimizer.registry.topology
    data = [optimizer.registry.coordinate[axis] for axis in topology.data_axes]
    for micro in range(micros):
        optimizer.backward(model(step, micro), weight=weight_of(sum(data), micro) if weighted else None)


def run_skipped_step(model: Planted, optimizer: ParallelOptimizer, step: int) -> None:
    """Run a complete step that all ranks skip, because the last rank's gradients are NaN."""
    run_step(model, optimizer, step)
    if optimizer.registry.global_rank == optimizer.registry.topology.world_size - 1:
        for tensor in (*model.parameters(), *(piece.tensor for piece in optimizer.stepped_tensors())):
            if tensor.grad is not None:
                tensor.grad.fill_(torch.nan)
    stats = optimizer.step()
    assert stats is not None
    assert float(stats.found_inf) == 1.0


def weight_of(data: int, micro: int) -> float:
    return (1 + 2 * data + micro) / 4


@dataclass
class Part:
    """A rank's shard of a logical parameter: its value and optimizer state."""

    key: Key
    region: Region | None
    value: Tensor
    state: dict[str, Tensor]

    def of(self, full: Tensor) -> Tensor:
        """Return the elements of this shard from a full tensor, flat."""
        assert self.region is not None
        return self.region.of(full).flatten()[self.region.start : self.region.stop]


def parts(layout: Layout, optimizer: ParallelOptimizer) -> list[Part]:
    """Return all shards that the optimizer updates on this rank."""
    rank = optimizer.registry.global_rank
    found = []
    for piece in optimizer.stepped_tensors():
        state = {k: v.detach().clone() for k, v in optimizer.state.get(piece.tensor, {}).items() if v is not None}
        key = layout.key(piece.name, rank)
        found.append(Part(key, piece.region, piece.tensor.detach().clone().flatten(), state))
    return found


Full = dict[Key, Tensor]
DenseRule = Callable[[Full, Full], Full]
"""A function from (gradients, weights) to clipped gradients."""


class Dense:
    """One process with the full model, in float64: SGD with momentum on the gradients that the clip rule returns."""

    def __init__(self, layout: Layout, lr: float = 0.25, momentum: float = 0.5) -> None:
        self.layout = layout
        self.weights: Full = {key: start(key) for key in layout.keys}
        self.lr, self.momentum = lr, momentum
        self.buffers: Full = {}

    def gradients(self, step: int, micros: int = 1, weighted: bool = False) -> Full:
        """Return the mean gradients over the window.

        With ``weighted``: the summed gradients divided by the window's total weight.
        """
        replicas = self.layout.topology.size(*self.layout.topology.data_axes)
        number: float = replicas * micros
        if weighted:
            number = sum(weight_of(data, micro) for data in range(replicas) for micro in range(micros))
        return {key: self.layout.gradient(key, step, micros) / number for key in self.weights}

    def step(self, gradients: Full) -> None:
        for key, gradient in gradients.items():
            before = self.buffers.get(key)
            self.buffers[key] = gradient if before is None else before * self.momentum + gradient
            self.weights[key] = self.weights[key] - self.lr * self.buffers[key]

    def in_groups(self, full: Full) -> Iterator[list[Key]]:
        """Yield the logical parameters of each param group."""
        for names in GROUPS:
            yield [key for key in full if key[0] in names]
