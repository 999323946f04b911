"""2-D (SUMMA) tensor parallelism over real ranks, compared with the dense model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dense import (
    assert_layer_is_dense,
    assert_near,
    assert_same_grads,
    assert_same_parameters,
    collectives,
    full_grad,
)
from meshstep.parallel import (
    BiasLayout,
    Classifier2D,
    Embedding2D,
    LayerNorm2D,
    Linear2D,
    P,
    ProcessGroupRegistry,
    Topology,
    blocks,
    copy_to,
    cross_entropy_2d,
    gather_from,
    scatter_to,
    shard,
    spec_of,
    unshard,
)
from meshstep.parallel.layers.cross_entropy import Reduction
from meshstep.parallel.layers.summa import Grid
from meshstep.parallel.layers.tensor_2d import bias_spec
from torch import Tensor, nn
from torch.nn import functional as F
from world import World

SEED = 99
GRID = Topology(row=2, col=2)
LAYOUTS: list[BiasLayout | None] = ["column", "all", "row0", None]


def split(full: Tensor, registry: ProcessGroupRegistry) -> Tensor:
    return scatter_to(scatter_to(full, registry, "row", dim=0), registry, "col", dim=-1)


def join(local: Tensor, registry: ProcessGroupRegistry) -> Tensor:
    return gather_from(gather_from(local, registry, "col", dim=-1), registry, "row", dim=0)


def grad_of(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def compare(
    function: Callable[[Tensor], Tensor],
    dense: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    registry: ProcessGroupRegistry,
) -> None:
    """Compare output and input gradient of a sharded layer with the dense layer. The parameters of both layers have their
    gradients afterwards."""
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    reference = x.detach().double().requires_grad_()
    expected = dense(reference)
    weight = torch.randn_like(expected)
    torch.autograd.backward((expected * weight).sum())
    output = join(function(split(x, registry)), registry)
    torch.autograd.backward((output * weight.to(dtype)).sum())
    assert output.dtype is dtype
    assert_near(output, expected)
    assert_near(grad_of(x), grad_of(reference))


def linear_equals_dense(topology: Topology, layout: BiasLayout | None, dtype: torch.dtype) -> None:
    q = topology.size("row")
    with ProcessGroupRegistry(topology) as registry:
        for shape in ((2 * q, 7, 3 * q), (4 * q, 3 * q)):
            torch.manual_seed(SEED)
            dense = nn.Linear(3 * q, 2 * q * q, bias=layout is not None, dtype=dtype)
            random_state = torch.get_rng_state()
            torch.manual_seed(SEED)
            layer = Linear2D(3 * q, 2 * q * q, registry, bias=layout, dtype=dtype)
            assert torch.equal(torch.get_rng_state(), random_state)
            spec = P() if layout is None else bias_spec(layout)
            assert torch.equal(unshard(layer.weight, P("row", "col"), registry), dense.weight.t())
            if layout is not None:
                assert torch.equal(unshard(layer.bias, spec, registry), dense.bias)
            dense = dense.double()
            compare(layer, dense, shape, dtype, registry)
            assert_near(full_grad(layer.weight, P("row", "col"), registry), grad_of(dense.weight).t())
            if layout is not None:
                assert_near(full_grad(layer.bias, spec, registry), grad_of(dense.bias))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_linear_2d_matches_dense_linear(world: World, layout: BiasLayout | None, dtype: torch.dtype) -> None:
    world.run(4, linear_equals_dense, GRID, layout, dtype)


def test_linear_2d_in_one_process_matches_dense_linear() -> None:
    for layout in LAYOUTS:
        linear_equals_dense(Topology(row=1, col=1), layout, torch.float64)


@pytest.mark.parametrize("layout", ["row0", "all"])
def test_linear_2d_on_nine_ranks_matches_dense_linear(world: World, layout: BiasLayout) -> None:
    world.run(9, linear_equals_dense, Topology(row=3, col=3), layout, torch.float64)


def fused_equals_dense(layout: BiasLayout | None, sizes: tuple[int, ...]) -> None:
    with ProcessGroupRegistry(GRID) as registry:
        torch.manual_seed(SEED)
        dense = nn.Linear(6, 24, bias=layout is not None, dtype=torch.float64)
        torch.manual_seed(SEED)
        layer = Linear2D(6, 24, registry, bias=layout, blocks=sizes, dtype=torch.float64)
        rows, columns = P("row", blocks("col", sizes)), P("row", "col")
        x, weight = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 24, dtype=torch.float64)
        expected = dense(x)
        torch.autograd.backward((expected * weight).sum())
        output = layer(shard(x, columns, registry))
        assert_near(output, shard(expected, rows, registry))
        torch.autograd.backward((output * shard(weight, rows, registry)).sum())
        assert_near(full_grad(layer.weight, spec_of(layer.weight), registry), grad_of(dense.weight).t())
        assert torch.equal(unshard(layer.weight, rows, registry), dense.weight.t())
        if layout is not None:
            spec = bias_spec(layout, blocks=sizes)
            assert_near(full_grad(layer.bias, spec, registry), grad_of(dense.bias))
            assert torch.equal(unshard(layer.bias, spec, registry), dense.bias)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(1, 1), (4, 1, 1)])
def test_fused_linear_2d_matches_dense_linear(world: World, layout: BiasLayout | None, sizes: tuple[int, ...]) -> None:
    world.run(4, fused_equals_dense, layout, sizes)


def bias_holders(layout: BiasLayout) -> tuple[int, int]:
    """Return the size of the bias on this rank, and the number of parameters of the layer."""
    with ProcessGroupRegistry(GRID) as registry:
        layer = Linear2D(4, 8, registry, bias=layout)
        assert spec_of(layer.weight) == P("row", "col")
        if layer.bias is None:
            return 0, len(list(layer.parameters()))
        assert (
            spec_of(layer.bias)
            == {
                "column": P("col"),
                "all": P(("col", "row")),
                "row0": P("col", owned={"row": 0}),
            }[layout]
        )
        return layer.bias.numel(), len(list(layer.parameters()))


def test_linear_2d_bias_is_held_by_ranks_of_chosen_bias_layout(world: World) -> None:
    assert world.run(4, bias_holders, "column") == [(4, 2)] * 4
    assert world.run(4, bias_holders, "all") == [(2, 2)] * 4
    assert world.run(4, bias_holders, "row0") == [(4, 2), (4, 2), (0, 1), (0, 1)]


def frozen_bias() -> None:
    with ProcessGroupRegistry(GRID) as registry:
        layer = Linear2D(4, 8, registry, bias="row0")
        if layer.bias is not None:
            layer.bias.requires_grad_(False)
        torch.autograd.backward(layer(torch.randn(3, 2)).sum())
        assert layer.weight.grad is not None
        assert layer.bias is None or layer.bias.grad is None
        layer.weight.requires_grad_(False)
        if layer.bias is not None:
            layer.bias.requires_grad_(True)
        torch.autograd.backward(layer(torch.randn(3, 2)).sum())
        if layer.bias is not None:
            assert torch.equal(grad_of(layer.bias), torch.full((4,), 6.0))  # 3 samples on each of 2 rows
        with torch.no_grad():
            assert layer(torch.randn(3, 2)).shape == (3, 4)


def test_frozen_parameters_of_linear_2d_cause_no_deadlock(world: World) -> None:
    world.run(4, frozen_bias)


def layer_norm_equals_dense(topology: Topology, dtype: torch.dtype, bias: bool) -> None:
    with ProcessGroupRegistry(topology) as registry:
        dense = nn.LayerNorm(12, eps=1e-3, bias=bias, dtype=dtype)
        layer = LayerNorm2D(12, registry, eps=1e-3, bias=bias, dtype=dtype)
        assert_same_parameters(layer, dense, registry)
        with torch.no_grad():
            for name, param in dense.named_parameters():
                param.normal_()
                layer.get_parameter(name).copy_(shard(param, P("col"), registry))
        dense = dense.double()
        compare(layer, dense, (4, 5, 12), dtype, registry)
        assert_same_grads(layer, dense, registry)
        assert {spec_of(param) for param in layer.parameters()} == {P("col")}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_2d_matches_dense_layer_norm(world: World, dtype: torch.dtype, bias: bool) -> None:
    world.run(4, layer_norm_equals_dense, GRID, dtype, bias)
    world.run(2, layer_norm_equals_dense, Topology(row=1, col=2), dtype, bias)
    world.run(1, layer_norm_equals_dense, Topology(row=1, col=1), dtype, bias)


def far_from_zero() -> None:
    """Use a mean 10,000 times the deviation: sum and sum of squares in float32 would lose the variance."""
    with ProcessGroupRegistry(GRID) as registry:
        x = torch.randn(4, 12, dtype=torch.float64) + 1e4
        x = x.float()
        expected = F.layer_norm(x.double(), (12,))
        output = join(LayerNorm2D(12, registry)(split(x, registry)), registry)
        assert (output - expected).abs().max() < 2e-3


def test_layer_norm_2d_is_accurate_for_large_mean(world: World) -> None:
    world.run(4, far_from_zero)


def embedding_equals_dense(topology: Topology, dtype: torch.dtype) -> None:
    with ProcessGroupRegistry(topology) as registry:
        torch.manual_seed(SEED)
        dense = nn.Embedding(14, 6, dtype=dtype)
        torch.manual_seed(SEED)
        table = Embedding2D(14, 6, registry, dtype=dtype)
        assert_same_parameters(table, dense, registry)
        positions = torch.randn(5, 6, dtype=dtype)
        dense_positions = positions.clone().requires_grad_()
        local_positions = shard(positions, P(None, "col"), registry).requires_grad_()
        ids = torch.randint(14, (4, 5))
        weight = torch.randn(4, 5, 6, dtype=dtype)
        expected = dense(ids) + dense_positions
        torch.autograd.backward((expected * weight).sum())
        hidden = table(shard(ids, P("row"), registry)) + copy_to(local_positions, registry, "row")
        output = join(hidden, registry)
        torch.autograd.backward((output * weight).sum())
        assert torch.equal(output, expected)
        assert_same_grads(table, dense, registry)
        assert_near(full_grad(local_positions, P(None, "col"), registry), grad_of(dense_positions))
        assert spec_of(table.weight) == P("row", "col")
        with pytest.raises(IndexError):
            table(torch.full((2, 5), 14))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_embedding_2d_matches_dense_embedding(world: World, dtype: torch.dtype) -> None:
    world.run(4, embedding_equals_dense, GRID, dtype)
    world.run(2, embedding_equals_dense, Topology(row=2, col=1), dtype)
    world.run(1, embedding_equals_dense, Topology(row=1, col=1), dtype)


def classifier_equals_dense(topology: Topology, dtype: torch.dtype, tied: bool) -> None:
    with ProcessGroupRegistry(topology) as registry:
        torch.manual_seed(SEED)
        dense_table, dense = nn.Embedding(14, 6, dtype=dtype), nn.Linear(6, 14, bias=not tied, dtype=dtype)
        torch.manual_seed(SEED)
        table = Embedding2D(14, 6, registry, dtype=dtype)
        head = Classifier2D(6, 14, registry, bias=not tied, dtype=dtype)
        assert_same_parameters(head, dense, registry)
        if tied:
            dense.weight, head.weight = dense_table.weight, table.weight
        ids, target = torch.randint(14, (4, 5)), torch.randint(14, (4, 5))
        expected = dense(dense_table(ids).tanh())
        torch.autograd.backward(F.cross_entropy(expected.movedim(-1, 1), target))
        logits = head(table(shard(ids, P("row"), registry)).tanh())
        torch.autograd.backward(cross_entropy_2d(logits, shard(target, P("row"), registry), registry))
        assert_near(join(logits, registry), expected)
        assert_same_grads(head, dense, registry)
        assert_same_grads(table, dense_table, registry)
        assert spec_of(head.weight) == P("row", "col")
        with pytest.raises(
            ValueError, match=r"the input of Classifier2D has shape \(2, 14\), but its last dim must be"
        ):
            head(torch.randn(2, 14))


@pytest.mark.parametrize("tied", [False, True])
def test_classifier_2d_with_and_without_tied_embedding_matches_dense_model(world: World, tied: bool) -> None:
    for dtype in (torch.float64, torch.float32):
        world.run(4, classifier_equals_dense, GRID, dtype, tied)
    world.run(1, classifier_equals_dense, Topology(row=1, col=1), torch.float64, tied)


def cross_entropy_equals_torch(
    topology: Topology, dtype: torch.dtype, reduction: Reduction, label_smoothing: float = 0.0
) -> None:
    with ProcessGroupRegistry(topology) as registry:
        logits = (torch.randn(4, 3, 10) * 4).to(dtype)
        target = torch.randint(10, (4, 3))
        target[0, 0] = target[3] = -100  # the rows of the grid have different numbers of targets
        reference = logits.double().detach().requires_grad_()
        options: Any = {"reduction": reduction, "label_smoothing": label_smoothing}
        expected = F.cross_entropy(reference.movedim(-1, 1), target, **options)
        torch.autograd.backward((expected.cos() if reduction == "none" else expected).sum())
        local = shard(logits, P("row", None, "col"), registry).requires_grad_()
        loss = cross_entropy_2d(local, shard(target, P("row"), registry), registry, **options)
        torch.autograd.backward((loss.cos() if reduction == "none" else loss).sum())
        assert_near(gather_from(loss, registry, "row", dim=0) if reduction == "none" else loss, expected)
        assert_near(unshard(local.grad, P("row", None, "col"), registry), grad_of(reference))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cross_entropy_2d_matches_torch(world: World, dtype: torch.dtype, reduction: Reduction) -> None:
    world.run(4, cross_entropy_equals_torch, GRID, dtype, reduction)
    world.run(4, cross_entropy_equals_torch, GRID, dtype, reduction, 0.2)
    world.run(1, cross_entropy_equals_torch, Topology(row=1, col=1), dtype, reduction)


# Other grids, and uneven shards ----------------------------------------------------------------------------------------

RECTANGLES = [Topology(row=1, col=3), Topology(row=3, col=1), Topology(row=2, col=3), Topology(col=2, row=3), GRID]


def layers_equal_dense(topology: Topology, dims: tuple[int, int]) -> None:
    features, outputs = dims
    batch, takes = 2 * topology.size("row"), P("row", None, "col")
    weight, vector = P("row", "col"), P("col")
    with ProcessGroupRegistry(topology) as registry:

        def check(layer: nn.Module, dense: nn.Module, x: Tensor, **specs: P) -> None:
            ids = P("row") if isinstance(dense, nn.Embedding) else takes
            assert_layer_is_dense(layer, dense, x, ids, takes, specs, registry)

        for layout in LAYOUTS:
            torch.manual_seed(SEED)
            dense = nn.Linear(features, outputs, bias=layout is not None, dtype=torch.float64)
            torch.manual_seed(SEED)
            layer = Linear2D(features, outputs, registry, bias=layout, dtype=torch.float64)
            specs = {} if layout is None else {"bias": bias_spec(layout)}
            check(layer, dense, torch.randn(batch, 3, features, dtype=torch.float64), weight=weight, **specs)
        torch.manual_seed(SEED)
        head = nn.Linear(features, outputs, dtype=torch.float64)
        torch.manual_seed(SEED)
        classifier = Classifier2D(features, outputs, registry, bias=True, dtype=torch.float64)
        x = torch.randn(batch, 3, features, dtype=torch.float64)
        check(classifier, head, x, weight=weight, bias=vector)
        norm = nn.LayerNorm(features, dtype=torch.float64)
        check(LayerNorm2D(features, registry, dtype=torch.float64), norm, x + 100, weight=vector, bias=vector)
        torch.manual_seed(SEED)
        table = nn.Embedding(outputs, features, dtype=torch.float64)
        torch.manual_seed(SEED)
        split_table = Embedding2D(outputs, features, registry, dtype=torch.float64)
        check(split_table, table, torch.randint(outputs, (batch, 3)), weight=weight)
        with pytest.raises(IndexError):
            split_table(torch.full((2, 3), outputs))


@pytest.mark.parametrize("topology", RECTANGLES, ids=repr)
@pytest.mark.parametrize("dims", [(6, 18), (7, 11)])  # 7 and 11 are divisible by no axis size above 1
def test_2d_layers_match_dense_layers_on_rectangular_grids_and_with_uneven_shards(
    world: World, topology: Topology, dims: tuple[int, int]
) -> None:
    world.run(topology.world_size, layers_equal_dense, topology, dims)


def uneven_cross_entropy(topology: Topology) -> None:
    with ProcessGroupRegistry(topology) as registry:
        logits, target = torch.randn(6, 3, 11, dtype=torch.float64), torch.randint(11, (6, 3))
        reference = logits.clone().requires_grad_()
        expected = F.cross_entropy(reference.movedim(-1, 1), target, label_smoothing=0.1)
        torch.autograd.backward(expected)
        spec = P("row", None, "col")
        local = shard(logits, spec, registry, uneven=True).requires_grad_()
        labels = shard(target, P("row"), registry)
        loss = cross_entropy_2d(local, labels, registry, classes=11, label_smoothing=0.1)
        torch.autograd.backward(loss)
        assert_near(loss, expected)
        assert_near(unshard(local.grad, spec, registry), grad_of(reference))


def test_cross_entropy_2d_of_unevenly_sharded_classes_matches_torch(world: World) -> None:
    world.run(6, uneven_cross_entropy, Topology(row=2, col=3))


def panels(length: int, rows: int, cols: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    with ProcessGroupRegistry(Topology(row=rows, col=cols)) as registry:
        return [(tuple(panel["row"]), tuple(panel["col"])) for panel in Grid(registry, "row", "col").panels(length)]


def test_summa_panels_end_at_shard_boundaries_of_either_axis(world: World) -> None:
    assert world.run(6, panels, 6, 2, 3)[0] == [  # (owner, start, width) over row, and over col
        ((0, 0, 2), (0, 0, 2)),
        ((0, 2, 1), (1, 0, 1)),
        ((1, 0, 1), (1, 1, 1)),
        ((1, 1, 2), (2, 0, 2)),
    ]
    assert world.run(4, panels, 5, 2, 2)[0] == [((0, 0, 3), (0, 0, 3)), ((1, 0, 2), (1, 0, 2))]


class Block(nn.Module):
    """A 2-D residual MLP block on axes named ``y`` and ``x`` instead of ``row`` and ``col``."""

    def __init__(self, registry: ProcessGroupRegistry, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = LayerNorm2D(8, registry, row="y", col="x", dtype=dtype)
        self.up = Linear2D(8, 16, registry, row="y", col="x", bias="all", dtype=dtype)
        self.down = Linear2D(16, 8, registry, row="y", col="x", bias="row0", dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + hidden


class DenseBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + hidden


def low_precision() -> None:
    with ProcessGroupRegistry(Topology(y=2, x=2)) as registry:
        full = torch.randn(4, 3, 8)
        local = shard(full, P("y", None, "x"), registry)
        torch.manual_seed(SEED)
        expected = unsharded_block(full)
        torch.manual_seed(SEED)
        block = Block(registry, torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert block.up(local).dtype is torch.bfloat16
            output = block(local)
        torch.autograd.backward(output.float().square().sum())
        assert all(grad_of(param).dtype is torch.float32 for param in block.parameters())
        assert_near(unshard(output.float(), P("y", None, "x"), registry), expected, torch.bfloat16)
        for dtype in (torch.bfloat16, torch.float16):
            torch.manual_seed(SEED)
            half = Block(registry, torch.float32).to(dtype)
            output = half(local.to(dtype))
            torch.autograd.backward(output.float().square().sum())
            assert output.dtype is dtype
            assert all(grad_of(param).dtype is dtype for param in half.parameters())
            assert_near(unshard(output, P("y", None, "x"), registry), expected)
            # The parameters kept their specs through .to().
            assert spec_of(half.up.weight) == P("y", "x")


def unsharded_block(full: Tensor) -> Tensor:
    result: Tensor = DenseBlock()(full)
    return result.detach()


def test_2d_block_with_custom_axis_names_matches_dense_block_in_low_precision(world: World) -> None:
    world.run(4, low_precision)


def rejected() -> None:
    with ProcessGroupRegistry(GRID) as registry:
        with pytest.raises(
            ValueError, match=r"the last rank would get no elements of dim 0 of shape \(1, 4\) .* sharded over row=2 as"
        ):
            Linear2D(1, 4, registry)
        with pytest.raises(ValueError, match=r"no elements of dim 0 of shape \(2,\) .* sharded over col=2 x row=2 as"):
            Linear2D(4, 2, registry, bias="all")
        with pytest.raises(ValueError, match=r"block 1 of 2 has length 3, which is not divisible by the 2 ranks"):
            Linear2D(4, 6, registry, blocks=2)
        with pytest.raises(ValueError, match="use 'column', 'all', 'row0', or None"):
            Linear2D(4, 4, registry, bias="rows")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"has shape \(3, 4\), but its last dim must be 2 .*; shard a full input"):
            Linear2D(4, 4, registry)(torch.zeros(3, 4))
        with pytest.raises(
            ValueError, match=r"with scatter_to\(.*, 'col', dim=-1, uneven=True\), and its batch over 'row'"
        ):
            Linear2D(5, 4, registry)(torch.zeros(3, 5))
        with pytest.raises(ValueError, match=r"with scatter_to\(.*, 'col', dim=-1\), and its batch over 'row'"):
            LayerNorm2D(4, registry)(torch.zeros(3, 4))
        with pytest.raises(ValueError, match=r"no elements of dim 0 .* sharded over col=2 as"):
            LayerNorm2D(1, registry)
        with pytest.raises(ValueError, match="unknown axis 'rows'; did you mean 'row'"):
            LayerNorm2D(4, registry, row="rows")
        with pytest.raises(ValueError, match=r"has shape \(3, 4\), but its last dim must be 2"):
            LayerNorm2D(4, registry)(torch.zeros(3, 4))
        logits, target = torch.zeros(3, 5 - 3 * registry.coordinate["col"]), torch.zeros(3, dtype=torch.long)
        with pytest.raises(
            RuntimeError,
            match=r"numbers of classes .* axis 'col' \(on this rank [25]\); make .* as classes= to cross_entropy_2d",
        ):
            cross_entropy_2d(logits, target, registry)
        with pytest.raises(
            RuntimeError,
            match=r"classes=9 does not fit the logits: .* \(this rank needs [45] and has [25]\); pass the number of all",
        ):
            cross_entropy_2d(logits, target, registry, classes=9)  # torch.chunk gives 5 and 4 classes
    with ProcessGroupRegistry(Topology(row=4, col=1)) as registry:
        with pytest.raises(ValueError, match=r"no elements of dim 0 of shape \(5, 4\) .* sharded over row=4 as"):
            Embedding2D(5, 4, registry)  # shards of 2, 2, 1 and 0
        with pytest.raises(ValueError, match=r"no elements of dim 0 of shape \(5, 4\) .* sharded over row=4 as"):
            Classifier2D(4, 5, registry)


def test_2d_layers_reject_bad_input_on_every_rank(world: World) -> None:
    world.run(4, rejected)


def counted() -> list[dict[str, int]]:
    counts = []
    with ProcessGroupRegistry(GRID) as registry:
        layers = [Linear2D(4, 8, registry, bias=layout) for layout in LAYOUTS]
        for layer in (*layers, LayerNorm2D(4, registry)):
            with collectives() as seen:
                torch.autograd.backward(layer(torch.randn(3, 2, requires_grad=True)).sum())
            counts.append(dict(seen))
    return counts


def test_2d_layers_issue_expected_collectives(world: World) -> None:
    column, spread, row0, none, norm = world.run(4, counted)[0]
    q = 2
    assert none == {"broadcast": 4 * q, "reduce": 2 * q}
    assert column == {**none, "all_reduce": 1}
    assert spread == {**none, "all_gather_single": 1, "reduce_scatter_single": 1}
    assert row0 == {"broadcast": 4 * q + 1, "reduce": 2 * q + 1}
    assert norm == {"all_gather_single": 1, "all_reduce": 2}
