"""Checks that every optimizer with full-tensor updates must pass inside a `ParallelOptimizer`; run on ranks."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import axes_of, slice_of
from hypothesis import strategies as st
from meshstep.optim import ParallelOptimizer, load_checkpoint, save_checkpoint
from meshstep.parallel import P, ProcessGroupRegistry, Topology
from meshstep.parallel.layout.shard import Region
from meshstep.testing.strategies import Kind, specs, topologies
from planted import SHAPES, Layout, Part, Planted, parts, run_step
from probes import collectives, no_host_reads
from whole_runs import STATES, ExactMeans, Make
from zero_models import small_buckets

Options = dict[str, Any]


def each_trained(
    layout: Layout, makes: list[Make], options: Options, steps: int = 10, bucket: int | None = 64
) -> list[list[Part]]:
    """Train a model with each optimizer in the same process groups, and return the resulting shards per optimizer.

    ``bucket`` is the size of the buckets of `Sharded` in bytes. None: the default size of the library.
    """
    found = []
    buckets = nullcontext() if bucket is None else small_buckets(bucket)
    with ProcessGroupRegistry(layout.topology) as registry, buckets:
        for make in makes:
            model = Planted(layout, registry.global_rank, torch.float64)
            optimizer = ParallelOptimizer(make(model.named_parameters()), registry, **options)
            for step in range(steps):
                run_step(model, optimizer, step)
                optimizer.step()
            found.append(parts(layout, optimizer))
    return found


def beyond_sgd(layout: Layout, makes: list[Make], options: Options) -> list[Counter[str]]:
    """Return for each optimizer how many more collectives of each kind a step issues than a step of SGD with the same
    options."""
    sgd: Make = partial(torch.optim.SGD, lr=0.1, fused=True)
    counts: list[Counter[str]] = []
    with ProcessGroupRegistry(layout.topology) as registry, small_buckets(64):
        for make in [sgd, *makes]:
            model = Planted(layout, registry.global_rank)
            optimizer = ParallelOptimizer(make(model.named_parameters()), registry, max_norm=1.0, **options)
            for step in range(3):
                run_step(model, optimizer, step)
                with collectives() as seen:
                    optimizer.step()
            counts.append(seen)
    return [count - counts[0] for count in counts[1:]]


def without_host_reads(layout: Layout, makes: list[Make], options: Options) -> None:
    """Raise an error if the third step reads a value on the host."""
    with ProcessGroupRegistry(layout.topology) as registry:
        for make in makes:
            model = Planted(layout, registry.global_rank)
            optimizer = ParallelOptimizer(make(model.named_parameters()), registry, max_norm=1.0, **options)
            for step in range(2):
                run_step(model, optimizer, step)
                optimizer.step()
            run_step(model, optimizer, 2)
            with no_host_reads():
                optimizer.step()


def changed_by_overflow(layout: Layout, makes: list[Make], dtype: torch.dtype, options: Options) -> list[list[str]]:
    """Return for each optimizer the tensors that changed on this rank in a step with an infinite loss on rank 1 only."""
    with ProcessGroupRegistry(layout.topology) as registry:
        return [_changed_by_overflow(layout, make, dtype, options, registry) for make in makes]


def _changed_by_overflow(
    layout: Layout, make: Make, dtype: torch.dtype, options: Options, registry: ProcessGroupRegistry
) -> list[str]:
    model = Planted(layout, registry.global_rank, dtype)
    if "precision" in options:
        options["precision"].prepare(model, registry)
    optimizer = ParallelOptimizer(make(model.named_parameters()), registry, max_norm=1.0, **options)
    for step in range(2):
        run_step(model, optimizer, step)
        optimizer.step()
    before = parts(layout, optimizer)
    optimizer.zero_grad()
    optimizer.backward(model(2) * (torch.inf if registry.global_rank == 1 else 1.0))
    stats = optimizer.step()
    assert stats is not None
    assert bool(stats.skipped)
    pairs = list(zip(before, parts(layout, optimizer), strict=True))
    changed = [str(one.key) for one, other in pairs if not torch.equal(one.value, other.value)]
    return changed + [
        f"{key} of {one.key}"
        for one, other in pairs
        for key in one.state
        if not torch.equal(one.state[key], other.state[key])
    ]


def in_mode(layout: Layout, makes: list[Make], options: Options, micros: int = 1) -> list[list[Part]]:
    """Train each optimizer with master weights, and optionally a loss scale and accumulation; return the resulting
    shards."""
    found = []
    with ProcessGroupRegistry(layout.topology) as registry, small_buckets(64):
        for make in makes:
            model = Planted(layout, registry.global_rank)
            options["precision"].prepare(model, registry)
            optimizer = ParallelOptimizer(make(model.named_parameters()), registry, **options)
            for step in range(5):
                run_step(model, optimizer, step, micros)
                optimizer.step()
            found.append(parts(layout, optimizer))
    return found


def run_to(layout: Layout, make: Make, folder: Path, steps: range, load: bool, options: Options) -> list[Part]:
    """Run some steps. With ``load``, load a checkpoint before them; else save one after them. Return this rank's
    shards."""
    with ProcessGroupRegistry(layout.topology) as registry, small_buckets(64):
        model = Planted(layout, registry.global_rank, torch.float64)
        optimizer = ParallelOptimizer(make(model.named_parameters()), registry, **options)
        if load:
            load_checkpoint(folder, model, optimizer)
        for step in steps:
            run_step(model, optimizer, step)
            optimizer.step()
        if not load:
            save_checkpoint(folder, model, optimizer)
        return parts(layout, optimizer)


@st.composite
def random_layouts(draw: st.DrawFn) -> tuple[Layout, str]:
    """Draw a random layout of the planted parameters, and one of `STATES` that is valid for it."""
    topology = draw(topologies(4, axes=("data", "row", "col", "pipe", "expert"), most_axes=3))
    among: list[tuple[Kind, ...]] = [("sharded",), ("sharded", "owned", "tied"), ("sharded", "partial", "diagonal")]
    kinds = draw(st.sampled_from(among))
    said = {name: draw(specs(topology, shape, kinds, uneven=True)) for name, shape in SHAPES.items()}
    said = {name: spec for name, spec in said.items() if _is_cut_as_said(SHAPES[name], spec, topology)}
    state = draw(st.sampled_from(list(STATES))) if "data" in topology.axes else "whole"
    return ExactMeans(axes_of(topology), said), state


def _is_cut_as_said(shape: tuple[int, ...], spec: P, topology: Topology) -> bool:
    """Return whether `slice_of` splits the parameter as a layer would, one axis after the other.

    `slice_of` splits a dim over all its axes at once, which differs if they do not divide the dim. Also return False if
    pipeline stages would add different terms to a shared shard.
    """
    if any(axis in topology.pipe_axes and isinstance(at, str) for axis, at in spec.owned):
        return False
    try:
        for rank in range(topology.world_size):
            cut = slice_of(torch.empty(shape), spec, topology, rank)
            Region.of_shard(shape, cut.shape, spec, topology, topology.coordinate(rank))
    except ValueError:
        return False
    return True
