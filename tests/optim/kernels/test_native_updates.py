"""Updates by the compiled loops: accuracy, rounding, and bitwise equality of loop variants and numbers of threads."""

from __future__ import annotations

from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import HALVES, INF, KINDS, RULES, Case, Rule, some_values, states_of, steps_as_the_reference
from kernel_formulas import SGD, Adagrad, Adam, Lion
from loops import loops, variants_here, with_threads, with_variant
from meshstep.optim.kernels import native as native_module
from meshstep.optim.step.c_engine import update_by_loops
from properties import number_of_cases
from torch import Tensor

VARIANTS = variants_here()


class ByLoops(Case):
    """A case whose update runs in the compiled loops."""

    def step(self, factor: float, found_inf: float = 0.0) -> None:
        flag, half = torch.tensor(found_inf), self.half_dtype or torch.bfloat16
        update_by_loops(
            loops(), KINDS[type(self.rule)], self.columns(), self.hyper, factor, flag, self.grad_dtype, half
        )


@settings(max_examples=number_of_cases(120))
@given(
    rule=RULES,
    numels=st.lists(st.sampled_from([0, 1, 15, 16, 17, 1023, 1024, 1025, 5000, 16385]), min_size=1, max_size=4),
    grad_dtype=st.sampled_from([torch.float32, *HALVES]),
    half=st.sampled_from([None, *HALVES]),
    factor=st.sampled_from([1.0, 0.37, -0.37, 1e-4]),
    variant=st.sampled_from(VARIANTS),
    seed=st.integers(0, 2**31),
)
def test_native_loop_update_matches_float64_reference(
    rule: Rule,
    numels: list[int],
    grad_dtype: torch.dtype,
    half: torch.dtype | None,
    factor: float,
    variant: str,
    seed: int,
) -> None:
    with with_variant(variant):
        steps_as_the_reference(ByLoops(rule, numels, grad_dtype, half, seed), factor)


@pytest.mark.parametrize("rule", [Adam(1e-3), Adam(1e-3, weight_decay=0.1, decoupled=False)], ids=repr)
@pytest.mark.parametrize("grad_dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("half", [None, *HALVES])
def test_native_loop_adam_updates_are_bitwise_identical_for_all_loop_variants(
    rule: Rule, grad_dtype: torch.dtype, half: torch.dtype | None
) -> None:
    results = list[list[Tensor]]()
    for variant in VARIANTS:
        case = ByLoops(rule, [5, 16, 31, 1024, 20_001], grad_dtype, half, seed=8)
        with with_variant(variant):
            case.step(0.37)
        results.append(case.everything())
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("rule", [Adam(1e-3, amsgrad=True), SGD(0.1, momentum=0.9), Adagrad(0.1), Lion(0.1)], ids=repr)
def test_native_loop_updates_are_bitwise_identical_for_all_loop_variants_and_threads(rule: Rule) -> None:
    results = list[list[Tensor]]()
    for variant, (threads, torchs) in product(VARIANTS, ((1, True), (3, True), (3, False))):
        case = ByLoops(rule, [5, 700_001, 16384, 300_000], torch.bfloat16, torch.float16, seed=4)
        with with_threads(threads, torchs), with_variant(variant):
            case.step(0.37)
        results.append(case.everything())
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("rule", [Adam(1e-3), SGD(0.1, momentum=0.9), Adagrad(0.1), Lion(0.1)], ids=repr)
@pytest.mark.parametrize("variant", VARIANTS)
def test_skipped_native_loop_update_changes_nothing(rule: Rule, variant: str) -> None:
    case = ByLoops(rule, [5, 20_000], torch.float32, torch.bfloat16, seed=5)
    case.grads[0][2] = torch.nan
    before = deepcopy(case.everything())
    with with_variant(variant):
        case.step(float("nan"), found_inf=1.0)
    assert all(torch.equal(now, then) for now, then in zip(case.everything(), before, strict=True))
    case.step(0.5)
    assert not torch.equal(case.params[1], before[1])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("grad_dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("rule", [Lion(0.03), Lion(0.03, 0.5, 0.8, 0.3), Lion(0.0, weight_decay=0.1)], ids=repr)
def test_native_loop_lion_update_has_the_bits_of_torch_operations(
    rule: Lion, grad_dtype: torch.dtype, variant: str
) -> None:
    """The reference steps one float32 tensor after the other. Values include zeros of both signs, denormals and NaN.
    A reference that multiplies by the factor, instead of dividing by 1 / factor, has other bits."""
    numels = [0, 1, 15, 1025, 20_001]
    case = ByLoops(rule, numels, grad_dtype, torch.bfloat16, seed=3)
    case.params = [some_values((numel,), torch.float32, 1.0, numel) for numel in numels]
    case.grads = [some_values((numel,), grad_dtype, 1.0, 1 + numel) for numel in numels]
    case.states = [[some_values((numel,), torch.float32, 0.1, 2 + numel)] for numel in numels]
    case.grads[-1][:9] = 0.0
    case.states[-1][0][:6] = torch.tensor([0.0, -0.0, 1.0, torch.nan, torch.inf, -torch.inf])
    scale, wanted, wrong = torch.tensor(1 / 0.37), deepcopy(case), deepcopy(case)
    with with_variant(variant):
        for t in range(3):
            case.step(0.37)
            for i, grad in enumerate(case.grads):
                rule.step(wanted.params[i], grad.float() / scale, wanted.states[i], t)
                rule.step(wrong.params[i], grad.float() * 0.37, wrong.states[i], t)
    assert bits(case) == bits(wanted)
    assert bits(case) != bits(wrong)


def bits(case: Case) -> list[list[int]]:
    """Return the bits of parameters and states; all NaNs have the same bits."""
    tensors = [*case.params, *(state for states in case.states for state in states)]
    return [tensor.masked_fill(tensor.isnan(), torch.nan).view(torch.int32).tolist() for tensor in tensors]


def values_to_round(half: torch.dtype) -> Tensor:
    """Return all 2^16 values of the dtype, their neighbours and midpoints as float32: ties, denormals, overflow, NaN."""
    bits = torch.arange(2**16, dtype=torch.int32)
    exact = bits.to(torch.int16).view(half).float()
    between = (exact + exact.roll(-1)) / 2
    one_nan = torch.ones(256, dtype=torch.int32)
    one_nan[::17] = 2**31 - 1  # a NaN at each position of a vector; rounding up the NaN's bits would give -0
    neighbours = (torch.nextafter(x, s) for x in (exact, between) for s in (-INF, INF))
    return torch.cat([exact, between, *neighbours, one_nan.view(torch.float32)])


def assert_rounded_as_torch(found: Tensor, exact: Tensor) -> None:
    """Assert that ``found`` has the bits of ``exact`` rounded by torch; NaNs may differ in their bits."""
    wanted = exact.to(found.dtype)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(7.0).view(torch.int16), wanted.nan_to_num(7.0).view(torch.int16))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("rule", [SGD(1.0), Adam(0.0), Adam(0.0, decoupled=False)], ids=repr)
@pytest.mark.parametrize("half_gradients", [False, True])
def test_native_loop_update_rounds_low_precision_weights_as_torch(
    variant: str, half: torch.dtype, rule: Rule, half_gradients: bool
) -> None:
    """Adam rounds inside its loop if the variant has vector instructions; the other rules round in a second loop."""
    values = values_to_round(half)
    grad_dtype = half if half_gradients else torch.float32
    case = ByLoops(rule, [values.numel()], grad_dtype, half, seed=6)
    case.params, case.grads = [values.clone()], [torch.zeros_like(values, dtype=grad_dtype)]
    with with_variant(variant):
        case.step(1.0)
    assert case.halves is not None
    assert_rounded_as_torch(case.halves[0], case.params[0])


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("half", HALVES)
def test_native_loop_adam_update_of_many_elements_rounds_low_precision_weights_as_torch(
    variant: str, half: torch.dtype
) -> None:
    """If an update has 2^23 elements or more, the loop writes copies past the caches, if they begin at a cache line.

    The second copy does not begin at a cache line.
    """
    values, many = values_to_round(half), 2**23
    case = ByLoops(Adam(0.0), [values.numel(), values.numel(), many], torch.float32, half, seed=6)
    case.params = [values.clone(), values.clone(), torch.zeros(many)]
    case.grads = [torch.zeros_like(param) for param in case.params]
    assert case.halves is not None
    case.halves[1] = torch.empty(values.numel() + 1, dtype=half)[1:]
    with with_variant(variant), with_threads(2, torchs=False):
        case.step(1.0)
    for copy, param in zip(case.halves, case.params, strict=True):
        assert_rounded_as_torch(copy, param)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("half", HALVES)
def test_native_loop_sgd_update_reads_low_precision_gradients_as_torch(variant: str, half: torch.dtype) -> None:
    """The test covers all 2^16 values: one SGD step from zero with a learning rate of -1 gives the gradient."""
    grads = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(half)
    case = ByLoops(SGD(-1.0), [2**16], half, None, seed=7)
    case.params, case.grads = [torch.zeros(2**16)], [grads]
    with with_variant(variant):
        case.step(1.0)
    assert torch.equal(case.params[0].nan_to_num(0.5), grads.float().nan_to_num(0.5))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("grad_dtype", HALVES)
@pytest.mark.parametrize("half", [None, *HALVES])
def test_native_loop_adam_update_reads_low_precision_gradients_as_torch(
    variant: str, grad_dtype: torch.dtype, half: torch.dtype | None
) -> None:
    """The test covers all 2^16 values: with a ``beta1`` of 0, the first moment is the gradient."""
    grads = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(grad_dtype)
    case = ByLoops(Adam(1e-3, beta1=0.0), [2**16], grad_dtype, half, seed=7)
    case.grads = [grads]
    with with_variant(variant):
        case.step(1.0)
    assert torch.equal(case.states[0][0].nan_to_num(0.5), grads.float().nan_to_num(0.5))


MAKE: list[tuple[type[torch.optim.Optimizer], dict[str, Any], Rule]] = [
    (torch.optim.AdamW, {"weight_decay": 0.3, "lr": 1e-2}, Adam(1e-2, weight_decay=0.3)),
    (
        torch.optim.Adam,
        {"weight_decay": 0.3, "amsgrad": True},
        Adam(1e-3, weight_decay=0.3, decoupled=False, amsgrad=True),
    ),
    (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        SGD(0.1, 0.9, 0.0, 0.1, True),
    ),
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "eps": 1e-6}, Adagrad(0.1, 0.1, 1e-6)),
]


@pytest.mark.parametrize(("kind", "options", "rule"), MAKE)
def test_reference_update_matches_torch_optimizer(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], rule: Rule
) -> None:
    """The float64 weights after ten steps are compared."""
    generator = torch.Generator().manual_seed(8)
    param = torch.nn.Parameter(torch.randn(50, generator=generator, dtype=torch.float64))
    ours, states = param.detach().clone(), [torch.zeros(50, dtype=torch.float64) for _ in range(states_of(rule))]
    optimizer: Any = kind([param], **options)
    for t in range(1, 11):
        param.grad = torch.randn(50, generator=generator, dtype=torch.float64)
        rule.step(ours, param.grad, states, t)
        optimizer.step()
    torch.testing.assert_close(param.detach(), ours, rtol=1e-13, atol=1e-15)


def test_native_library_with_other_interface_version_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Functions of another interface version take other arguments."""
    if native_module.built() is None:
        pytest.skip("the installation has no compiled loops")
    monkeypatch.setattr(native_module, "INTERFACE", native_module.INTERFACE + 1)
    assert native_module.built() is None
    assert "install the package again" in caplog.text
