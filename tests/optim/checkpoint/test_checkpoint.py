"""Resuming training from a checkpoint: bitwise identical on the same mesh, close on another mesh."""

from __future__ import annotations

import tempfile
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from arguments import arguments
from cases import axes_of, slice_of
from hypothesis import given
from hypothesis import strategies as st
from layouts import Axes, Run
from meshstep.optim import ParallelOptimizer, load_checkpoint, save_checkpoint
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, blocks
from meshstep.parallel.layout.shard import Region, boxes_of_run
from meshstep.testing.strategies import AXES, specs, topologies
from properties import WITHOUT_SHRINKING, random_cases
from scenarios import SCENARIOS, backward, batch, build
from torch import Tensor, nn
from world import World

# Regions of full tensors ----------------------------------------------------------------------------------------------


@given(shape=st.lists(st.integers(0, 4), max_size=4), data=st.data())
def test_boxes_of_flattened_range_cover_its_elements_in_order(shape: list[int], data: st.DataObject) -> None:
    numel = prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    index, found = torch.arange(numel).view(shape), []
    for box in boxes_of_run(shape, start, stop):
        part = index[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        found += part.flatten().tolist()
    assert found == list(range(start, stop))
    assert len(list(boxes_of_run(shape, start, stop))) <= max(1, 2 * len(shape) - 1)


@st.composite
def regions(draw: st.DrawFn, full: list[int]) -> Region:
    """Draw a range of the flattened elements of a rectangular shard. ``full`` is the shape of the full tensor."""
    offsets = [draw(st.integers(0, length)) for length in full]
    shape = [draw(st.integers(0, length - offset)) for length, offset in zip(full, offsets, strict=True)]
    start = draw(st.integers(0, prod(shape)))
    stop = draw(st.integers(start, prod(shape)))
    spans = tuple(((offset, length),) for offset, length in zip(offsets, shape, strict=True))
    return Region(tuple(full), spans, start, stop)


@given(full=st.lists(st.integers(0, 4), max_size=3), data=st.data())
def test_regions_overlap_exactly_if_they_share_an_element(full: list[int], data: st.DataObject) -> None:
    index = torch.arange(prod(full)).view(full)
    one, other = (data.draw(regions(full)) for _ in range(2))
    elements = [set(region.of(index).flatten()[region.start : region.stop].tolist()) for region in (one, other)]
    assert one.overlaps(other) == (not elements[0].isdisjoint(elements[1]))


# Other layouts ---------------------------------------------------------------------------------------------------------


def train_and_save(path: Path, axes: Axes, precision: str, options: dict[str, Any]) -> tuple[list[float], list[Tensor]]:
    """Save after 10 steps and train to step 20. Return the losses after the checkpoint and the parameters."""
    run = Run(axes, precision, **options)
    losses = []
    for step in range(20):
        losses.append(run.step(step))
        if step == 9:
            save_checkpoint(path, run.model, run.optimizer, lr_scheduler=run.schedule, extra={"step": 10})
    run.registry.close()
    return losses[10:], [param.detach() for param in run.model.parameters()]


def resume(path: Path, axes: Axes, precision: str, options: dict[str, Any]) -> tuple[list[float], list[Tensor]]:
    run = Run(axes, precision, seed=6, **options)
    extra = load_checkpoint(path, run.model, run.optimizer, lr_scheduler=run.schedule)
    losses = [run.step(step) for step in range(extra["step"], 20)]
    run.registry.close()
    return losses, [param.detach() for param in run.model.parameters()]


def ranks(axes: Axes) -> int:
    return prod(size for _, size in axes)


def mean_losses(results: list[tuple[list[float], list[Tensor]]]) -> list[float]:
    return [sum(losses) / len(results) for losses in zip(*(losses for losses, _ in results), strict=True)]


ONE, DATA, DATA4 = (), (("data", 2),), (("data", 4),)
TENSOR, BOTH, GRID = (("tensor", 2),), (("data", 2), ("tensor", 2)), (("row", 2), ("col", 2))
ZERO1, ZERO2 = {"shard_states": "data"}, {"shard_states": "data", "shard_gradients": True}


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16_naive"])
def test_tensor_parallel_checkpoint_resumes_on_other_layouts(world: World, tmp_path: Path, precision: str) -> None:
    results = world.run(2, train_and_save, tmp_path, TENSOR, precision, {})
    losses = mean_losses(results)
    assert len(set(losses)) == 10
    for axes in (TENSOR, GRID, ONE, BOTH):
        continued = world.run(ranks(axes), resume, tmp_path, axes, precision, {})
        split = axes == BOTH and precision != "fp32"  # half-precision gradients of half batches round differently
        assert mean_losses(continued) == pytest.approx(losses, rel=1e-2 if split else 5e-5)
        if axes == TENSOR:
            for (_, found), (_, expected) in zip(continued, results, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_zero1_checkpoint_resumes_on_same_and_other_meshes(world: World, tmp_path: Path, precision: str) -> None:
    results = world.run(2, train_and_save, tmp_path, DATA, precision, ZERO1)
    losses = mean_losses(results)
    for axes, options in ((DATA, ZERO1), (DATA, {}), (DATA, ZERO2), (DATA4, ZERO2), (ONE, {}), (BOTH, ZERO1)):
        continued = world.run(ranks(axes), resume, tmp_path, axes, precision, options)
        assert mean_losses(continued) == pytest.approx(losses, rel=5e-5 if precision == "fp32" else 1e-2)
        if axes == DATA and options == ZERO1:
            for (_, found), (_, expected) in zip(continued, results, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_losses_differ_when_optimizer_state_is_not_restored(tmp_path: Path) -> None:
    losses, _ = train_and_save(tmp_path, ONE, "fp32", {})
    run = Run(ONE, "fp32", seed=6)
    load_checkpoint(tmp_path, run.model, run.optimizer, lr_scheduler=run.schedule)
    run.optimizer.state.clear()
    assert [run.step(step) for step in range(10, 20)] != pytest.approx(losses, rel=1e-3)


# Any layout to any other layout: shards of known tensors, saved and loaded --------------------------------------------


Specs = tuple[P, ...]
SHAPES = ((12, 24), (12, 12, 12), (12,), (), (0, 12))


def known(index: int) -> Tensor:
    return torch.arange(prod(SHAPES[index]), dtype=torch.float32).view(SHAPES[index]) + 1000 * index


class Pieces(nn.Module):
    def __init__(self, specs: Specs, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        topology, rank = registry.topology, registry.global_rank
        for index, spec in enumerate(specs):
            if spec.holds(registry.coordinate, topology):
                param = nn.Parameter(slice_of(known(index), spec, topology, rank))
                annotate(param, spec, f"p{index}")
                self.register_parameter(f"p{index}", param)


def state_of(piece: Tensor, param: Tensor, offset: int) -> dict[str, Tensor]:
    part = param.detach().reshape(-1)[offset : offset + piece.numel()].view(piece.shape)
    return {"exp_avg": part * 2, "exp_avg_sq": part * 3, "step": torch.tensor(7.0)}


def build_pieces(axes: Axes, specs: Specs, zero: str | None) -> tuple[Pieces, ParallelOptimizer]:
    registry = ProcessGroupRegistry(Topology(roles=None, **dict(axes)))
    model = Pieces(specs, registry)
    params: Any = list(model.parameters()) or [{"params": []}]
    optimizer = ParallelOptimizer(torch.optim.Adam(params, lr=0.5), registry, **arguments(shard_states=zero))
    return model, optimizer


def save_pieces(path: Path, axes: Axes, specs: Specs, zero: str | None) -> None:
    model, optimizer = build_pieces(axes, specs, zero)
    for piece in optimizer.stepped_tensors():
        optimizer.state[piece.tensor] = state_of(piece.tensor, piece.param, piece.offset)
    save_checkpoint(path, model, optimizer)
    optimizer.registry.close()


def load_pieces(path: Path, axes: Axes, specs: Specs, zero: str | None) -> None:
    model, optimizer = build_pieces(axes, specs, zero)
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(-1)
    load_checkpoint(path, model, optimizer)
    for name, param in model.named_parameters():
        assert torch.equal(param, expected[name]), name
    for piece in optimizer.stepped_tensors():
        wanted = state_of(piece.tensor, piece.param, piece.offset)
        found = optimizer.state[piece.tensor]
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], value) for key, value in wanted.items()), piece.name
    optimizer.registry.close()


Layout = tuple[Axes, Specs, "str | None"]


@st.composite
def in_blocks(draw: st.DrawFn, spec: P, shape: tuple[int, ...], axes: Axes) -> P:
    """Return ``spec`` with some dims sharded in blocks: dims that one axis shards and whose length the blocks divide."""
    entries = []
    for dim, length in enumerate(shape):
        over = spec.dim_axes(dim)
        size = prod(dict(axes)[axis] for axis in over)
        fit = [ratio for ratio in ((1, 1), (1, 1, 1), (2, 1, 1), (1, 2)) if length % (size * sum(ratio)) == 0]
        entries.append(
            blocks(over, draw(st.sampled_from(fit))) if len(over) == 1 and fit and draw(st.booleans()) else over
        )
    return P(*entries, partial=spec.partial, owned=dict(spec.owned), tied=dict(spec.tied))


@st.composite
def any_layouts(draw: st.DrawFn) -> Layout:
    topology = draw(topologies(4, axes=[axis for axis in AXES if axis != "pipe"]))
    axes = axes_of(topology)
    zero = draw(st.sampled_from([None, *(axis for axis, _ in axes)]))
    drawn = (draw(in_blocks(draw(specs(topology, shape, uneven=True)), shape, axes)) for shape in SHAPES)
    return axes, tuple(drawn), zero


@random_cases(st.tuples(any_layouts(), any_layouts()), 20, phases=WITHOUT_SHRINKING)  # shrinking would take minutes
def test_checkpoint_of_random_layout_loads_into_another_random_layout(
    world: World, drawn: list[tuple[Layout, Layout]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(index) for index in range(len(drawn))]
        for which, function in enumerate((save_pieces, load_pieces)):
            layouts = [pair[which] for pair in drawn]
            world.run_each(function, [(ranks(one[0]), (path, *one)) for path, one in zip(paths, layouts, strict=True)])


# Scenarios of the step tests: owner-only and tied parameters, pipeline stages, stages without parameters --------------


def interrupted(path: Path, name: str, options: dict[str, Any]) -> None:
    """Run six steps, then repeat the last three from a checkpoint; the parameters must be bitwise identical."""
    scenario = SCENARIOS[name]
    runs = []
    for resumed in (False, True):
        registry = ProcessGroupRegistry(scenario.topology)
        model = build(scenario, registry, torch.float32)
        params: Any = list(model.parameters()) if model is not None else [{"params": []}]
        optimizer = ParallelOptimizer(
            torch.optim.AdamW(params, lr=1e-2, fused=True), registry, **arguments(max_norm=0.5, **options)
        )
        saved = nn.Module() if model is None else model
        if resumed:
            load_checkpoint(path, saved, optimizer)
        for step in range(3 if resumed else 0, 6):
            optimizer.zero_grad()
            backward(scenario, model, optimizer, batch(step))
            optimizer.step()
            if step == 2 and not resumed:
                save_checkpoint(path, saved, optimizer)
        runs.append(list(saved.parameters()))
        registry.close()
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grid, bias on row 0", {"shard_states": "row"}),
        ("data x pipe, tied", ZERO2),
        ("a stage without parameters", {}),
        ("pipe, tied", {"precision": "fp32", "offload": 0.5}),
    ],
)
def test_run_resumed_on_same_layout_is_bitwise_identical(
    world: World, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    world.run(SCENARIOS[name].topology.world_size, interrupted, tmp_path, name, options)
