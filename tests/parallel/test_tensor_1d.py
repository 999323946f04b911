"""1-D tensor parallelism over real ranks, compared with the dense torch model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense import assert_near, assert_same_grads, assert_same_parameters, collectives
from meshstep.parallel import (
    ColumnParallelLinear,
    LayerNorm1D,
    P,
    ProcessGroupRegistry,
    RowParallelLinear,
    Topology,
    VocabParallelEmbedding,
    blocks,
    gather_from,
    scatter_to,
    shard,
    spec_of,
    vocab_parallel_cross_entropy,
)
from meshstep.parallel.layers.cross_entropy import Reduction
from torch import Tensor, nn
from torch.nn import functional as F
from world import World

SEED = 1234
BATCH, SEQ, WIDTH, HIDDEN, VOCAB = 3, 8, 20, 36, 28


def dense_block(bias: bool, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.LayerNorm(WIDTH, bias=bias, dtype=dtype),
        nn.Linear(WIDTH, HIDDEN, bias=bias, dtype=dtype),
        nn.GELU(),
        nn.Linear(HIDDEN, WIDTH, bias=bias, dtype=dtype),
    )


def parallel_block(
    registry: ProcessGroupRegistry, bias: bool, dtype: torch.dtype, sequence_parallel: bool
) -> nn.Sequential:
    torch.manual_seed(SEED)
    return nn.Sequential(
        LayerNorm1D(WIDTH, bias=bias, sequence_parallel=sequence_parallel, dtype=dtype),
        ColumnParallelLinear(WIDTH, HIDDEN, registry, bias=bias, sequence_parallel=sequence_parallel, dtype=dtype),
        nn.GELU(),
        RowParallelLinear(HIDDEN, WIDTH, registry, bias=bias, sequence_parallel=sequence_parallel, dtype=dtype),
    )


def block_equals_dense(size: int, bias: bool, dtype: torch.dtype, sequence_parallel: bool) -> None:
    with ProcessGroupRegistry(Topology(tensor=size)) as registry:
        dense = dense_block(bias, dtype)
        block = parallel_block(registry, bias, dtype, sequence_parallel)
        assert_same_parameters(block, dense, registry)
        dense = dense.double()
        x = torch.randn(BATCH, SEQ, WIDTH, dtype=dtype, requires_grad=True)
        weight = torch.randn(BATCH, SEQ, WIDTH, dtype=dtype)
        expected_input = x.detach().double().requires_grad_()
        expected = dense(expected_input)
        torch.autograd.backward((expected * weight).sum())

        local = scatter_to(x, registry, "tensor", dim=1) if sequence_parallel else x
        output = block(local)
        if sequence_parallel:
            assert output.shape == (BATCH, SEQ // size, WIDTH)
            output = gather_from(output, registry, "tensor", dim=1)
        torch.autograd.backward((output * weight).sum())
        assert_near(output, expected)
        assert x.grad is not None
        assert expected_input.grad is not None
        assert_near(x.grad, expected_input.grad)
        assert_same_grads(block, dense, registry)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_1d_mlp_block_matches_dense_block(
    world: World, size: int, bias: bool, dtype: torch.dtype, sequence_parallel: bool
) -> None:
    world.run(size, block_equals_dense, size, bias, dtype, sequence_parallel)


def test_1d_mlp_block_in_one_process_matches_dense_block() -> None:
    block_equals_dense(1, True, torch.float64, False)
    block_equals_dense(1, True, torch.float64, True)


def full_activations_outside() -> None:
    """Check layers that take and return full activations."""
    with ProcessGroupRegistry(Topology(tensor=4)) as registry:
        torch.manual_seed(SEED)
        dense = nn.Sequential(
            nn.Linear(WIDTH, HIDDEN, dtype=torch.float64), nn.Tanh(), nn.Linear(HIDDEN, WIDTH, dtype=torch.float64)
        )
        torch.manual_seed(SEED)
        layers = nn.Sequential(
            ColumnParallelLinear(WIDTH, HIDDEN, registry, gather_output=True, dtype=torch.float64),
            nn.Tanh(),
            RowParallelLinear(HIDDEN, WIDTH, registry, input_is_parallel=False, dtype=torch.float64),
        )
        x = torch.randn(5, WIDTH, dtype=torch.float64)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [model(input) for model, input in zip((dense, layers), inputs, strict=True)]
        for output in outputs:
            torch.autograd.backward(output.square().sum())
        assert_near(outputs[1], outputs[0])
        assert inputs[0].grad is not None
        assert inputs[1].grad is not None
        assert_near(inputs[1].grad, inputs[0].grad)
        assert_same_grads(layers, dense, registry)


def test_1d_layers_with_full_inputs_and_outputs_match_dense_layers(world: World) -> None:
    world.run(4, full_activations_outside)


def fused_layers(sizes: tuple[int, ...], gather_output: bool) -> None:
    """Check a fused layer: each rank has its shard of every block, and the gathered output equals the dense one."""
    with ProcessGroupRegistry(Topology(tensor=4)) as registry:
        torch.manual_seed(SEED)
        dense = nn.Linear(WIDTH, 48, dtype=torch.float64)
        torch.manual_seed(SEED)
        layer = ColumnParallelLinear(
            WIDTH, 48, registry, blocks=sizes, gather_output=gather_output, dtype=torch.float64
        )
        assert layer.bias is not None
        assert spec_of(layer.weight) == P(blocks("tensor", sizes)) == spec_of(layer.bias)
        assert_same_parameters(layer, dense, registry)
        x = torch.randn(5, WIDTH, dtype=torch.float64)
        weight = torch.randn(5, 48, dtype=torch.float64)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        expected = dense(inputs[0])
        torch.autograd.backward((expected * weight).sum())
        output = layer(inputs[1])
        if gather_output:
            assert_near(output, expected)
            torch.autograd.backward((output * weight).sum())
        else:
            for index, part in enumerate(output.split(layer.block_features, -1)):
                at, features = sum(sizes[:index]) * 48 // sum(sizes), sizes[index] * 48 // sum(sizes)
                assert_near(part, expected[:, at : at + features].chunk(4, -1)[registry.rank("tensor")])
            local = shard(weight, P(None, blocks("tensor", sizes)), registry)
            torch.autograd.backward((output * local).sum())
        assert_same_grads(layer, dense, registry)
        assert inputs[0].grad is not None
        assert inputs[1].grad is not None
        assert_near(inputs[1].grad, inputs[0].grad)


@pytest.mark.parametrize("sizes", [(1, 1), (4, 1, 1)])
@pytest.mark.parametrize("gather_output", [False, True])
def test_fused_column_linear_shards_each_block_and_matches_dense_linear(
    world: World, sizes: tuple[int, ...], gather_output: bool
) -> None:
    world.run(4, fused_layers, sizes, gather_output)


def test_column_linear_rejects_out_features_not_divisible_by_sum_of_blocks() -> None:
    registry = ProcessGroupRegistry(Topology(tensor=1))
    with pytest.raises(ValueError, match="length 40 is not a multiple of 6"):
        ColumnParallelLinear(WIDTH, 40, registry, blocks=(4, 1, 1))


def partial_gradients() -> None:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        norm = LayerNorm1D(WIDTH, sequence_parallel=True)
        x = scatter_to(torch.randn(BATCH, SEQ, WIDTH), registry, "tensor", dim=1)
        torch.autograd.backward(norm(x).square().sum())
        dense = nn.LayerNorm(WIDTH)
        torch.autograd.backward(dense(gather_from(x, registry, "tensor", dim=1)).square().sum())
        assert_same_grads(norm, dense, registry)
        # Without the sum that the spec `P(partial=...)` requests, the gradient is wrong.
        with pytest.raises(AssertionError, match="relative error"):
            assert_near(_grad(norm.weight), _grad(dense.weight))


def _grad(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def test_layer_norm_gradients_under_sequence_parallelism_are_partial(world: World) -> None:
    world.run(2, partial_gradients)


def embedding_equals_dense(size: int, dtype: torch.dtype, sequence_parallel: bool) -> None:
    with ProcessGroupRegistry(Topology(tensor=size)) as registry:
        torch.manual_seed(SEED)
        dense = nn.Embedding(VOCAB, WIDTH, dtype=dtype)
        torch.manual_seed(SEED)
        table = VocabParallelEmbedding(VOCAB, WIDTH, registry, sequence_parallel=sequence_parallel, dtype=dtype)
        assert_same_parameters(table, dense, registry)
        ids = torch.randint(VOCAB, (BATCH, SEQ))
        weight = torch.randn(BATCH, SEQ, WIDTH, dtype=dtype)
        expected = dense(ids)
        torch.autograd.backward((expected * weight).sum())
        output = table(ids)
        if sequence_parallel:
            output = gather_from(output, registry, "tensor", dim=1)
        torch.autograd.backward((output * weight).sum())
        assert torch.equal(output, expected)
        assert_same_grads(table, dense, registry)
        for bad in (VOCAB, -1):
            with pytest.raises(IndexError):
                table(torch.full((1, SEQ), bad))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_vocab_parallel_embedding_matches_dense_embedding(world: World, size: int, sequence_parallel: bool) -> None:
    for dtype in (torch.float64, torch.float32):
        world.run(size, embedding_equals_dense, size, dtype, sequence_parallel)


def cross_entropy_equals_torch(size: int, dtype: torch.dtype, reduction: Reduction) -> None:
    with ProcessGroupRegistry(Topology(tensor=size)) as registry:
        logits = (torch.randn(BATCH, SEQ, VOCAB) * 3).to(dtype)
        target = torch.randint(VOCAB, (BATCH, SEQ))
        logits[0, 0] = 0
        logits[0, 0, 5] = 3e4  # overflows unless the maximum is subtracted first
        logits[0, 1, 3] = -torch.inf
        target[0, 1] = 7
        for ignore_index, ignored in ((-100, -100), (4, 4), (999, 999)):
            target[1, :3] = ignored
            check_loss(logits, target, registry, ignore_index, reduction)
        target[1, :3] = 4
        # Smoothing uses the logits of all classes: -inf would make the loss infinite, and 3e4 its sine inexact.
        finite = logits.clamp(-5.0, 5.0)
        for smoothing in (0.1, 1.0):
            check_loss(finite, target, registry, 4, reduction, smoothing)


def check_loss(
    logits: Tensor,
    target: Tensor,
    registry: ProcessGroupRegistry,
    ignore_index: int,
    reduction: Reduction,
    label_smoothing: float = 0.0,
) -> None:
    reference = logits.detach().double().requires_grad_()
    options: Any = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    expected = F.cross_entropy(reference.movedim(-1, 1), target, **options)
    torch.autograd.backward((expected.sin() if reduction == "none" else expected).sum())
    leaf = logits.clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(scatter_to(leaf, registry, "tensor", dim=-1), target, registry, **options)
    torch.autograd.backward((loss.sin() if reduction == "none" else loss).sum())
    assert loss.dtype is (torch.float64 if logits.dtype is torch.float64 else torch.float32)
    assert_near(loss, expected)
    assert leaf.grad is not None
    assert reference.grad is not None
    assert_near(leaf.grad, reference.grad)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_vocab_parallel_cross_entropy_matches_torch(world: World, size: int, reduction: Reduction) -> None:
    for dtype in (torch.float64, torch.float32):
        world.run(size, cross_entropy_equals_torch, size, dtype, reduction)


def unusual_losses() -> None:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        for dtype in (torch.bfloat16, torch.float16):
            cross_entropy_equals_torch_half(registry, dtype)
        logits = torch.randn(4, 3, requires_grad=True)
        none = vocab_parallel_cross_entropy(logits, torch.full((4,), -100), registry)
        torch.autograd.backward(none)
        assert none.isnan()
        assert torch.equal(_grad(logits), torch.zeros(4, 3))  # as in torch
        poisoned = torch.randn(4, 3)
        if registry.rank("tensor") == 1:
            poisoned[2, 1] = torch.nan
        losses = vocab_parallel_cross_entropy(poisoned, torch.arange(4), registry, reduction="none")
        assert losses.isnan().tolist() == [False, False, True, False]
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            vocab_parallel_cross_entropy(torch.randn(4, 3), torch.tensor([0, 1, 2, 6]), registry)
        with pytest.raises(
            ValueError, match=r"the target has shape \(3,\), but logits .* need a target of shape \(4,\)"
        ):
            vocab_parallel_cross_entropy(torch.randn(4, 3), torch.zeros(3, dtype=torch.int64), registry)
        with pytest.raises(ValueError, match="use 'mean', 'sum' or 'none'"):
            vocab_parallel_cross_entropy(torch.randn(4, 3), torch.arange(4), registry, reduction="max")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"label_smoothing=1\.5 is out of range; give a number from 0 to 1"):
            vocab_parallel_cross_entropy(torch.randn(4, 3), torch.arange(4), registry, label_smoothing=1.5)


def cross_entropy_equals_torch_half(registry: ProcessGroupRegistry, dtype: torch.dtype) -> None:
    logits = torch.randn(5, VOCAB).to(dtype)
    target = torch.randint(VOCAB, (5,))
    reference = logits.float().requires_grad_()
    torch.autograd.backward(F.cross_entropy(reference, target))
    leaf = logits.clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(scatter_to(leaf, registry, "tensor", dim=1), target, registry)
    torch.autograd.backward(loss)
    assert loss.dtype is torch.float32
    assert_near(loss, F.cross_entropy(reference, target))
    assert _grad(leaf).dtype is dtype
    assert_near(_grad(leaf), _grad(reference))


def test_vocab_parallel_cross_entropy_matches_torch_in_half_precision_and_rejects_bad_input(world: World) -> None:
    world.run(2, unusual_losses)


def test_1d_layers_declare_their_specs() -> None:
    registry = ProcessGroupRegistry(Topology(tensor=1))
    column = ColumnParallelLinear(4, 8, registry)
    row = RowParallelLinear(8, 4, registry)
    split = RowParallelLinear(8, 4, registry, sequence_parallel=True)
    assert column.bias is not None
    assert row.bias is not None
    assert split.bias is not None
    assert spec_of(column.weight) == P("tensor", None)
    assert spec_of(column.bias) == P("tensor")
    assert spec_of(row.weight) == P(None, "tensor")
    assert spec_of(row.bias) == P()
    assert spec_of(split.bias) == P(partial="tensor")
    assert spec_of(VocabParallelEmbedding(8, 4, registry).weight) == P("tensor", None)
    assert {spec_of(param) for param in LayerNorm1D(4).parameters()} == {P()}
    under_sequence = LayerNorm1D(4, sequence_parallel=True, axis="model")
    assert {spec_of(param) for param in under_sequence.parameters()} == {P(partial="model")}
    assert repr(column) == "ColumnParallelLinear(4, 8, bias=True, tensor=1)"


def test_1d_layers_with_own_generator_preserve_global_random_state() -> None:
    registry = ProcessGroupRegistry(Topology(tensor=1))
    state = torch.get_rng_state()

    def weights(seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        layers = nn.Sequential(
            VocabParallelEmbedding(6, 4, registry, generator=generator),
            ColumnParallelLinear(4, 8, registry, generator=generator),
            RowParallelLinear(8, 4, registry, generator=generator),
        )
        return list(layers.parameters())

    assert all(torch.equal(a, b) for a, b in zip(weights(3), weights(3), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(weights(3), weights(4), strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def autocast_and_half() -> None:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        for sequence_parallel in (False, True):
            block = parallel_block(registry, True, torch.float32, sequence_parallel)
            x = torch.randn(BATCH, SEQ, WIDTH)
            local = scatter_to(x, registry, "tensor", dim=1) if sequence_parallel else x
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = block(local)
            assert output.dtype is torch.bfloat16
            torch.autograd.backward(output.float().square().sum())
            assert all(_grad(param).dtype is torch.float32 for param in block.parameters())
            if sequence_parallel:
                output = gather_from(output, registry, "tensor", dim=1)
            assert_near(output, dense_block(True, torch.float32)(x))
            for dtype in (torch.bfloat16, torch.float16):
                half = parallel_block(registry, True, dtype, sequence_parallel)
                output = half(local.to(dtype))
                assert output.dtype is dtype
                torch.autograd.backward(output.float().square().sum())
                if sequence_parallel:
                    output = gather_from(output, registry, "tensor", dim=1)
                assert_near(output, dense_block(True, dtype).float()(x.to(dtype).float()))


def test_1d_mlp_block_matches_dense_block_in_autocast_and_half_precision(world: World) -> None:
    world.run(2, autocast_and_half)


def rejected() -> None:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        with pytest.raises(ValueError, match=r"dim 0 .* has length 5, which is not divisible by tensor=2"):
            ColumnParallelLinear(4, 5, registry)
        with pytest.raises(ValueError, match=r"dim 1 .* has length 5, which is not divisible by tensor=2"):
            RowParallelLinear(5, 4, registry)
        with pytest.raises(ValueError, match="is not divisible by tensor=2"):
            VocabParallelEmbedding(5, 4, registry)
        with pytest.raises(ValueError, match="tensr"):
            ColumnParallelLinear(4, 4, registry, axis="tensr")
        with pytest.raises(ValueError, match=r"ColumnParallelLinear .* shape \(3, 4\), but .*; add the missing dim"):
            ColumnParallelLinear(4, 4, registry, sequence_parallel=True)(torch.zeros(3, 4))
        with pytest.raises(ValueError, match=r"VocabParallelEmbedding .* shape \(3,\), but .*; add the missing dim"):
            VocabParallelEmbedding(4, 4, registry, sequence_parallel=True)(torch.zeros(3, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"dim 1 .* has length 3.* pad the dim to a multiple of 2"):
            RowParallelLinear(4, 4, registry, sequence_parallel=True)(torch.zeros(2, 3, 2))


def test_1d_layers_reject_bad_input_on_every_rank(world: World) -> None:
    world.run(2, rejected)


def counted() -> list[dict[str, int]]:
    counts = []
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        for sequence_parallel in (False, True):
            block = parallel_block(registry, True, torch.float32, sequence_parallel)
            x = torch.randn(BATCH, SEQ // 2, WIDTH, requires_grad=True)
            with collectives() as seen:
                torch.autograd.backward(block(x).sum())
            counts.append(dict(seen))
        with collectives() as seen:
            logits = torch.randn(4, 3, requires_grad=True)
            torch.autograd.backward(vocab_parallel_cross_entropy(logits, torch.arange(4), registry))
        counts.append(dict(seen))
    return counts


def test_1d_mlp_block_and_loss_issue_expected_collectives(world: World) -> None:
    plain, sequence, loss = world.run(2, counted)[0]
    assert plain == {"all_reduce": 2}
    assert sequence == {"all_gather_single": 2, "reduce_scatter_single": 2}
    assert loss == {"all_reduce": 2}


def full_input_of_a_row_parallel_layer() -> str:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        layer = RowParallelLinear(8, 3, registry)
        try:
            layer(torch.ones(2, 8))
        except ValueError as error:
            return str(error)
        return "no error"


def test_row_parallel_layer_rejects_full_input_with_advice_on_every_rank(world: World) -> None:
    for text in world.run(2, full_input_of_a_row_parallel_layer):
        assert "the input of RowParallelLinear has shape (2, 8), but its last dim must be 4 (8 features over" in text
        assert text.endswith("scatter_to(input, registry, 'tensor', dim=-1), or give the layer input_is_parallel=False")
