"""Layers of this library under torch.compile, compared with the uncompiled layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from meshstep.parallel import (
    ColumnParallelLinear,
    Embedding2D,
    LayerNorm1D,
    LayerNorm2D,
    Linear2D,
    Linear3D,
    ProcessGroupRegistry,
    RowParallelLinear,
    Topology,
    VocabParallelEmbedding,
)
from properties import is_full
from torch import Tensor, nn
from world import World

WIDTH = 8
ONE_D, TWO_D, THREE_D = Topology(data=2, tensor=2), Topology(row=2, col=2), Topology(input=2, weight=2, output=1)


def column_and_row(registry: ProcessGroupRegistry) -> nn.Module:
    return nn.Sequential(ColumnParallelLinear(WIDTH, 16, registry), nn.GELU(), RowParallelLinear(16, WIDTH, registry))


def sequence_parallel(registry: ProcessGroupRegistry) -> nn.Module:
    up = ColumnParallelLinear(WIDTH, 16, registry, sequence_parallel=True)
    down = RowParallelLinear(16, WIDTH, registry, sequence_parallel=True)
    return nn.Sequential(LayerNorm1D(WIDTH, sequence_parallel=True), up, nn.GELU(), down)


LAYERS: dict[str, tuple[Topology, Callable[[ProcessGroupRegistry], nn.Module], tuple[int, ...] | None]] = {
    "column and row": (ONE_D, column_and_row, (4, 2, WIDTH)),
    "sequence parallel": (ONE_D, sequence_parallel, (4, 2, WIDTH)),
    "vocabulary": (ONE_D, lambda registry: VocabParallelEmbedding(12, WIDTH, registry), None),
    "Linear2D": (TWO_D, lambda registry: Linear2D(WIDTH, WIDTH, registry), (4, 3, WIDTH // 2)),
    "LayerNorm2D": (TWO_D, lambda registry: LayerNorm2D(WIDTH, registry), (4, 3, WIDTH // 2)),
    "Embedding2D": (TWO_D, lambda registry: Embedding2D(12, WIDTH, registry), None),
    "Linear3D": (THREE_D, lambda registry: Linear3D(WIDTH, WIDTH, registry), (4, WIDTH)),
}
# Compiling takes most of the time. So in a shorter run, the first and the last rank compile, whose coordinates differ on
# each axis. The other ranks run the uncompiled layer, whose collectives must match those of the compiled one.
EVERY_RANK = range(4)
COMPILED = EVERY_RANK if is_full() else (0, 3)
IN_ONE_GRAPH = ("column and row", "sequence parallel", "vocabulary", "Embedding2D")


def differences(name: str, backend: str, fullgraph: bool, ranks: Sequence[int]) -> list[float]:
    """Compare outputs and gradients of a layer with and without torch.compile, in new process groups.

    Return the largest difference per tensor. Only ``ranks`` compile the layer.
    """
    import torch._dynamo

    torch._dynamo.reset()
    topology, make, shape = LAYERS[name]
    with ProcessGroupRegistry(topology) as registry:
        torch.manual_seed(0)
        layer = make(registry)
        given = torch.arange(6)[None] if shape is None else torch.randn(shape)
        compiled: Any = layer
        if registry.global_rank in ranks:
            compiled = torch.compile(layer, backend=backend, fullgraph=fullgraph)
        found: list[list[Tensor]] = []
        for call in (compiled, layer):
            out: Tensor = call(given)
            out.square().sum().backward()
            found.append([out.detach(), *(param.grad for param in layer.parameters() if param.grad is not None)])
            layer.zero_grad()
        ours, wanted = found
        assert len(ours) == len(wanted) > 1
        return [float((one - other).abs().max()) for one, other in zip(ours, wanted, strict=True)]


@pytest.mark.default_cases(4)
@pytest.mark.parametrize(
    "name", [pytest.param("Linear3D", marks=pytest.mark.long), *(name for name in LAYERS if name != "Linear3D")]
)
def test_layer_compiled_with_eager_backend_has_unchanged_outputs_and_gradients(world: World, name: str) -> None:
    for found in world.run(4, differences, name, "eager", False, COMPILED):
        assert max(found) == 0.0


@pytest.mark.long
@pytest.mark.default_cases(2)
@pytest.mark.parametrize("name", IN_ONE_GRAPH)
def test_layer_is_compiled_to_one_graph(world: World, name: str) -> None:
    for found in world.run(4, differences, name, "eager", True, COMPILED):
        assert max(found) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_layer_compiled_by_inductor_matches_uncompiled_layer_within_rounding(world: World, name: str) -> None:
    for found in world.run(4, differences, name, "inductor", False, EVERY_RANK):
        assert max(found) < 1e-4
