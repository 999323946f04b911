"""2.5-D tensor parallelism over real ranks: each grid along depth computes its part of the dense model's batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from dense import assert_layer_is_dense, collectives
from meshstep.parallel import (
    BiasLayout,
    Classifier2D,
    Classifier2p5D,
    Embedding2D,
    Embedding2p5D,
    LayerNorm2D,
    LayerNorm2p5D,
    Linear2D,
    Linear2p5D,
    P,
    ProcessGroupRegistry,
    Topology,
    spec_of,
)
from torch import nn
from world import World

SEED = 99
TOPOLOGIES = {
    "two grids of 2 x 2": Topology(depth=2, row=2, col=2),
    "depth named last": Topology(row=2, col=2, depth=2),
    "two rows": Topology(depth=2, row=2, col=1),
    "two columns": Topology(depth=2, row=1, col=2),
    "three grids": Topology(depth=3, row=1, col=2),
    "one grid": Topology(depth=1, row=2, col=2),
    "one process": Topology(depth=1, row=1, col=1),
}
TAKES, IDS = P(("depth", "row"), None, "col"), P(("depth", "row"))


def biases(layout: BiasLayout) -> P:
    return {
        "column": P("col", partial="depth"),
        "all": P(("col", "row"), partial="depth"),
        "row0": P("col", owned={"row": 0}, partial="depth"),
    }[layout]


def layers_equal_dense(topology: Topology, dims: tuple[int, int]) -> None:
    features, outputs = dims
    batch = 2 * topology.size("depth", "row")
    weight, vector = P("row", "col", partial="depth"), P("col", partial="depth")
    with ProcessGroupRegistry(topology) as registry:

        def check(
            layer: type[nn.Module], dense: type[nn.Module], *sizes: int, specs: dict[str, P], **options: object
        ) -> None:
            torch.manual_seed(SEED)
            given = {"bias": options["bias"]} if dense is nn.Linear else {}
            reference = dense(*sizes, **{key: value is not None and value is not False for key, value in given.items()})
            reference = reference.double()
            torch.manual_seed(SEED)
            split = layer(*sizes, registry, depth="depth", **options).double()
            is_table = dense is nn.Embedding
            torch.manual_seed(SEED + 1)
            x = (
                torch.randint(sizes[0], (batch, 3))
                if is_table
                else torch.randn(batch, 3, sizes[0], dtype=torch.float64)
            )
            assert_layer_is_dense(split, reference, x, IDS if is_table else TAKES, TAKES, specs, registry)

        layouts: tuple[BiasLayout, ...] = ("column", "all", "row0")
        for layout in layouts:
            specs = {"weight": weight, "bias": biases(layout)}
            check(Linear2D, nn.Linear, features, outputs, specs=specs, bias=layout)
        check(Linear2D, nn.Linear, features, outputs, specs={"weight": weight}, bias=None)
        check(LayerNorm2D, nn.LayerNorm, features, specs={"weight": vector, "bias": vector})
        check(Embedding2D, nn.Embedding, outputs, features, specs={"weight": weight})
        check(Classifier2D, nn.Linear, features, outputs, specs={"weight": weight, "bias": vector}, bias=True)
        check(Classifier2D, nn.Linear, features, outputs, specs={"weight": weight}, bias=False)


@pytest.mark.long
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_2p5d_layers_match_dense_layers(world: World, name: str) -> None:
    for dims in ((6, 12), (7, 9)):  # 7 and 9 are not divisible by 2
        world.run(TOPOLOGIES[name].world_size, layers_equal_dense, TOPOLOGIES[name], dims)


def counted() -> list[dict[str, int]]:
    counts = []
    with ProcessGroupRegistry(Topology(depth=2, row=1, col=1)) as registry:
        for layer in (
            Linear2D(4, 8, registry, depth="depth"),
            LayerNorm2D(4, registry, depth="depth"),
            Classifier2D(4, 8, registry, bias=True, depth="depth"),
        ):
            with collectives() as seen:
                torch.autograd.backward(layer(torch.randn(3, 4, requires_grad=True)).sum())
            counts.append(dict(seen))
    return counts


def test_2p5d_layers_communicate_only_within_their_grid(world: World) -> None:
    assert world.run(2, counted) == [[{}, {}, {}]] * 2


def other_names() -> None:
    with ProcessGroupRegistry(Topology(z=2, y=1, x=2)) as registry:
        assert spec_of(Linear2D(4, 8, registry, depth="z", row="y", col="x", blocks=2).weight).partial == ("z",)
        with pytest.raises(ValueError, match="unknown axis 'depth'"):
            LayerNorm2D(4, registry, row="y", col="x", depth="depth")
        with pytest.raises(ValueError, match=r"Linear2D has shape \(3, 4\), .* must be 2 \(4 features over x=2\)"):
            Linear2D(4, 8, registry, depth="z", row="y", col="x")(torch.randn(3, 4))


def test_linear_2d_with_depth_accepts_custom_axis_names(world: World) -> None:
    world.run(4, other_names)


def old_names() -> None:
    with ProcessGroupRegistry(Topology(depth=2, row=1, col=1)) as registry:
        layers: list[tuple[nn.Module, Callable[[], nn.Module]]] = [
            (Linear2D(4, 8, registry, depth="depth"), lambda: Linear2p5D(4, 8, registry)),
            (LayerNorm2D(4, registry, depth="depth"), lambda: LayerNorm2p5D(4, registry)),
            (Embedding2D(4, 8, registry, depth="depth"), lambda: Embedding2p5D(4, 8, registry)),
            (Classifier2D(4, 8, registry, depth="depth"), lambda: Classifier2p5D(4, 8, registry)),
        ]
        for layer, make_old in layers:
            with pytest.warns(DeprecationWarning, match=rf"write {type(layer).__name__}\(..., depth='depth'\)"):
                old = make_old()
            assert {n: spec_of(p) for n, p in old.named_parameters()} == {
                n: spec_of(p) for n, p in layer.named_parameters()
            }


def test_deprecated_2p5d_layer_names_warn_and_keep_the_specs(world: World) -> None:
    world.run(2, old_names)
