"""The 8-bit linear layer against explicit rounding in float64, alone and split over ranks."""

from __future__ import annotations

import copy
from math import inf, nan
from typing import Literal

import pytest
import torch
from dense import TOLERANCE, assert_near, assert_same_grads, collectives
from hypothesis import given
from hypothesis import strategies as st
from meshstep.amp.fp8 import Fp8
from meshstep.amp.fp8_linear import Fp8Linear, Fp8Matmul, product, scaled_mm
from meshstep.amp.fp8_tensor import E4M3, E5M2, Quantized, agreed_amax, quantize
from meshstep.amp.precision import precision_of
from meshstep.parallel.layout import shard, unshard
from meshstep.parallel.registry import ProcessGroupRegistry
from meshstep.parallel.spec import P, declare, spec_of
from meshstep.parallel.tensor_1d import ColumnParallelLinear, RowParallelLinear
from meshstep.parallel.tensor_2d import BiasLayout, Linear2D
from meshstep.parallel.topology import Topology
from probes import no_host_reads
from torch import Tensor, nn
from torch.nn import functional as F
from world import World

Base = Literal["bf16", "fp32"]
FORMATS = {E4M3: (4, 3, 448.0), E5M2: (5, 2, 57344.0)}  # bits of exponent and mantissa, largest value


# The plain reference -------------------------------------------------------------------------------------------------


def magnitudes(format: torch.dtype) -> Tensor:
    """All finite values >= 0 of the format by code, in float64, from its definition."""
    exponent_bits, mantissa_bits, largest = FORMATS[format]
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, steps)
        significand = mantissa / steps + (exponent > 0)
        values.append(significand * 2.0 ** (max(exponent, 1) - bias))
    return torch.tensor([value for value in values if value <= largest], dtype=torch.float64)


def rounded(x: Tensor, format: torch.dtype) -> Tensor:
    """The nearest value of the format, in float64; ties to the even code; beyond the largest, the largest."""
    values = magnitudes(format)
    distance = (x.double().abs().unsqueeze(-1) - values).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    codes = torch.arange(len(values))
    code = torch.where(nearest, 2 * (codes % 2) * len(values) + codes, 4 * len(values)).argmin(-1)  # even ones first
    return values[code].copysign(x.double())


def reference(x: Tensor, format: torch.dtype, amax: float | None = None) -> Tensor:
    """Quantised and back, in float64; the scale and the scaling are in float32, as documented."""
    largest = x.detach().abs().max().float() if amax is None else torch.tensor(amax)
    scale = FORMATS[format][2] / largest
    return rounded(x.detach().float() * scale, format) / scale.double()


def straight_through(x: Tensor) -> Tensor:
    return x + (reference(x, E4M3) - x).detach()


def reference_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """float64, differentiable: rounded operands in forward, rounded gradient in backward, straight through."""
    y = F.linear(straight_through(x), straight_through(weight))
    y.register_hook(lambda grad: reference(grad, E5M2))
    return y if bias is None else y + bias


# One process ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [E4M3, E5M2])
@given(data=st.data())
def test_rounding_is_to_the_nearest_value_of_the_format(format: torch.dtype, data: st.DataObject) -> None:
    largest = FORMATS[format][2]
    numbers = st.floats(-largest, largest, width=32) | st.floats(-(2.0**-6), 2.0**-6, width=32)
    x = torch.tensor(data.draw(st.lists(numbers, min_size=1, max_size=30)))
    quantized = quantize(x, format, torch.tensor(largest))  # scale 1
    assert quantized.inverse_scale.item() == 1.0
    assert torch.equal(quantized.values.double(), rounded(x, format))


@pytest.mark.parametrize("format", [E4M3, E5M2])
def test_rounding_of_every_value_and_tie(format: torch.dtype) -> None:
    values = magnitudes(format)
    between = (values[1:] + values[:-1]) / 2
    x = torch.cat([values, between, -between, between * (1 + 1e-6), between * (1 - 1e-6)]).float()
    assert torch.equal(quantize(x, format, torch.tensor(FORMATS[format][2])).values.double(), rounded(x, format))
    assert torch.equal(quantize(values, format, values.max().float()).values.double(), values)


@pytest.mark.parametrize("format", [E4M3, E5M2])
@pytest.mark.parametrize("size", [1e-25, 3e-3, 1.0, 7e4, 1e30])
def test_scaling_uses_the_whole_range(format: torch.dtype, size: float) -> None:
    x = torch.randn(200, generator=torch.Generator().manual_seed(1)) * size
    (amax,) = agreed_amax((x,))
    values, inverse = quantize(x, format, amax)
    assert values.float().abs().max().item() == FORMATS[format][2]
    assert_near(values.double() * inverse.double(), reference(x, format), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_the_reference(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(3)
    layer = Fp8Linear(48, 32, bias=bias, dtype=dtype)
    x = torch.randn(3, 7, 48, dtype=dtype, requires_grad=True)  # 21 rows: they needn't be a multiple of 16
    grad = torch.randn(3, 7, 32, dtype=dtype)
    double = [tensor.detach().double().requires_grad_() for tensor in (x, *layer.parameters())]
    output = layer(x)
    expected = reference_linear(*double)
    output.backward(grad)
    expected.backward(grad.double())
    assert output.dtype == dtype
    assert_near(output, expected)
    for tensor, reference_tensor in zip((x, *layer.parameters()), double, strict=True):
        assert tensor.grad is not None
        assert reference_tensor.grad is not None
        assert tensor.grad.dtype == dtype
        assert_near(tensor.grad, reference_tensor.grad)


def test_linear_is_not_the_exact_product() -> None:
    """The negative control of the test above: 8 bits cost what they cost."""
    torch.manual_seed(3)
    layer, x = Fp8Linear(48, 32), torch.randn(21, 48)
    exact = F.linear(x, layer.weight, layer.bias)
    error = (layer(x) - exact).abs().max() / exact.abs().max()
    assert 1e-3 < error < 0.1


def test_main_grads_are_made_in_float32() -> None:
    def grad_of(dtype: torch.dtype) -> Tensor:
        torch.manual_seed(2)
        layer = Fp8Linear(16, 16, bias=False, dtype=torch.bfloat16)
        layer.weight.grad_dtype = dtype
        layer(torch.randn(16, 16, dtype=torch.bfloat16)).sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype == dtype
        return layer.weight.grad

    assert not torch.equal(grad_of(torch.bfloat16).float(), grad_of(torch.float32))
    assert torch.equal(grad_of(torch.bfloat16), grad_of(torch.float32).bfloat16())


@pytest.mark.parametrize(("outputs", "inputs"), [(32, 24), (10, 32), (8, 8)])
def test_other_dims_fall_back_to_the_base(outputs: int, inputs: int) -> None:
    layer, x = Fp8Linear(inputs, outputs), torch.randn(4, inputs, requires_grad=True)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


def test_zeros_and_nothing() -> None:
    layer = Fp8Linear(16, 32)
    assert torch.equal(layer(torch.zeros(2, 16)), layer.bias.expand(2, 32))
    empty = torch.zeros(0, 5, 16, requires_grad=True)
    output = layer(empty)
    assert output.shape == (0, 5, 32)
    output.sum().backward()
    assert layer.weight.grad is not None
    assert not layer.weight.grad.any()


@pytest.mark.parametrize("value", [inf, -inf, nan])
def test_what_is_not_finite_stays_so(value: float) -> None:
    layer, x = Fp8Linear(16, 32), torch.randn(4, 16)
    x[1, 3] = value
    assert not layer(x)[1].isfinite().any()
    grad = torch.randn(4, 32)
    grad[2, 5] = value
    layer(torch.randn(4, 16)).backward(grad)
    assert layer.weight.grad is not None
    assert not layer.weight.grad[5].isfinite().any()


def test_autocast_changes_nothing() -> None:
    layer, x = Fp8Linear(32, 16), torch.randn(5, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), Fp8Matmul()(x, layer.weight, layer.bias))
    assert torch.equal(layer(x), Fp8Matmul()(x, layer.weight, layer.bias))


def test_no_host_reads() -> None:
    layer, x = Fp8Linear(16, 32), torch.randn(4, 16)
    with no_host_reads():
        layer(x).sum().backward()


@pytest.mark.parametrize("rows", [1, 16, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_hardware_path_is_the_emulation(rows: int, dtype: torch.dtype) -> None:
    """torch._scaled_mm runs on the CPU too."""
    torch.manual_seed(4)
    x, weight, grad = torch.randn(rows, 48), torch.randn(32, 48), torch.randn(rows, 32)
    amax = agreed_amax((x, weight, grad))
    x8, weight8, grad8 = quantize(x, E4M3, amax[0]), quantize(weight, E4M3, amax[1]), quantize(grad, E5M2, amax[2])
    products: list[tuple[Quantized, Quantized]] = [(x8, weight8), (grad8, weight8.t()), (grad8.t(), x8.t())]
    for left, right in products:
        assert_near(scaled_mm(left, right, dtype), product(left, right, dtype).double())


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="no 8-bit GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_is_the_emulation(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    layer = Fp8Linear(128, 64, dtype=dtype)
    x, grad = torch.randn(40, 128, dtype=dtype), torch.randn(40, 64, dtype=dtype)
    results = []
    for device in ("cpu", "cuda"):
        there = copy.deepcopy(layer).to(device)
        output = there(x.to(device))
        output.backward(grad.to(device))
        assert there.weight.grad is not None
        results.append((output.cpu(), there.weight.grad.cpu()))
    for on_cpu, on_gpu in zip(*results, strict=True):
        error = (on_gpu.double() - on_cpu.double()).abs().max() / on_cpu.double().abs().max()
        assert error < max(1e-4, TOLERANCE[dtype])  # the tensor cores' running sums have fewer bits


# The mode ------------------------------------------------------------------------------------------------------------


def small_model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 10), nn.Linear(10, 16))


@pytest.mark.parametrize(("base", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_mode_prepares_a_model(base: Base, dtype: torch.dtype) -> None:
    mode, plain = Fp8(base), precision_of(base)
    model, twin = small_model(), small_model()
    plain.prepare(twin)
    params = dict(model.named_parameters())
    keys = list(model.state_dict())
    assert mode.prepare(model) is model
    assert [type(module) for module in model] == [Fp8Linear, nn.GELU, nn.LayerNorm, Fp8Linear, Fp8Linear]
    assert list(model.state_dict()) == keys
    assert all(param is params[name] and param.dtype == dtype for name, param in model.named_parameters())
    assert (mode.masters, mode.stochastic_rounding, mode.make_loss_scale()) == (plain.masters, False, None)
    x = torch.randn(4, 16)
    output = model(x)
    assert output.dtype == dtype
    assert not torch.equal(output, twin(x))
    # The 10 features don't fit, so all but the first layer is the base's.
    assert torch.equal(model[1:](model[0](x.to(dtype))), twin[1:](model[0](x.to(dtype))))
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x), output)


def test_the_mode_has_a_name_and_refuses_other_bases() -> None:
    assert precision_of("fp8") == Fp8() == Fp8("bf16")
    with pytest.raises(ValueError, match="base='fp16' is no base"):
        Fp8("fp16")  # type: ignore[arg-type]


def test_subclasses_and_attention_stay_as_they_are() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(16, 2), nn.Bilinear(16, 16, 16)])
    before = [type(module) for module in model.modules()]
    Fp8("fp32").prepare(model)
    assert [type(module) for module in model.modules()] == before


# Over ranks ----------------------------------------------------------------------------------------------------------

WIDTH, HIDDEN, BATCH, SEQ = 32, 64, 4, 6


def whole(inputs: int, outputs: int, base: Base = "fp32") -> nn.Linear:
    """An 8-bit layer in one process; one outlier, so that its shards have different maxima."""
    torch.manual_seed(11)
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        layer.weight[1, 2] = 1.7
    Fp8(base).prepare(layer)
    return layer


def activations(features: int, *shape: int) -> tuple[Tensor, Tensor]:
    """An input [*shape, features] and the gradient of an output; outliers in the first sample, token and features."""
    generator = torch.Generator().manual_seed(5)
    x, grad = (torch.randn(*shape, size, generator=generator) for size in (features, WIDTH + HIDDEN - features))
    for tensor in (x, grad):
        tensor.view(-1)[1] = 11.0
    return x.requires_grad_(), grad


def split_layer_is_whole(kind: str, sequence: bool, agree: bool) -> float:
    """Compares a prepared 1-D layer with the whole one; the number of collectives that agree on maxima a step."""
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        features = (WIDTH, HIDDEN) if kind == "column" else (HIDDEN, WIDTH)
        cls = ColumnParallelLinear if kind == "column" else RowParallelLinear
        dense = whole(*features)
        layer = cls(*features, registry, sequence_parallel=sequence)
        for param, full in zip(layer.parameters(), dense.parameters(), strict=True):
            param.data = shard(full, spec_of(param), registry)
        plain_matmul = layer.matmul
        Fp8("fp32").prepare(layer, registry)
        assert isinstance(layer.matmul, Fp8Matmul)
        if not agree:
            layer.matmul = Fp8Matmul()
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
@pytest.mark.parametrize(("kind", "collectives_a_step"), [("column", 2), ("row", 1)])
def test_tensor_parallel_layers_are_the_whole_ones(
    world: World, kind: str, sequence: bool, collectives_a_step: int
) -> None:
    assert world.run(2, split_layer_is_whole, kind, sequence, True) == [collectives_a_step] * 2


@pytest.mark.parametrize("kind", ["column", "row"])
def test_without_agreement_they_are_not(kind: str) -> None:
    """The negative control, in a pool of its own because it fails."""
    world = World()
    with pytest.raises(AssertionError, match="relative error"):
        world.run(2, split_layer_is_whole, kind, False, False)
    world.close()


def grid_layer_is_whole(base: Base, bias: BiasLayout | None) -> None:
    with ProcessGroupRegistry(Topology(row=2, col=2)) as registry:
        dense = whole(WIDTH, HIDDEN, base)
        layer = Linear2D(WIDTH, HIDDEN, registry, bias=bias)
        weight_spec = spec_of(layer.weight)
        layer.weight.data = shard(dense.weight.detach().float().t(), weight_spec, registry)
        if layer.bias is not None:
            layer.bias.data = shard(dense.bias.detach().float(), spec_of(layer.bias), registry)
        Fp8(base).prepare(layer, registry)
        x, grad = activations(WIDTH, BATCH, SEQ)
        spec = P("row", None, "col")
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
        assert_near(unshard(layer.weight.grad, weight_spec, registry), dense.weight.grad.t(), dtype)


@pytest.mark.parametrize(("base", "bias"), [("fp32", "column"), ("fp32", "row0"), ("bf16", "all"), ("bf16", None)])
def test_the_grid_layer_is_the_whole_one(world: World, base: Base, bias: BiasLayout | None) -> None:
    world.run(4, grid_layer_is_whole, base, bias)


def replicas_are_whole(spec: P, across_data: bool) -> tuple[bool, int]:
    """A linear layer whose batch is split over an axis: whether this rank's output is the whole one's part."""
    axis = "tensor" if spec.partial else "data"
    with ProcessGroupRegistry(Topology(**{axis: 2})) as registry:  # type: ignore[arg-type]
        dense, layer = whole(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        layer.load_state_dict(dense.state_dict())
        declare(layer, {"*": spec})
        Fp8("fp32", across_data=across_data).prepare(layer, registry)
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
        # Sums of the replicas' terms; `unshard` of an extra dim is a gather.
        total = unshard(layer.weight.grad.unsqueeze(0), P(axis), registry).sum(0)
        pairs = [
            (unshard(output.detach(), P(axis), registry), dense(x).detach()),
            (unshard(local.grad, P(axis), registry), x.grad),
            (total, dense.weight.grad),
        ]
        return all(torch.allclose(a, b, rtol=0, atol=1e-5 * b.abs().max().item()) for a, b in pairs), sum(seen.values())


def test_an_activation_that_is_split_over_an_axis(world: World) -> None:
    assert world.run(2, replicas_are_whole, P(partial="tensor"), False) == [(True, 2)] * 2
    assert world.run(2, replicas_are_whole, P(), True) == [(True, 2)] * 2
    # Documented: without across_data each replica scales for itself, and nothing is sent.
    assert world.run(2, replicas_are_whole, P(), False) == [(False, 0)] * 2


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


def test_an_undeclared_layer_is_named_and_nothing_is_changed(world: World) -> None:
    for message in world.run(2, prepare_undeclared):
        assert message.startswith("0.weight has no spec")
        assert "declare(model, {'0.weight': P(...)})" in message
