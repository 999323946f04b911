"""Inputs for kernels (tensors of several dtypes and of many magnitudes), and the expected results in float64."""

from __future__ import annotations

from array import array
from copy import deepcopy
from dataclasses import astuple

import torch
from hypothesis import strategies as st
from kernel_formulas import SGD, Adagrad, Adam, Lion
from meshstep.optim.kernels.native import Kind, PointerColumns
from torch import Tensor

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SPECIAL = [0.0, -0.0, 1e-45, 1e-40, 6e-8, 3e38, -3e38, 65504.0]
Rule = Adam | SGD | Adagrad | Lion
KINDS = {Adam: Kind.ADAM, SGD: Kind.SGD, Adagrad: Kind.ADAGRAD, Lion: Kind.LION}
HALVES = (torch.bfloat16, torch.float16)
INF = torch.full((2**16,), torch.inf)


def some_values(shape: tuple[int, ...], dtype: torch.dtype, scale: float, seed: int) -> Tensor:
    """Return random values, of which about 2 % are zeros, denormals, or values up to 3e38 or the dtype's maximum."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64).mul_(scale)
    special = torch.tensor(SPECIAL, dtype=torch.float64)[torch.randint(8, shape, generator=generator)]
    largest = torch.finfo(dtype).max
    mixed = torch.where(torch.rand(shape, generator=generator) < 0.02, special, values)
    return mixed.clamp(-largest, largest).to(dtype)


def states_of(rule: Rule) -> int:
    if isinstance(rule, Adam):
        return 3 if rule.amsgrad else 2
    return 1 if isinstance(rule, Adagrad | Lion) or rule.momentum else 0


class Case:
    """Float32 parameters with gradients and with optimizer states as after some steps, and the rule of the next update."""

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

    def columns(self) -> PointerColumns:
        counts = not isinstance(self.rule, SGD | Lion)
        columns = [self.params, *([states[i] for states in self.states] for i in range(states_of(self.rule)))]
        fixed = [tensor.data_ptr() for column in columns for tensor in column]
        fixed += [0] * (len(self.params) * (4 - len(columns)))
        fixed += [step.data_ptr() if counts else 0 for step in self.steps]
        return PointerColumns(
            array("Q", fixed),
            array("Q", [grad.data_ptr() for grad in self.grads]),
            array("q", [param.numel() for param in self.params]),
            None if self.halves is None else array("Q", [half.data_ptr() for half in self.halves]),
        )

    @property
    def hyper(self) -> list[float]:
        """Return the update rule's hyper-parameters, in the argument order of the native loops."""
        return [float(value) for value in astuple(self.rule)]

    def step(self, factor: float, found_inf: float = 0.0) -> None:
        raise NotImplementedError

    def expected(self, factor: float) -> list[list[Tensor]]:
        """Return for each tensor the parameter and its states after the step, in float64."""
        found = []
        for param, grad, states, step in zip(self.params, self.grads, self.states, self.steps, strict=True):
            p, kept = param.double(), [state.double() for state in states]
            self.rule.step(p, grad.double() * factor, kept, int(step) + 1)
            found.append([p, *kept])
        return found

    def everything(self) -> list[Tensor]:
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


def steps_as_the_reference(case: Case, factor: float) -> None:
    """Assert that a step matches the reference to 2 float32 epsilons times the sum of the absolute values of its terms.

    An update that nearly cancels loses digits. Half-precision copies must equal torch's rounding of the parameters, step
    counts must be those of the reference, and gradients must not change.
    """
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
            # The tolerance contains the square of the gradient, because second moments contain it.
            near(state, value, value.abs() + kept.double().abs() + gradient * (1 + true.abs()))
    assert all(torch.equal(now, then) for now, then in zip(case.grads, grads, strict=True))
    assert [float(step) for step in case.steps] == [s + (not isinstance(rule, SGD)) for s in steps]
    for copy, param in zip(case.halves or (), case.params, strict=False):
        assert torch.equal(copy, param.to(copy.dtype))


def moved(
    rule: Rule, gradient: Tensor, true: Tensor, states: list[Tensor], wanted: list[Tensor], step: float
) -> Tensor:
    """Return, per element, the value to which the rounding error of an update is relative: the sum of the absolute values
    of the update's terms. For Adam and Adagrad the value is enlarged, because their states contain the squared, rounded
    gradient.

    Args:
        gradient: The sum of the absolute values of the gradient's terms; ``true`` is the gradient itself.
        wanted: The expected states after the step.
    """
    if isinstance(rule, SGD):
        kept = rule.momentum * states[0].double().abs() + gradient if states else 0.0 * gradient
        total: Tensor = rule.lr * (gradient + kept)
        return total
    if isinstance(rule, Adagrad):
        way: Tensor = rule.lr / (1 + step * rule.lr_decay) * gradient / (wanted[0].sqrt() + rule.eps)
        return way * (1 + gradient * true.abs() / wanted[0].clamp(min=1e-300))
    assert isinstance(rule, Adam), "the sign in Lion is not continuous: its test compares bits"
    t, second = int(step) + 1, wanted[-1]
    mean = (rule.beta1 * states[0].double().abs() + (1 - rule.beta1) * gradient) / (1 - rule.beta1**t)
    way = rule.lr * mean / (second.sqrt() / (1 - rule.beta2**t) ** 0.5 + rule.eps)
    return way * (1 + (1 - rule.beta2) * gradient * true.abs() / wanted[1].clamp(min=1e-300))


def near(found: Tensor, expected: Tensor, size: Tensor) -> None:
    unit = torch.finfo(torch.float32).eps * size
    assert bool(((found.double() - expected).abs() <= 2 * unit + 1e-44).all())
