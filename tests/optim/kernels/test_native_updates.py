"""Updates by the compiled loops: those of the reference in float64 to two units in the last place, and torch's."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import astuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import instructions_here, loops, with_instructions
from meshstep.optim.kernels.native import Columns, Kind
from meshstep.optim.kernels.reference import SGD, Adagrad, Adam
from properties import number_of_cases
from torch import Tensor

Rule = Adam | SGD | Adagrad
KINDS = {Adam: Kind.ADAM, SGD: Kind.SGD, Adagrad: Kind.ADAGRAD}
HALVES = (torch.bfloat16, torch.float16)

INSTRUCTIONS = instructions_here()


@pytest.fixture(autouse=True)
def _best_instructions() -> Iterator[None]:
    yield
    loops().take(None)


def states_of(rule: Rule) -> int:
    if isinstance(rule, Adam):
        return 3 if rule.amsgrad else 2
    return 1 if isinstance(rule, Adagrad) or rule.momentum else 0


class Case:
    """Float32 tensors with states as after some steps, and what is done to them."""

    def __init__(
        self, rule: Rule, numels: list[int], grad_dtype: torch.dtype, half: torch.dtype | None, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def values(numel: int) -> Tensor:
            return torch.randn(numel, generator=generator)

        self.rule, self.grad_dtype, self.half_dtype = rule, grad_dtype, half
        self.params = [values(numel) for numel in numels]
        self.grads = [values(numel).mul_(3.0).to(grad_dtype) for numel in numels]
        self.states = [[values(numel).abs_() for _ in range(states_of(rule))] for numel in numels]
        self.steps = [torch.tensor(float(4 + index)) for index in range(len(numels))]
        self.halves = None if half is None else [param.to(half) for param in self.params]

    def columns(self) -> Columns:
        """What is stepped."""
        counts = not isinstance(self.rule, SGD)
        columns = [self.params, *([states[i] for states in self.states] for i in range(states_of(self.rule)))]
        fixed = [tensor.data_ptr() for column in columns for tensor in column]
        fixed += [0] * (len(self.params) * (4 - len(columns)))
        fixed += [step.data_ptr() if counts else 0 for step in self.steps]
        return Columns(
            array("Q", fixed),
            array("Q", [grad.data_ptr() for grad in self.grads]),
            array("q", [param.numel() for param in self.params]),
            None if self.halves is None else array("Q", [half.data_ptr() for half in self.halves]),
        )

    @property
    def hyper(self) -> list[float]:
        """The rule's, in the order of the loops."""
        return [float(value) for value in astuple(self.rule)]

    def step(self, factor: float, found_inf: float = 0.0) -> None:
        """By the loops."""
        flag, half = torch.tensor(found_inf), self.half_dtype or torch.bfloat16
        loops().update(KINDS[type(self.rule)], self.columns(), self.hyper, factor, flag, self.grad_dtype, half)

    def expected(self, factor: float) -> list[list[Tensor]]:
        """Of each tensor the parameter and its states after the step, in float64."""
        found = []
        for param, grad, states, step in zip(self.params, self.grads, self.states, self.steps, strict=True):
            p, kept = param.double(), [state.double() for state in states]
            self.rule.step(p, grad.double() * factor, kept, int(step) + 1)
            found.append([p, *kept])
        return found

    def everything(self) -> list[Tensor]:
        """All that a step may change."""
        return [*self.params, *(s for states in self.states for s in states), *self.steps, *(self.halves or ())]


RULES = st.one_of(
    st.builds(
        Adam,
        lr=st.sampled_from([1e-3, 0.3]),
        beta1=st.sampled_from([0.9, 0.0]),
        beta2=st.sampled_from([0.999, 0.5]),
        weight_decay=st.sampled_from([0.0, 0.3]),
        decoupled=st.booleans(),
        amsgrad=st.booleans(),
    ),
    st.builds(
        SGD,
        lr=st.just(0.1),
        momentum=st.sampled_from([0.0, 0.9]),
        dampening=st.sampled_from([0.0, 0.25]),
        weight_decay=st.sampled_from([0.0, 0.3]),
        nesterov=st.booleans(),
    ),
    st.builds(Adagrad, lr=st.just(0.1), lr_decay=st.sampled_from([0.0, 0.1]), weight_decay=st.sampled_from([0.0, 0.3])),
)


@settings(max_examples=number_of_cases(120))
@given(
    rule=RULES,
    numels=st.lists(st.sampled_from([0, 1, 15, 16, 17, 1023, 1024, 1025, 5000, 16385]), min_size=1, max_size=4),
    grad_dtype=st.sampled_from([torch.float32, *HALVES]),
    half=st.sampled_from([None, *HALVES]),
    factor=st.sampled_from([1.0, 0.37, -0.37, 1e-4]),
    instructions=st.sampled_from(INSTRUCTIONS),
    seed=st.integers(0, 2**31),
)
def test_an_update_is_the_references_to_two_units_in_the_last_place(
    rule: Rule,
    numels: list[int],
    grad_dtype: torch.dtype,
    half: torch.dtype | None,
    factor: float,
    instructions: str,
    seed: int,
) -> None:
    with with_instructions(instructions):
        steps_as_the_reference(Case(rule, numels, grad_dtype, half, seed), factor)


def steps_as_the_reference(case: Case, factor: float) -> None:
    """To two units in the last place of the largest number that takes part: what an update nearly cancels has lost its
    digits before. Copies in half precision are the parameters as torch rounds them, and gradients stay as they are."""
    rule, expected, before, grads = case.rule, case.expected(factor), deepcopy(case.params), deepcopy(case.grads)
    states_before = deepcopy(case.states)
    steps = [float(step) for step in case.steps]
    decoupled = isinstance(rule, Adam) and rule.decoupled
    case.step(factor)
    for index, (now, *states_now) in enumerate(zip(case.params, *zip(*case.states, strict=True), strict=True)):
        old, wanted = before[index].double().abs(), expected[index]
        gradient = (grads[index].double() * factor).abs() + rule.weight_decay * old
        true = grads[index].double() * factor + (0.0 if decoupled else rule.weight_decay) * before[index].double()
        way = moved(rule, gradient, true, states_before[index], wanted[1:], steps[index])
        near(now, wanted[0], old + wanted[0].abs() + way)
        for state, kept, value in zip(states_now, states_before[index], wanted[1:], strict=True):
            near(state, value, value.abs() + kept.double().abs() + gradient * (1 + true.abs()))  # or its square
    assert all(torch.equal(now, then) for now, then in zip(case.grads, grads, strict=True))
    assert [float(step) for step in case.steps] == [s + (not isinstance(rule, SGD)) for s in steps]
    for copy, param in zip(case.halves or (), case.params, strict=False):
        assert torch.equal(copy, param.to(copy.dtype))


def moved(
    rule: Rule, gradient: Tensor, true: Tensor, states: list[Tensor], wanted: list[Tensor], step: float
) -> Tensor:
    """How long an update's parts are together, before they cancel; and what a rounded gradient adds by what divides it.

    Args:
        gradient: The absolute values of its parts, added; ``true``: itself.
        wanted: The states after the step.
    """
    if isinstance(rule, SGD):
        kept = rule.momentum * states[0].double().abs() + gradient if states else 0.0 * gradient
        total: Tensor = rule.lr * (gradient + kept)
        return total
    if isinstance(rule, Adagrad):
        way: Tensor = rule.lr / (1 + step * rule.lr_decay) * gradient / (wanted[0].sqrt() + rule.eps)
        return way * (1 + gradient * true.abs() / wanted[0].clamp(min=1e-300))
    t, second = int(step) + 1, wanted[-1]
    mean = (rule.beta1 * states[0].double().abs() + (1 - rule.beta1) * gradient) / (1 - rule.beta1**t)
    way = rule.lr * mean / (second.sqrt() / (1 - rule.beta2**t) ** 0.5 + rule.eps)
    return way * (1 + (1 - rule.beta2) * gradient * true.abs() / wanted[1].clamp(min=1e-300))


def near(found: Tensor, expected: Tensor, size: Tensor) -> None:
    unit = torch.finfo(torch.float32).eps * size
    assert bool(((found.double() - expected).abs() <= 2 * unit + 1e-44).all())


@pytest.mark.parametrize("rule", [Adam(1e-3, amsgrad=True), SGD(0.1, momentum=0.9), Adagrad(0.1)], ids=repr)
def test_all_instruction_sets_and_numbers_of_threads_step_to_the_same_bits(rule: Rule) -> None:
    before, results = torch.get_num_threads(), list[list[Tensor]]()
    try:
        for instructions in INSTRUCTIONS:
            for threads in (1, 3):
                torch.set_num_threads(threads)
                case = Case(rule, [5, 700_001, 16384, 300_000], torch.bfloat16, torch.float16, seed=4)
                with with_instructions(instructions):
                    case.step(0.37)
                results.append(case.everything())
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("rule", [Adam(1e-3), SGD(0.1, momentum=0.9), Adagrad(0.1)], ids=repr)
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_a_skipped_update_changes_no_bit(rule: Rule, instructions: str) -> None:
    case = Case(rule, [5, 20_000], torch.float32, torch.bfloat16, seed=5)
    case.grads[0][2] = torch.nan
    before = deepcopy(case.everything())
    with with_instructions(instructions):
        case.step(float("nan"), found_inf=1.0)
    assert all(torch.equal(now, then) for now, then in zip(case.everything(), before, strict=True))
    case.step(0.5)
    assert not torch.equal(case.params[1], before[1])


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("half", HALVES)
def test_copies_in_half_precision_are_rounded_as_torch_rounds(instructions: str, half: torch.dtype) -> None:
    """Ties to even, denormals, what overflows, NaN: every one of 2^16 halves, and what lies next to it and between."""
    bits = torch.arange(2**16, dtype=torch.int32)
    exact = bits.to(torch.int16).view(half).float()
    between = (exact + exact.roll(-1)) / 2
    values = torch.cat([exact, between, *(torch.nextafter(x, s) for x in (exact, between) for s in (-INF, INF))])
    case = Case(SGD(1.0), [values.numel()], torch.float32, half, seed=6)
    case.params, case.grads = [values.clone()], [torch.zeros_like(values)]
    with with_instructions(instructions):
        case.step(1.0)
    assert case.halves is not None
    found, wanted = case.halves[0], case.params[0].to(half)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(7.0).view(torch.int16), wanted.nan_to_num(7.0).view(torch.int16))


INF = torch.full((2**16,), torch.inf)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("half", HALVES)
def test_gradients_in_half_precision_are_read_as_torch_reads_them(instructions: str, half: torch.dtype) -> None:
    """Every one of 2^16: SGD from zeros with a rate of -1 is the gradient."""
    grads = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(half)
    case = Case(SGD(-1.0), [2**16], half, None, seed=7)
    case.params, case.grads = [torch.zeros(2**16)], [grads]
    with with_instructions(instructions):
        case.step(1.0)
    assert torch.equal(case.params[0].nan_to_num(0.5), grads.float().nan_to_num(0.5))


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
def test_the_reference_is_torchs_formula(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], rule: Rule
) -> None:
    """In float64, over ten steps."""
    generator = torch.Generator().manual_seed(8)
    param = torch.nn.Parameter(torch.randn(50, generator=generator, dtype=torch.float64))
    ours, states = param.detach().clone(), [torch.zeros(50, dtype=torch.float64) for _ in range(states_of(rule))]
    optimizer: Any = kind([param], **options)
    for t in range(1, 11):
        param.grad = torch.randn(50, generator=generator, dtype=torch.float64)
        rule.step(ours, param.grad, states, t)
        optimizer.step()
    torch.testing.assert_close(param.detach(), ours, rtol=1e-13, atol=1e-15)
