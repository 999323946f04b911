"""Updates by the Triton kernels in the interpreter: accuracy, rounding, addresses, and several param groups."""

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
from kernel_cases import DTYPES, HALVES, INF, KINDS, RULES, Case, Rule, steps_as_the_reference
from kernel_formulas import SGD, Adagrad, Adam
from meshstep.optim.kernels.native import PointerColumns
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
    """A case whose update runs in the Triton kernels. Each tensor is ``offset`` elements after the start of its memory."""

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
    """Update all cases in one kernel call.

    Gradients are multiplied by abs(factor); the kernel gets no factor tensor if that is 1. ``negative``: maximize. The
    sign of ``factor`` is ignored.
    """
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
def test_triton_update_matches_float64_reference(
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
    """Update groups with different options in one call, and each group in a separate call."""

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
def test_param_groups_updated_in_one_call_use_their_own_hyper_parameters(
    interpreted: Interpreted, rules: list[Rule]
) -> None:
    interpreted(groups_together, rules, 0.37)


def more_than_a_program_counts() -> None:
    from meshstep.optim.kernels import triton_kernels

    with mock.patch.object(triton_kernels, "ROWS", 4):
        steps_as_the_reference(ByTriton(Adam(1e-3), [3] * 9, torch.float32, None, 9), 0.5)


def test_triton_update_supports_more_tensors_than_rows_per_program(interpreted: Interpreted) -> None:
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
def test_triton_update_accepts_learning_rate_tensor(interpreted: Interpreted, rule: Rule) -> None:
    interpreted(by_a_rate_that_is_a_tensor, rule)


def at_all_offsets(rule: Rule) -> list[Tensor]:
    """Return the tensors after one update, concatenated, with each tensor placed 0 to 3 elements after the start of
    its memory."""
    found = []
    for offset in range(4):
        case = ByTriton(rule, [5, 2050], torch.bfloat16, torch.float16, 4, offset=offset)
        case.step(0.37)
        found.append(torch.cat([tensor.double().reshape(-1) for tensor in case.everything()]))
    return found


@pytest.mark.parametrize("rule", SOME_RULES, ids=repr)
def test_triton_update_does_not_depend_on_addresses(interpreted: Interpreted, rule: Rule) -> None:
    first, *others = interpreted(at_all_offsets, rule)
    assert all(torch.equal(first, other) for other in others)


def hints() -> tuple[set[int], set[int]]:
    """Return the alignments that the kernels promise to the compiler: for updates at offset 0, and for all other calls.

    Assert that each promise is true.
    """
    from triton.runtime.interpreter import TensorHandle

    seen = set[int]()

    def set_attr(pointer: Any, name: str, sizes: Any) -> None:
        assert name == "tt.divisibility"
        for size in sizes:
            assert int(pointer.data.item()) % size == 0
            seen.add(size)

    with mock.patch.object(TensorHandle, "set_attr", set_attr):
        for offset in range(8):
            for grad_dtype in (torch.float32, *HALVES):
                ByTriton(Adam(1e-3), [5, 2050], grad_dtype, torch.bfloat16, 4, offset=offset).step(0.37)
            if offset == 0:
                aligned, seen = seen, set[int]()
            for dtype in DTYPES:
                kernels().powers([moved_by(offset, torch.ones(2050, dtype=dtype))], 2.0)
    return aligned, seen


def test_triton_kernels_assume_only_pointer_alignments_that_hold(interpreted: Interpreted) -> None:
    assert interpreted(hints) == ({8, 16}, {8, 16})


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
def test_skipped_triton_update_changes_nothing(interpreted: Interpreted, rule: Rule) -> None:
    interpreted(skipped, rule)


def halves_written(half: torch.dtype, names: tuple[str, ...] = ()) -> tuple[Tensor, Tensor]:
    """Return all 2^16 values of the dtype, their neighbours and midpoints: as the kernel and as torch rounds them."""
    exact = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(half).float()
    between = (exact + exact.roll(-1)) / 2
    values = torch.cat([exact, between, *(torch.nextafter(x, s) for x in (exact, between) for s in (-INF, INF))])
    case = ByTriton(SGD(1.0), [values.numel()], torch.float32, half, 6)
    case.params, case.grads = [values.clone()], [torch.zeros_like(values)]
    with warnings.catch_warnings(), wide_blocks():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy warns about values too large for float16
        case.step(1.0)
    assert case.halves is not None
    return case.halves[0], case.params[0].to(half)


def wide_blocks() -> Any:
    """Use large blocks, because the interpreter's time depends on their number."""
    from meshstep.optim.kernels import triton_kernels

    return mock.patch.multiple(triton_kernels, CHUNK=2**17, BLOCK=2**17)


@pytest.mark.parametrize("half", HALVES)
def test_triton_update_rounds_low_precision_weights_as_torch(interpreted: Interpreted, half: torch.dtype) -> None:
    """The values include ties to even, denormals, overflow and NaN."""
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
def test_triton_update_reads_low_precision_gradients_as_torch(interpreted: Interpreted, half: torch.dtype) -> None:
    """The test covers all 2^16 values: one SGD step from zero with a learning rate of -1 gives the gradient."""
    found, wanted = interpreted(grads_read, half)
    assert torch.equal(found.nan_to_num(0.5), wanted.nan_to_num(0.5))


def with_a_wrong_table() -> None:
    """Run an update whose pointer table has the first parameter's gradient for the second parameter, too."""
    case = ByTriton(Adam(1e-3), [300, 300], torch.float32, None, 8)
    with mock.patch.object(case, "columns", return_value=shifted(case.columns())):
        steps_as_the_reference(case, 0.5)


def shifted(columns: PointerColumns) -> PointerColumns:
    return PointerColumns(columns.fixed, array("Q", [columns.grads[0]] * 2), columns.numels)


def test_reference_comparison_detects_triton_update_with_wrong_gradient_pointer(interpreted: Interpreted) -> None:
    with pytest.raises(Exception, match="in near"):
        interpreted(with_a_wrong_table)
