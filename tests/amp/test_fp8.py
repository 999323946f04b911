"""The 8-bit linear layer compared with explicit rounding in float64, and the `Fp8` mode that makes such layers."""

from __future__ import annotations

import copy
from math import inf, nan

import pytest
import torch
from dense import TOLERANCE, assert_near
from hypothesis import given
from hypothesis import strategies as st
from meshstep.amp import Fp8, fp8_layers, precision_of
from meshstep.amp.fp8_linear import (
    E4M3,
    E5M2,
    Fp8Linear,
    Fp8Matmul,
    Fp8RowMatmul,
    Quantized,
    global_amax,
    product,
    quantize,
    scaled_mm,
)
from probes import no_host_reads
from small_models import Base, small_model
from torch import Tensor, nn
from torch.nn import functional as F

FORMATS = {E4M3: (4, 3, 448.0), E5M2: (5, 2, 57344.0)}  # bits of exponent and mantissa, largest value


# The plain reference -------------------------------------------------------------------------------------------------


def magnitudes(format: torch.dtype) -> Tensor:
    """Return all finite values >= 0 of the format in float64, in the order of their codes."""
    exponent_bits, mantissa_bits, largest = FORMATS[format]
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, steps)
        significand = mantissa / steps + (exponent > 0)
        values.append(significand * 2.0 ** (max(exponent, 1) - bias))
    return torch.tensor([value for value in values if value <= largest], dtype=torch.float64)


def rounded(x: Tensor, format: torch.dtype) -> Tensor:
    """Round to the nearest value of the format, in float64. Ties go to the even code; larger values are clamped."""
    values = magnitudes(format)
    distance = (x.double().abs().unsqueeze(-1) - values).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    codes = torch.arange(len(values))
    code = torch.where(nearest, 2 * (codes % 2) * len(values) + codes, 4 * len(values)).argmin(-1)  # prefers even codes
    return values[code].copysign(x.double())


def reference(x: Tensor, format: torch.dtype, amax: float | None = None) -> Tensor:
    """Quantize and dequantize in float64; the scale, and its product with ``x``, are in float32, as in `quantize`."""
    largest = x.detach().abs().max().float() if amax is None else torch.tensor(amax)
    scale = FORMATS[format][2] / largest
    return rounded(x.detach().float() * scale, format) / scale.double()


def straight_through(x: Tensor) -> Tensor:
    return x + (reference(x, E4M3) - x).detach()


def reference_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear layer in float64. Round operands in forward (straight-through) and the output gradient in backward."""
    y = F.linear(straight_through(x), straight_through(weight))
    y.register_hook(lambda grad: reference(grad, E5M2))
    return y if bias is None else y + bias


# One process ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [E4M3, E5M2])
@given(data=st.data())
def test_fp8_quantize_rounds_to_the_nearest_value_of_the_format(format: torch.dtype, data: st.DataObject) -> None:
    largest = FORMATS[format][2]
    numbers = st.floats(-largest, largest, width=32) | st.floats(-(2.0**-6), 2.0**-6, width=32)
    x = torch.tensor(data.draw(st.lists(numbers, min_size=1, max_size=30)))
    quantized = quantize(x, format, torch.tensor(largest))  # scale 1
    assert quantized.inverse_scale.item() == 1.0
    assert torch.equal(quantized.values.double(), rounded(x, format))


@pytest.mark.parametrize("format", [E4M3, E5M2])
def test_fp8_quantize_keeps_representable_values_and_rounds_ties_to_even(format: torch.dtype) -> None:
    values = magnitudes(format)
    between = (values[1:] + values[:-1]) / 2
    x = torch.cat([values, between, -between, between * (1 + 1e-6), between * (1 - 1e-6)]).float()
    assert torch.equal(quantize(x, format, torch.tensor(FORMATS[format][2])).values.double(), rounded(x, format))
    assert torch.equal(quantize(values, format, values.max().float()).values.double(), values)


@pytest.mark.parametrize("format", [E4M3, E5M2])
@pytest.mark.parametrize("size", [1e-25, 3e-3, 1.0, 7e4, 1e30])
def test_fp8_quantize_scales_to_the_full_range_of_the_format(format: torch.dtype, size: float) -> None:
    x = torch.randn(200, generator=torch.Generator().manual_seed(1)) * size
    values, inverse = quantize(x, format, global_amax(x))
    assert values.float().abs().max().item() == FORMATS[format][2]
    assert_near(values.double() * inverse.double(), reference(x, format), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_fp8_linear_matches_float64_reference(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(3)
    layer = Fp8Linear(48, 32, bias=bias, dtype=dtype)
    # The input has 21 rows, because the number of rows need not be a multiple of 16.
    x = torch.randn(3, 7, 48, dtype=dtype, requires_grad=True)
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


def test_fp8_linear_differs_from_exact_product_by_8_bit_rounding() -> None:
    """Negative control of `test_fp8_linear_matches_float64_reference`: 8-bit rounding has a visible error."""
    torch.manual_seed(3)
    layer, x = Fp8Linear(48, 32), torch.randn(21, 48)
    exact = F.linear(x, layer.weight, layer.bias)
    error = (layer(x) - exact).abs().max() / exact.abs().max()
    assert 1e-3 < error < 0.1


def test_fp8_linear_computes_weight_gradient_in_float32() -> None:
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
def test_fp8_linear_equals_plain_linear_if_a_dim_is_no_multiple_of_16(outputs: int, inputs: int) -> None:
    layer, x = Fp8Linear(inputs, outputs), torch.randn(4, inputs, requires_grad=True)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


def test_fp8_linear_returns_bias_for_zeros_and_accepts_empty_batches() -> None:
    layer = Fp8Linear(16, 32)
    assert torch.equal(layer(torch.zeros(2, 16)), layer.bias.expand(2, 32))
    empty = torch.zeros(0, 5, 16, requires_grad=True)
    output = layer(empty)
    assert output.shape == (0, 5, 32)
    output.sum().backward()
    assert layer.weight.grad is not None
    assert not layer.weight.grad.any()


@pytest.mark.parametrize("value", [inf, -inf, nan])
def test_fp8_linear_propagates_non_finite_values(value: float) -> None:
    layer, x = Fp8Linear(16, 32), torch.randn(4, 16)
    x[1, 3] = value
    assert not layer(x)[1].isfinite().any()
    grad = torch.randn(4, 32)
    grad[2, 5] = value
    layer(torch.randn(4, 16)).backward(grad)
    assert layer.weight.grad is not None
    assert not layer.weight.grad[5].isfinite().any()


def test_fp8_linear_equals_fp8_matmul_with_and_without_autocast() -> None:
    layer, x = Fp8Linear(32, 16), torch.randn(5, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), Fp8Matmul()(x, layer.weight, layer.bias))
    assert torch.equal(layer(x), Fp8Matmul()(x, layer.weight, layer.bias))


def test_fp8_linear_causes_no_host_synchronization() -> None:
    layer, x = Fp8Linear(16, 32), torch.randn(4, 16)
    with no_host_reads():
        layer(x).sum().backward()


@pytest.mark.parametrize("rows", [1, 16, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_scaled_mm_matches_emulated_product(rows: int, dtype: torch.dtype) -> None:
    """torch._scaled_mm runs on the CPU too."""
    torch.manual_seed(4)
    x, weight, grad = torch.randn(rows, 48), torch.randn(32, 48), torch.randn(rows, 32)
    x8, weight8 = quantize(x, E4M3, global_amax(x)), quantize(weight, E4M3, global_amax(weight))
    grad8 = quantize(grad, E5M2, global_amax(grad))
    products: list[tuple[Quantized, Quantized]] = [(x8, weight8), (grad8, weight8.t()), (grad8.t(), x8.t())]
    for left, right in products:
        assert_near(scaled_mm(left, right, dtype), product(left, right, dtype).double())


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs an fp8 GPU"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_linear_on_gpu_matches_emulation_on_cpu(dtype: torch.dtype) -> None:
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
        assert error < max(1e-4, TOLERANCE[dtype])  # tensor cores accumulate with fewer bits


# The mode ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("base", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_fp8_prepare_replaces_linear_layers_in_place_and_keeps_parameters(base: Base, dtype: torch.dtype) -> None:
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
    # 10 is not a multiple of 16, so all layers except the first are computed in the base mode.
    assert torch.equal(model[1:](model[0](x.to(dtype))), twin[1:](model[0](x.to(dtype))))
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x), output)


def test_fp8_mode_defaults_to_bf16_base_and_rejects_fp16_base() -> None:
    assert precision_of("fp8") == Fp8() == Fp8("bf16")
    with pytest.raises(ValueError, match="base='fp16' is not a base mode of Fp8"):
        Fp8("fp16")  # type: ignore[arg-type]


def test_fp8_mode_leaves_multihead_attention_and_bilinear_layers_unchanged() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(16, 2), nn.Bilinear(16, 16, 16)])
    before = [type(module) for module in model.modules()]
    Fp8("fp32").prepare(model)
    assert [type(module) for module in model.modules()] == before


# Which layers ---------------------------------------------------------------------------------------------------------


def test_fp8_layers_gives_a_reason_for_each_layer_not_in_8_bits(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(small_model(), nn.MultiheadAttention(16, 2))
    Fp8(exclude=("0.0",)).prepare(model)
    fell_back = "not in 8 bits: a dim of this rank's weight is not a multiple of 16"
    assert fp8_layers(model) == {
        "0.0": "not in 8 bits: left out",
        "0.3": fell_back,
        "0.4": fell_back,
        "1": "not in 8 bits: nn.MultiheadAttention multiplies its weights without nn.Linear",
        "1.out_proj": "not in 8 bits: NonDynamicallyQuantizableLinear is a subclass of nn.Linear, "
        "which the mode does not change",
    }
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "2 of 5 linear layers are computed in bf16 and not in 8 bits, because a dim of their weight is not a multiple "
        "of 16: "
        "0.3 (10, 32), 0.4 (16, 10)"
    )
    assert "not in 8 bits: dims must be multiples of 16" in repr(model.get_submodule("0.3"))
    caplog.clear()
    fitting = nn.Sequential(nn.Linear(16, 32))
    Fp8("fp32").prepare(fitting)
    assert fp8_layers(fitting) == {"0": "8 bits"}
    assert not caplog.records
    assert "8 bits" not in repr(fitting[0])


def test_layers_excluded_from_fp8_equal_plain_linear_layers() -> None:
    model, plain = (nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    Fp8("fp32", exclude=("1",)).prepare(model)
    assert [type(module) for module in model] == [Fp8Linear, nn.Linear]
    x = torch.randn(3, 16)
    assert not torch.equal(model[0](x), plain[0](x))
    assert torch.equal(model[1](plain[0](x)), plain(x))


def test_fp8_exclude_accepts_a_generator_of_names() -> None:
    assert Fp8(exclude=(name for name in ("head", "*.out"))).exclude == ("head", "*.out")  # type: ignore[arg-type]


def test_invalid_fp8_options_raise_and_change_nothing() -> None:
    model = small_model()
    with pytest.raises(ValueError, match=r"exclude='head' matches no linear layer; choose from 0, 3, 4"):
        Fp8(exclude=("3", "head")).prepare(model)
    assert [type(module) for module in model] == [nn.Linear, nn.GELU, nn.LayerNorm, nn.Linear, nn.Linear]
    with pytest.raises(ValueError, match=r"exclude='head' is not a tuple of strings; give names or patterns"):
        Fp8(exclude="head")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"exclude=3 is not a tuple of strings"):
        Fp8(exclude=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"scales='block' is unknown; give 'tensor' \(one per tensor\) or 'row'"):
        Fp8(scales="block")  # type: ignore[arg-type]


# One scale per row ----------------------------------------------------------------------------------------------------


def by_row(x: Tensor, format: torch.dtype) -> Tensor:
    return torch.stack([reference(row, format) for row in x])


def reference_row_linear(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, input gradient and weight gradient in float64; each product rounds its operands per row."""
    return (
        by_row(x, E4M3) @ by_row(weight, E4M3).t(),
        by_row(grad, E5M2) @ by_row(weight.t(), E4M3).t(),
        by_row(grad.t(), E5M2) @ by_row(x.t(), E4M3).t(),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_scaled_fp8_linear_matches_float64_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    layer = nn.Linear(48, 32)
    Fp8("bf16" if dtype == torch.bfloat16 else "fp32", scales="row").prepare(layer)
    assert layer.matmul == Fp8RowMatmul()
    x, grad = (torch.randn(3, 7, size) * torch.logspace(-3, 3, 7)[:, None] for size in (48, 32))
    x, grad = x.to(dtype).requires_grad_(), grad.to(dtype)
    output = layer(x)
    output.backward(grad)
    flat = [tensor.detach().double().flatten(0, 1) for tensor in (x, grad)]
    expected = reference_row_linear(flat[0], layer.weight.detach().double(), flat[1])
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert_near(output.flatten(0, 1) - layer.bias, expected[0], dtype)
    assert_near(x.grad.flatten(0, 1), expected[1], dtype)
    assert_near(layer.weight.grad, expected[2], dtype)


def test_fp8_row_scales_limit_the_error_of_an_outlier_to_its_row() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(20, 64), torch.randn(32, 64)
    exact = F.linear(x, weight)
    x[0] *= 1e7  # with one scale per tensor, the other rows round to zero
    worst = [
        ((how(x, weight) - exact)[1:].abs().max() / exact.abs().max()).item() for how in (Fp8Matmul(), Fp8RowMatmul())
    ]
    assert worst[0] > 0.5
    assert worst[1] < 0.1


@pytest.mark.parametrize("value", [inf, nan])
def test_row_scaled_fp8_linear_propagates_non_finite_values(value: float) -> None:
    layer, x = nn.Linear(16, 32), torch.randn(4, 16)
    Fp8("fp32", scales="row").prepare(layer)
    x[1, 3] = value
    output = layer(x)
    assert not output[1].isfinite().any()
    assert output[[0, 2, 3]].isfinite().all()
    output.sum().backward()
    assert layer.weight.grad is not None
    assert not layer.weight.grad[:, 3].isfinite().any()
    nothing = layer(torch.zeros(0, 16, requires_grad=True))
    nothing.sum().backward()
    assert nothing.shape == (0, 32)


def test_row_scaled_fp8_linear_causes_no_host_synchronization() -> None:
    layer, x = nn.Linear(16, 32), torch.randn(4, 16)
    Fp8("fp32", scales="row").prepare(layer)
    with no_host_reads():
        layer(x).sum().backward()
