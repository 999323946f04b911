"""Updates by Triton's kernels, in its interpreter: those of the reference in float64 to two units in the last place."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import Interpreted, kernels, why_no_triton
from kernel_cases import HALVES, INF, KINDS, RULES, Case, Rule, steps_as_the_reference
from meshstep.optim.kernels.native import SGD, Adagrad, Adam, PointerColumns
from properties import number_of_cases
from torch import Tensor

if TYPE_CHECKING:
    from meshstep.optim.kernels.triton import KernelLaunch

pytestmark = pytest.mark.skipif(bool(why_no_triton()), reason=why_no_triton())
SOME_RULES = [
    Adam(1e-3),
    Adam(0.3, amsgrad=True, decoupled=False, weight_decay=0.1),
    SGD(0.1, momentum=0.9),
    Adagrad(0.1),
]


class ByTriton(Case):
    """A case that Triton's kernels step. Args: offset: Elements before each tensor in its memory."""

    def __init__(self, *args: Any, offset: int = 0) -> None:
        super().__init__(*args)
        self.rate: Tensor | None = None
        for column in (self.params, self.grads, self.halves or [], *self.states):
            column[:] = [moved_by(offset, tensor) for tensor in column]

    def part(self, maximize: bool = False) -> KernelLaunch:
        from meshstep.optim.kernels.triton import KernelLaunch

        hyper = self.hyper if self.rate is None else [0.0, *self.hyper[1:]]
        return KernelLaunch(
            self.columns(), hyper, self.rate, maximize, self.grad_dtype, self.half_dtype or torch.bfloat16
        )

    def step(self, factor: float, found_inf: float = 0.0) -> None:
        stepped([self], factor, found_inf, negative=factor < 0)


def stepped(cases: Sequence[ByTriton], factor: float, found_inf: float = 0.0, negative: bool = False) -> None:
    """All in one call; a factor of 1 is left out, a negative one is the gradient to be maximized."""
    times = None if factor in (1.0, -1.0) else torch.tensor(abs(factor))
    parts = [case.part(maximize=negative) for case in cases]
    kernels().update(KINDS[type(cases[0].rule)], parts, torch.tensor(found_inf), times)


def moved_by(offset: int, tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.numel() + offset, dtype=tensor.dtype)[offset:].copy_(tensor)


def one_step(
    rule: Rule, numels: list[int], grad: torch.dtype, half: Any, factor: float, offset: int, seed: int
) -> None:
    steps_as_the_reference(ByTriton(rule, numels, grad, half, seed, offset=offset), factor)


@settings(max_examples=number_of_cases(15))
@given(
    rule=RULES,
    numels=st.lists(st.sampled_from([0, 1, 15, 17, 1023, 1024, 1025, 16385]), min_size=1, max_size=3),
    grad_dtype=st.sampled_from([torch.float32, *HALVES]),
    half=st.sampled_from([None, *HALVES]),
    factor=st.sampled_from([1.0, 0.37, -0.37, 1e-4]),
    offset=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
def test_an_update_is_the_references_to_two_units_in_the_last_place(
    interpreted: Interpreted,
    rule: Rule,
    numels: list[int],
    grad_dtype: torch.dtype,
    half: torch.dtype | None,
    factor: float,
    offset: int,
    seed: int,
) -> None:
    interpreted(one_step, rule, numels, grad_dtype, half, factor, offset, seed)


def groups_together(rules: list[Rule], factor: float) -> None:
    """Groups that differ in all that a group may, in one call and each in a call of its own."""

    def cases() -> list[ByTriton]:
        dtypes = torch.float32, torch.float16, torch.float32, torch.bfloat16
        halves = None, None, torch.bfloat16, None
        settings = zip(rules, dtypes, halves, range(4), strict=True)
        return [ByTriton(rule, [5, 0, 130], dtype, half, seed) for rule, dtype, half, seed in settings]

    together, alone = cases(), cases()
    stepped(together, factor)
    for case, one in zip(together, alone, strict=True):
        before = deepcopy(one.everything())
        one.step(factor)
        assert all(torch.equal(a, b) for a, b in zip(case.everything(), one.everything(), strict=True))
        assert not torch.equal(case.params[2], before[2])


@pytest.mark.parametrize("rules", [
    [Adam(1e-3), Adam(0.3, 0.5, 0.7, weight_decay=0.1), Adam(0.2, amsgrad=True), Adam(0.1, decoupled=False)],
    [SGD(0.1), SGD(0.2, momentum=0.9), SGD(0.3, momentum=0.5, nesterov=True), SGD(0.4, weight_decay=0.1)],
    [Adagrad(0.1), Adagrad(0.2, lr_decay=0.3), Adagrad(0.3, eps=1e-3), Adagrad(0.4)],
], ids=["Adam", "SGD", "Adagrad"])  # fmt: skip
def test_groups_in_one_call_are_stepped_by_their_own_numbers(interpreted: Interpreted, rules: list[Rule]) -> None:
    interpreted(groups_together, rules, 0.37)


def more_than_a_program_counts() -> None:
    from meshstep.optim.kernels import triton_kernels

    with mock.patch.object(triton_kernels, "ROWS", 4):
        steps_as_the_reference(ByTriton(Adam(1e-3), [3] * 9, torch.float32, None, 9), 0.5)


def test_more_tensors_than_one_program_counts(interpreted: Interpreted) -> None:
    interpreted(more_than_a_program_counts)


def by_a_rate_that_is_a_tensor(rule: Rule) -> None:
    for dtype in (torch.float32, torch.float64):
        number, tensor = (ByTriton(rule, [5, 300], torch.float32, None, 3) for _ in range(2))
        tensor.rate = torch.tensor(0.25, dtype=dtype)
        number.rule = type(rule)(0.25)
        number.step(0.5)
        tensor.step(0.5)
        assert all(torch.equal(a, b) for a, b in zip(number.everything(), tensor.everything(), strict=True))


@pytest.mark.parametrize("rule", [Adam(1e-3), SGD(0.1), Adagrad(0.1)], ids=repr)
def test_a_rate_may_be_a_tensor_of_the_device(interpreted: Interpreted, rule: Rule) -> None:
    interpreted(by_a_rate_that_is_a_tensor, rule)


def at_all_offsets(rule: Rule) -> list[Tensor]:
    """Bits of results at offsets of 0 to 3 elements, stacked."""
    found = []
    for offset in range(4):
        case = ByTriton(rule, [5, 2050], torch.bfloat16, torch.float16, 4, offset=offset)
        case.step(0.37)
        found.append(torch.cat([tensor.double().reshape(-1) for tensor in case.everything()]))
    return found


@pytest.mark.parametrize("rule", SOME_RULES, ids=repr)
def test_an_update_is_the_same_bits_wherever_its_tensors_lie(interpreted: Interpreted, rule: Rule) -> None:
    first, *others = interpreted(at_all_offsets, rule)
    assert all(torch.equal(first, other) for other in others)


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def skipped(rule: Rule) -> None:
    case = ByTriton(rule, [5, 2000], torch.float32, torch.bfloat16, 5)
    case.grads[0][2] = torch.nan
    before = deepcopy([*case.everything(), *case.grads])
    case.step(float("nan"), found_inf=1.0)
    now = [*case.everything(), *case.grads]
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(now, before, strict=True))
    case.step(0.5)
    assert not torch.equal(case.params[1], before[1])


@pytest.mark.parametrize("rule", SOME_RULES, ids=repr)
def test_a_skipped_update_changes_no_bit(interpreted: Interpreted, rule: Rule) -> None:
    interpreted(skipped, rule)


def halves_written(half: torch.dtype, names: tuple[str, ...] = ()) -> tuple[Tensor, Tensor]:
    """Every one of 2^16 halves, and what lies next to it and between: found, and as torch rounds."""
    exact = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(half).float()
    between = (exact + exact.roll(-1)) / 2
    values = torch.cat([exact, between, *(torch.nextafter(x, s) for x in (exact, between) for s in (-INF, INF))])
    case = ByTriton(SGD(1.0), [values.numel()], torch.float32, half, 6)
    case.params, case.grads = [values.clone()], [torch.zeros_like(values)]
    with warnings.catch_warnings(), wide_blocks():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of what is too large for float16
        case.step(1.0)
    assert case.halves is not None
    return case.halves[0], case.params[0].to(half)


def wide_blocks() -> Any:
    """The interpreter's time is that of the blocks."""
    from meshstep.optim.kernels import triton_kernels

    return mock.patch.multiple(triton_kernels, CHUNK=2**17, BLOCK=2**17)


@pytest.mark.parametrize("half", HALVES)
def test_copies_in_half_precision_are_rounded_as_torch_rounds(interpreted: Interpreted, half: torch.dtype) -> None:
    """Ties to even, denormals, what overflows, NaN."""
    found, wanted = interpreted(halves_written, half)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(7.0).view(torch.int16), wanted.nan_to_num(7.0).view(torch.int16))


def grads_read(half: torch.dtype) -> tuple[Tensor, Tensor]:
    grads = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(half)
    case = ByTriton(SGD(-1.0), [2**16], half, None, 7)
    case.params, case.grads = [torch.zeros(2**16)], [grads]
    with warnings.catch_warnings(), wide_blocks():
        warnings.simplefilter("ignore", RuntimeWarning)
        case.step(1.0)
    return case.params[0], grads.float()


@pytest.mark.parametrize("half", HALVES)
def test_gradients_in_half_precision_are_read_as_torch_reads_them(interpreted: Interpreted, half: torch.dtype) -> None:
    """Every one of 2^16: SGD from zeros with a rate of -1 is the gradient."""
    found, wanted = interpreted(grads_read, half)
    assert torch.equal(found.nan_to_num(0.5), wanted.nan_to_num(0.5))


def with_a_wrong_table() -> None:
    """The second row's gradient is the first's."""
    case = ByTriton(Adam(1e-3), [300, 300], torch.float32, None, 8)
    with mock.patch.object(case, "columns", return_value=shifted(case.columns())):
        steps_as_the_reference(case, 0.5)


def shifted(columns: PointerColumns) -> PointerColumns:
    return PointerColumns(columns.fixed, array("Q", [columns.grads[0]] * 2), columns.numels)


def test_a_gradient_of_another_tensor_would_be_noticed(interpreted: Interpreted) -> None:
    with pytest.raises(Exception, match="in near"):
        interpreted(with_a_wrong_table)
