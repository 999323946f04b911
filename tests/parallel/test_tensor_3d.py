"""3-D tensor parallelism over real ranks, compared with the dense model."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from dense import assert_layer_is_dense, assert_near, collectives, full_grad
from meshstep.parallel import (
    Classifier3D,
    Embedding3D,
    LayerNorm3D,
    Linear3D,
    P,
    ProcessGroupRegistry,
    Topology,
    cross_entropy_3d,
    shard,
    spec_of,
    unshard,
)
from meshstep.parallel.layers.cross_entropy import Reduction
from torch import nn
from torch.nn import functional as F
from world import World

SEED = 99
CUBES = {
    "cube of eight": Topology(input=2, weight=2, output=2),
    "axes in another order": Topology(output=2, input=2, weight=2),
    "input only": Topology(input=2, weight=1, output=1),
    "weight only": Topology(input=1, weight=2, output=1),
    "input and output": Topology(input=2, weight=1, output=2),
    "no cube": Topology(input=3, weight=1, output=2),
    "one process": Topology(input=1, weight=1, output=1),
}
TABLE = P(None, "output", owned={"input": "output"})


def layers_equal_dense(topology: Topology, features: int, outputs: int) -> None:
    batch = topology.size("weight") * 12  # divisible over input and over output
    takes, gives = P(("weight", "input"), None, "output"), P(("weight", "output"), None, "input")
    with ProcessGroupRegistry(topology) as registry:

        def check(
            make: type[nn.Module], dense: nn.Module, sizes: tuple[int, ...], ways: tuple[P, P], **specs: P
        ) -> None:
            swapped = ways == (gives, takes)
            axes = {"input": "output", "output": "input"} if swapped else {}
            bias = {} if isinstance(dense, nn.Embedding) else {"bias": "bias" in specs}
            torch.manual_seed(SEED)
            layer = make(*sizes, registry, **axes, **bias).double()
            is_table = isinstance(dense, nn.Embedding)
            torch.manual_seed(SEED + 1)
            x = (
                torch.randint(sizes[0], (batch, 3))
                if is_table
                else torch.randn(batch, 3, sizes[0], dtype=torch.float64)
            )
            assert_layer_is_dense(layer, dense, x, *ways, specs, registry)

        def drawn(kind: type[nn.Module], *sizes: int, **options: bool) -> nn.Module:
            torch.manual_seed(SEED)
            return kind(*sizes, **options).double()

        linear = {"weight": P(("output", "weight"), "input"), "bias": P("input")}
        check(Linear3D, drawn(nn.Linear, features, outputs), (features, outputs), (takes, gives), **linear)
        swapped = {"weight": P(("input", "weight"), "output"), "bias": P("output")}
        check(Linear3D, drawn(nn.Linear, features, outputs), (features, outputs), (gives, takes), **swapped)
        unbiased = drawn(nn.Linear, features, outputs, bias=False)
        check(Linear3D, unbiased, (features, outputs), (takes, gives), weight=linear["weight"])
        vectors = {"weight": P("output"), "bias": P("output")}
        check(LayerNorm3D, drawn(nn.LayerNorm, features), (features,), (takes, takes), **vectors)
        check(LayerNorm3D, drawn(nn.LayerNorm, features, bias=False), (features,), (takes, takes), weight=P("output"))
        whole = P(("weight", "input"))
        head = drawn(nn.Linear, features, outputs)
        check(Classifier3D, head, (features, outputs), (takes, whole), weight=TABLE, bias=P())
        head = drawn(nn.Linear, features, outputs, bias=False)
        check(Classifier3D, head, (features, outputs), (takes, whole), weight=TABLE)
        check(Embedding3D, drawn(nn.Embedding, outputs, features), (outputs, features), (whole, takes), weight=TABLE)


@pytest.mark.long
@pytest.mark.parametrize("name", CUBES)
def test_3d_layers_match_dense_layers(world: World, name: str) -> None:
    for features, outputs in ((12, 24), (7, 9)):  # 7 and 9 are not divisible by 2
        world.run(CUBES[name].world_size, layers_equal_dense, CUBES[name], features, outputs)


def holders() -> tuple[str, int]:
    """Return the coordinate of this rank and the number of classifier weights on it."""
    with ProcessGroupRegistry(Topology(input=2, weight=2, output=2)) as registry:
        head = Classifier3D(4, 5, registry)
        assert head.weight is None or spec_of(head.weight) == TABLE
        return "".join(
            str(at) for at in registry.coordinate.values()
        ), 0 if head.weight is None else head.weight.numel()


def test_classifier_3d_weight_is_on_ranks_with_equal_input_and_output_coordinates(world: World) -> None:
    assert world.run(8, holders) == [
        *(("000", 10), ("001", 0), ("010", 10), ("011", 0)),
        *(("100", 0), ("101", 10), ("110", 0), ("111", 10)),
    ]


def tied() -> None:
    with ProcessGroupRegistry(Topology(input=2, weight=2, output=2)) as registry:
        torch.manual_seed(SEED)
        dense_table, dense = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
        torch.manual_seed(SEED)
        table, head = Embedding3D(9, 6, registry), Classifier3D(6, 9, registry)
        dense.weight, head.weight = dense_table.weight, table.weight
        modules = (dense_table, dense, table, head)
        for module in modules:
            module.double()
        ids, target = torch.randint(9, (8, 3)), torch.randint(9, (8, 3))
        expected = F.cross_entropy(dense(dense_table(ids).tanh()).movedim(-1, 1), target)
        torch.autograd.backward(expected)
        rows = P(("weight", "input"))
        loss = cross_entropy_3d(head(table(shard(ids, rows, registry)).tanh()), shard(target, rows, registry), registry)
        torch.autograd.backward(loss)
        assert_near(loss, expected)
        assert dense_table.weight.grad is not None
        assert_near(full_grad(table.weight, TABLE, registry), dense_table.weight.grad)
        assert sum(1 for _ in nn.ModuleList([table, head]).parameters()) == (table.weight is not None)


def test_classifier_3d_tied_to_embedding_matches_dense_model(world: World) -> None:
    world.run(8, tied)


def frozen_table() -> None:
    with ProcessGroupRegistry(Topology(input=2, weight=1, output=2)) as registry:
        head = Classifier3D(4, 5, registry, bias=True)
        if head.weight is not None:
            head.weight.requires_grad_(False)
        torch.autograd.backward(head(torch.randn(3, 2)).sum())
        assert head.weight is None or head.weight.grad is None
        assert head.bias is not None
        assert head.bias.grad is not None
        with torch.no_grad():
            assert head(torch.randn(3, 2)).shape == (3, 5)


def test_frozen_classifier_3d_weight_causes_no_deadlock(world: World) -> None:
    world.run(4, frozen_table)


def low_precision() -> None:
    with ProcessGroupRegistry(Topology(input=2, weight=1, output=2)) as registry:
        torch.manual_seed(SEED)
        dense = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Linear(8, 5))
        torch.manual_seed(SEED)
        up = Linear3D(8, 16, registry)
        down = Linear3D(16, 8, registry, input="output", output="input")
        layers = (LayerNorm3D(8, registry), up, nn.GELU(), down)
        model = nn.Sequential(*layers, Classifier3D(8, 5, registry, bias=True))
        full = torch.randn(8, 3, 8)
        local = shard(full, P(("weight", "input"), None, "output"), registry)
        expected = shard(dense(full), P(("weight", "input")), registry)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(local)
        assert output.dtype is torch.bfloat16
        assert_near(output, expected)
        torch.autograd.backward(output.float().square().sum())
        for param in model.parameters():
            assert param.grad is not None
            assert param.grad.dtype is torch.float32
        for dtype in (torch.bfloat16, torch.float16):
            # Ranks without the classifier weight receive it by a broadcast, and must expect this dtype.
            half = model.to(dtype)
            output = half(local.to(dtype))
            assert output.dtype is dtype
            assert_near(output, expected, torch.bfloat16)


def test_3d_tensor_parallel_model_in_low_precision_is_near_float32_dense_model(world: World) -> None:
    world.run(4, low_precision)


def cross_entropy_equals_torch(reduction: Reduction, label_smoothing: float) -> None:
    rows = P(("weight", "input"))
    with ProcessGroupRegistry(Topology(input=2, weight=2, output=1)) as registry:
        logits = torch.randn(8, 3, 10, dtype=torch.float64) * 4
        target = torch.randint(10, (8, 3))
        target[0, 0] = target[3] = -100
        reference = logits.clone().requires_grad_()
        expected = F.cross_entropy(
            reference.movedim(-1, 1), target, reduction=reduction, label_smoothing=label_smoothing
        )
        torch.autograd.backward((expected.cos() if reduction == "none" else expected).sum())
        local = shard(logits, rows, registry).requires_grad_()
        loss = cross_entropy_3d(
            local, shard(target, rows, registry), registry, reduction=reduction, label_smoothing=label_smoothing
        )
        torch.autograd.backward((loss.cos() if reduction == "none" else loss).sum())
        assert_near(unshard(loss, rows, registry) if reduction == "none" else loss, expected)
        assert reference.grad is not None
        assert_near(unshard(local.grad, rows, registry), reference.grad)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_3d_matches_torch(world: World, reduction: Reduction) -> None:
    for smoothing in (0.0, 0.2):
        world.run(4, cross_entropy_equals_torch, reduction, smoothing)


def rejected() -> None:
    with ProcessGroupRegistry(Topology(input=1, weight=2, output=2)) as registry:
        with pytest.raises(
            ValueError, match=r"the last rank would get no elements .* sharded over output=2 x weight=2 as"
        ):
            Linear3D(3, 4, registry)
        with pytest.raises(
            ValueError, match=r"shape \(3, 8\), but its last dim must be 4 \(8 features over output=2\)"
        ):
            Linear3D(8, 4, registry)(torch.zeros(3, 8))
        with pytest.raises(ValueError, match=r"has shape \(4,\), but needs a batch as its first dim"):
            Linear3D(8, 4, registry)(torch.zeros(4))
        with pytest.raises(
            ValueError, match=r"length 3, which is not a multiple of 2, the size of mesh axis output; pad"
        ):
            Linear3D(8, 4, registry)(torch.zeros(3, 4))
        with pytest.raises(
            ValueError,
            match=r"owned=\{'input': 'output'\} needs size\('input'\) >= size\('output'\) = 2, but 'input' has size 1",
        ):
            Classifier3D(8, 4, registry)
        with pytest.raises(ValueError, match="the last rank would get no elements"):
            LayerNorm3D(1, registry)
        for create in (LayerNorm3D, partial(Embedding3D, 8), partial(Classifier3D, 8)):
            with pytest.raises(ValueError, match="unknown axis 'weights'; did you mean 'weight'"):
                create(8, registry, weight="weights")


def test_3d_layers_reject_bad_input_on_every_rank(world: World) -> None:
    world.run(4, rejected)


def counted() -> list[dict[str, int]]:
    counts = []
    with ProcessGroupRegistry(Topology(input=2, weight=2, output=2)) as registry:
        linear, norm, head = Linear3D(4, 8, registry), LayerNorm3D(4, registry), Classifier3D(4, 8, registry)
        for layer in (linear, norm, head):
            with collectives() as seen:
                torch.autograd.backward(layer(torch.randn(4, 2, requires_grad=True)).sum())
            counts.append(dict(seen))
    return counts


def test_3d_layers_issue_expected_collectives(world: World) -> None:
    for rank, (linear, norm, head) in enumerate(world.run(8, counted)):
        assert linear == {"all_gather_single": 3, "reduce_scatter_single": 3, "all_reduce": 1}
        assert norm == {"all_gather_single": 1, "all_reduce": 2}
        holds = rank in (0, 2, 5, 7)
        assert head == {"broadcast": 1, "reduce": 1, "all_reduce": 2 if holds else 1}
