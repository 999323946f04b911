"""Sharded 8-bit layers, compared with the unsharded layer.

They use the scales of the unsharded layer, so they round equally. By default the ranks of a data axis do not share
scales.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import pytest
import torch
from dense import assert_near, assert_same_grads, collectives, full_grad
from meshstep.amp import Fp8, fp8_layers
from meshstep.amp.fp8_linear import Fp8Matmul, Fp8RowMatmul
from meshstep.parallel import (
    BiasLayout,
    Classifier2D,
    Classifier3D,
    ColumnParallelLinear,
    Linear2D,
    Linear3D,
    P,
    ProcessGroupRegistry,
    RowParallelLinear,
    Topology,
    declare,
    shard,
    spec_of,
    unshard,
)
from small_models import Base, small_model
from torch import Tensor, nn
from world import World

WIDTH, HIDDEN, BATCH, SEQ = 32, 64, 4, 6


def unsharded_layer(
    inputs: int, outputs: int, base: Base = "fp32", scales: Literal["tensor", "row"] = "tensor"
) -> nn.Linear:
    """Return an unsharded 8-bit layer with one outlier, so that its shards have different maxima."""
    torch.manual_seed(11)
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        layer.weight[1, 2] = 1.7
    Fp8(base, scales=scales).prepare(layer)
    return layer


def activations(features: int, *shape: int) -> tuple[Tensor, Tensor]:
    """Return an input [*shape, features] and an output gradient, with outliers in the first sample and token."""
    generator = torch.Generator().manual_seed(5)
    x, grad = (torch.randn(*shape, size, generator=generator) for size in (features, WIDTH + HIDDEN - features))
    for tensor in (x, grad):
        tensor.view(-1)[1] = 11.0
    return x.requires_grad_(), grad


def compare_1d_layer(kind: str, sequence: bool, agree: bool, scales: Literal["tensor", "row"] = "tensor") -> int:
    """Compare a prepared 1-D layer with the unsharded one. ``agree=False``: the ranks do not share the scales.

    Return the number of collectives per forward and backward that share maxima.
    """
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        features = (WIDTH, HIDDEN) if kind == "column" else (HIDDEN, WIDTH)
        cls = ColumnParallelLinear if kind == "column" else RowParallelLinear
        dense = unsharded_layer(*features, scales=scales)
        layer = cls(*features, registry, sequence_parallel=sequence)
        for param, full in zip(layer.parameters(), dense.parameters(), strict=True):
            param.data = shard(full, spec_of(param), registry)
        plain_matmul = layer.matmul
        Fp8("fp32", scales=scales).prepare(layer, registry)
        matmul_of = Fp8RowMatmul if scales == "row" else Fp8Matmul
        assert isinstance(layer.matmul, matmul_of)
        if not agree:
            layer.matmul = matmul_of()
        x, grad = activations(features[0], BATCH, SEQ)
        expected = dense(x)
        expected.backward(grad)

        dim = P(None, "tensor") if sequence else P()
        split = P(None, None, "tensor")
        x_spec, y_spec = (dim, split) if kind == "column" else (split, dim)
        local = shard(x.detach(), x_spec, registry).requires_grad_()
        output = layer(local)
        output.backward(shard(grad, y_spec, registry))
        assert_near(unshard(output.detach(), y_spec, registry), expected)
        assert x.grad is not None
        assert local.grad is not None
        assert_near(unshard(local.grad, x_spec, registry), x.grad)
        assert_same_grads(layer, dense, registry)

        counts = []
        for matmul in (layer.matmul, plain_matmul):
            layer.matmul = matmul
            with collectives() as seen:
                layer(local).sum().backward()
            counts.append(seen["all_reduce"])
        return counts[0] - counts[1]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(("kind", "collectives_per_step"), [("column", 2), ("row", 1)])
def test_fp8_tensor_parallel_layer_matches_unsharded_layer_and_adds_only_scale_all_reduces(
    world: World, kind: str, sequence: bool, collectives_per_step: int
) -> None:
    assert world.run(2, compare_1d_layer, kind, sequence, True) == [collectives_per_step] * 2


@pytest.mark.parametrize("kind", ["column", "row"])
def test_fp8_layers_without_shared_scales_differ_from_unsharded_layer(kind: str) -> None:
    """Negative control of `compare_1d_layer`, in a separate pool because its ranks fail."""
    world = World()
    with pytest.raises(AssertionError, match="relative error"):
        world.run(2, compare_1d_layer, kind, False, False)
    world.close()


def compare_linear_2d(base: Base, bias: BiasLayout | None, topology: Topology) -> None:
    with ProcessGroupRegistry(topology) as registry:
        dense = unsharded_layer(WIDTH, HIDDEN, base)
        rows = ("depth", "row") if "depth" in topology.axes else ("row",)
        layer = Linear2D(WIDTH, HIDDEN, registry, bias=bias, depth="depth" if len(rows) > 1 else None)
        weight_spec = spec_of(layer.weight)
        layer.weight.data = shard(dense.weight.detach().float().t(), weight_spec, registry)
        if layer.bias is not None:
            layer.bias.data = shard(dense.bias.detach().float(), spec_of(layer.bias), registry)
        Fp8(base).prepare(layer, registry)
        x, grad = activations(WIDTH, BATCH, SEQ)
        spec = P(rows, None, "col")
        if bias is None:
            dense.bias = None  # type: ignore[assignment]
        expected = dense(x)
        expected.backward(grad.to(expected.dtype))
        local = shard(x.detach(), spec, registry).requires_grad_()
        output = layer(local)
        output.backward(shard(grad.to(output.dtype), spec, registry))
        dtype = output.dtype
        assert dtype == expected.dtype
        assert_near(unshard(output.detach(), spec, registry), expected)
        assert x.grad is not None
        assert local.grad is not None
        assert layer.weight.grad is not None
        assert dense.weight.grad is not None
        assert_near(unshard(local.grad, spec, registry), x.grad, dtype)
        assert_near(full_grad(layer.weight, weight_spec, registry), dense.weight.grad.t(), dtype)


GRID = Topology(row=2, col=2)


@pytest.mark.parametrize(
    ("base", "bias", "topology"),
    [
        ("fp32", "column", GRID),
        ("fp32", "row0", GRID),
        ("bf16", "all", GRID),
        ("bf16", None, GRID),
        ("fp32", "column", Topology(depth=2, row=1, col=2)),
        ("fp32", "column", Topology(row=1, col=2)),
    ],
)
def test_fp8_linear_2d_matches_unsharded_layer(
    world: World, base: Base, bias: BiasLayout | None, topology: Topology
) -> None:
    world.run(topology.world_size, compare_linear_2d, base, bias, topology)


def layers_that_fall_back() -> tuple[dict[str, str], list[str]]:
    """Return the reasons and log messages for layers that are not in 8 bits.

    The weight shard of only one rank has a multiple of 16 rows; both ranks fall back, without a deadlock.
    """
    with (
        ProcessGroupRegistry(Topology(row=2, col=1, input=1, weight=1, output=1)) as registry,
        warnings_of_fp8() as said,
    ):
        model = nn.ModuleDict({"uneven": Linear2D(31, 16, registry), "cube": Linear3D(32, 32, registry)})
        model["head"], model["last"] = Classifier2D(32, 32, registry), Classifier3D(32, 32, registry)
        Fp8("fp32").prepare(model, registry)
        torch.autograd.backward(model["uneven"](torch.randn(4, 31)).sum())
        for name in ("cube", "head", "last"):
            torch.autograd.backward(model[name](torch.randn(4, 32)).sum())
        return fp8_layers(model), said


def test_fp8_layers_lists_unsupported_2d_and_3d_layers(world: World) -> None:
    (found, said), (same, _) = world.run(2, layers_that_fall_back)
    without = "not in 8 bits: there is no 8-bit product for"
    assert (
        found
        == same
        == {
            "uneven": "not in 8 bits: the layer's features do not divide evenly over the grid of ranks",
            "cube": f"{without} Linear3D",
            "head": f"{without} Classifier2D",
            "last": f"{without} Classifier3D",
        }
    )
    assert len(said) == 1
    assert all(f"{name}: {how}" in said[0] for name, how in found.items())


@contextmanager
def warnings_of_fp8() -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("meshstep.amp.fp8")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def matches_full_batch(spec: P, sync_over_data: bool) -> tuple[bool, int]:
    """Return whether a linear layer on a sharded batch matches the full batch, and the number of collectives."""
    axis = "tensor" if spec.partial else "data"
    with ProcessGroupRegistry(Topology(roles=None, **{axis: 2})) as registry:
        dense, layer = unsharded_layer(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        layer.load_state_dict(dense.state_dict())
        declare(layer, {"*": spec})
        Fp8("fp32", sync_over_data=sync_over_data).prepare(layer, registry)
        x, grad = activations(WIDTH, BATCH, SEQ)
        dense(x).backward(grad)
        assert x.grad is not None
        local = shard(x.detach(), P(axis), registry).requires_grad_()
        with collectives() as seen:
            output = layer(local)
            output.backward(shard(grad, P(axis), registry))
        assert local.grad is not None
        assert layer.weight.grad is not None
        assert dense.weight.grad is not None
        # Sum the gradients of all replicas: `unshard` along a new dim concatenates them.
        total = unshard(layer.weight.grad.unsqueeze(0), P(axis), registry).sum(0)
        pairs = [
            (unshard(output.detach(), P(axis), registry), dense(x).detach()),
            (unshard(local.grad, P(axis), registry), x.grad),
            (total, dense.weight.grad),
        ]
        return all(torch.allclose(a, b, rtol=0, atol=1e-5 * b.abs().max().item()) for a, b in pairs), sum(seen.values())


def test_fp8_linear_on_sharded_batch_matches_full_batch_if_scales_are_shared(world: World) -> None:
    assert world.run(2, matches_full_batch, P(partial="tensor"), False) == [(True, 2)] * 2
    assert world.run(2, matches_full_batch, P(), True) == [(True, 2)] * 2
    # Documented: without sync_over_data each replica computes its own scales without communication.
    assert world.run(2, matches_full_batch, P(), False) == [(False, 0)] * 2


def prepare_undeclared() -> str:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        model = small_model()
        try:
            Fp8().prepare(model, registry)
        except ValueError as error:
            assert {type(module) for module in model} == {nn.Linear, nn.GELU, nn.LayerNorm}
            assert all(param.dtype == torch.float32 for param in model.parameters())
            return str(error)
        return ""


def test_fp8_prepare_raises_for_a_layer_without_spec_and_changes_nothing(world: World) -> None:
    for message in world.run(2, prepare_undeclared):
        assert message.startswith("0.weight has no declared layout")
        assert "declare(model, {'0.weight': P(...)})" in message


def prepare_parallelized() -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).bfloat16()
        declare(model, {"*": P()})
        parallelize_module(model, registry.device_mesh("tensor"), {"0": ColwiseParallel(output_layouts=Replicate())})
        with pytest.raises(
            ValueError, match=r"0\.weight is a DTensor over mesh axes tensor, .*; name the layer in exclude"
        ):
            Fp8().prepare(model, registry)
        declare(model, {"*": P()})
        with pytest.raises(
            ValueError, match=r"0\.weight is a DTensor over mesh axes tensor, .*; name the layer in exclude"
        ):
            Fp8().prepare(model, registry)
        Fp8(exclude=("0",)).prepare(model, registry)
        model(torch.ones(16, 32)).sum().backward()


def test_fp8_prepare_rejects_a_dtensor_over_a_model_axis(world: World) -> None:
    world.run(2, prepare_parallelized)


# One scale per row ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_row_scaled_fp8_layers_match_unsharded_layer(world: World, kind: str, sequence: bool) -> None:
    assert world.run(2, compare_1d_layer, kind, sequence, True, "row") == [1, 1]


@pytest.mark.parametrize("kind", ["column", "row"])
def test_row_scaled_fp8_layers_without_shared_scales_differ_from_unsharded_layer(kind: str) -> None:
    """Negative control of `compare_1d_layer`, in a separate pool because its ranks fail."""
    world = World()
    with pytest.raises(AssertionError, match="relative error"):
        world.run(2, compare_1d_layer, kind, False, False, "row")
    world.close()


def compare_row_scaled_replicas() -> None:
    """Compare row-scaled layers on two replicas, which share the scales of the weight gradient, with the full batch."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        dense, layer = unsharded_layer(WIDTH, HIDDEN, scales="row"), nn.Linear(WIDTH, HIDDEN)
        layer.load_state_dict(dense.state_dict())
        declare(layer, {"*": P()})
        Fp8("fp32", sync_over_data=True, scales="row").prepare(layer, registry)
        x, grad = activations(WIDTH, BATCH, SEQ)
        dense(x).backward(grad)
        layer(shard(x.detach(), P("data"), registry)).backward(shard(grad, P("data"), registry))
        assert layer.weight.grad is not None
        assert dense.weight.grad is not None
        total = unshard(layer.weight.grad.unsqueeze(0), P("data"), registry).sum(0)
        assert_near(total, dense.weight.grad)


def test_row_scaled_fp8_weight_gradient_matches_full_batch_if_scales_are_shared(world: World) -> None:
    world.run(2, compare_row_scaled_replicas)


def grid_by_row() -> str:
    with ProcessGroupRegistry(Topology(row=2, col=2)) as registry:
        model = nn.Sequential(Linear2D(WIDTH, HIDDEN, registry), nn.Tanh())
        before = model[0].matmul
        with pytest.raises(ValueError, match="0 is a Linear2D") as error:
            Fp8("fp32", scales="row").prepare(model, registry)
        assert model[0].matmul is before
        Fp8("fp32", scales="row", exclude=("0",)).prepare(model, registry)
        return str(error.value)


def test_fp8_row_scales_are_rejected_for_linear_2d(world: World) -> None:
    for message in world.run(4, grid_by_row):
        assert "use scales='tensor', or name the layer in exclude" in message
