"""The Triton kernel for stochastic rounding: results in the interpreter, and compiled code."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from compiled_kernels import compile_kernel, resources_of
from interpreted import Interpreted, why_no_triton
from kernel_formulas import LANES, ROWS, noise_of, round_plainly
from meshstep.amp.stochastic_rounding import Drawn, Noise
from rounding_cases import BF16, F32, assert_replicas_equal_and_shards_different, bits, stepped_on_ranks, values

pytestmark = pytest.mark.skipif(bool(why_no_triton()), reason=why_no_triton())


# The kernel -----------------------------------------------------------------------------------------------------------

SHAPES = ((16384 + 4096 + 600,), (3,), (4096,), (2, 3, 5), (0, 4), ())


def rounded_by_kernel() -> list[str]:
    """Round tensors of several shapes, strides, keys and steps. Return the cases in which bits differ from plain torch."""
    from meshstep.optim.kernels.rounding import round_by_kernels

    wrong = []
    for steps, strided in product((0, 7, 2**33 + 1), (False, True)):
        drawn: dict[int, Drawn] = {}
        sources = []
        for index, shape in enumerate(SHAPES):
            if strided and shape in (SHAPES[0], SHAPES[2]):
                continue  # large, and the same tensors as in the case that is not strided
            pairs = []
            for number in range(2):
                source = values(shape, 10 * index + number)
                target = torch.empty(shape, dtype=BF16)
                if strided and len(shape) > 1:
                    source = source.transpose(0, -1).contiguous().transpose(0, -1)
                    target = target.transpose(0, -1).contiguous().transpose(0, -1)
                pairs.append((target, source))
                sources.append((index, number, target, source))
            drawn[index] = Drawn(Noise(3, steps, f"weight {index}"), pairs)
        assert round_by_kernels([*drawn.values()]) == []
        for index, number, target, source in sources:
            noise = noise_of(drawn[index].noise.key, number, steps, source.numel())
            if not torch.equal(bits(target), bits(round_plainly(source, noise))):
                wrong.append(f"{SHAPES[index]} {number} in step {steps}, strided {strided}")
    return wrong


@pytest.mark.long
def test_triton_rounding_is_bitwise_equal_to_plain_torch(interpreted: Interpreted) -> None:
    assert interpreted(rounded_by_kernel) == []


def mean_errors() -> list[float]:
    """Return the errors of the mean of many rounded copies of a value, in units in the last place."""
    from meshstep.optim.kernels.rounding import round_by_kernels

    many, errors = 40_000, []
    exact = [1.001, -1.001, 1 + 2**-8, 3.3e-5, -7.77e20, 2**-133 * 1.3, 250.7, 1e-40]
    pairs = [(torch.empty(many, dtype=BF16), torch.full((many,), value)) for value in exact]
    round_by_kernels([Drawn(Noise(0, 0, "weight"), pairs)])
    for target, source in pairs:
        down = (source[:1].view(torch.int32) >> 16 << 16).view(F32).double()
        up = ((source[:1].view(torch.int32) >> 16) + 1 << 16).view(F32).double()
        assert bool(((target == down) | (target == up)).all())
        errors.append(float((target.double().mean() - source[0].double()).abs() / (up - down).abs()))
    return errors


def test_triton_rounding_is_unbiased(interpreted: Interpreted) -> None:
    """The standard deviation of a mean of n draws is at most 1 / (2 sqrt n) units; allow 5 standard deviations."""
    assert max(interpreted(mean_errors)) < 5 * 0.5 / 40_000**0.5


def special_values() -> None:
    from meshstep.optim.kernels.rounding import round_by_kernels

    exact = torch.randn(1000).to(BF16).float()
    kept = torch.cat([exact, torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 3.3895313892515355e38])])
    nans = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int32).view(F32).repeat(3000)
    largest = torch.full((5000,), 3.4028234663852886e38)
    for steps in range(5):
        targets = [torch.empty(source.shape, dtype=BF16) for source in (kept, nans, largest)]
        round_by_kernels([Drawn(Noise(0, steps, "weight"), [*zip(targets, (kept, nans, largest), strict=True)])])
        assert torch.equal(targets[0].float().view(torch.int32), kept.view(torch.int32))
        assert bool(targets[1].isnan().all())
        assert {*targets[2].tolist()} <= {torch.inf, 3.3895313892515355e38}


def test_triton_rounding_keeps_bfloat16_values_infinities_and_nans(interpreted: Interpreted) -> None:
    interpreted(special_values)


def moved_by_one() -> None:
    """Round tensors whose addresses are not multiples of 16."""
    from meshstep.optim.kernels.rounding import round_by_kernels

    source, target = values((5001,), 1)[1:], torch.empty(5001, dtype=BF16)[1:]
    drawn = Drawn(Noise(0, 0, "weight"), [(target, source)])
    round_by_kernels([drawn])
    assert torch.equal(bits(target), bits(round_plainly(source, noise_of(drawn.noise.key, 0, 0, 5000))))


def test_triton_rounding_supports_tensors_at_unaligned_addresses(interpreted: Interpreted) -> None:
    interpreted(moved_by_one)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_triton_rounding_at_aligned_addresses_compiles_to_vector_loads_without_barriers(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At aligned addresses, loads and stores use vectors of four elements. The kernel uses no shared memory and no
    approximate or atomic instructions, and spills no registers. At most 80 registers per thread allow six programs per
    multiprocessor."""
    from meshstep.optim.kernels import triton_rounding_kernel as module

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for aligned in (True, False):
        constants = {"ALIGNED": aligned, "LANES": LANES, "ROWS": ROWS, "CHUNK": module.CHUNK}
        made = compile_kernel(module.round_chunks, constants, capability)
        assert not made.count(r"\batom\.|\bred\.|\.approx|\bbar\.")
        assert made.count(r"ld\.global\S*\.v4") == (ROWS if aligned else 0)
        assert made.count(r"st\.global\S*\.v2\.b32") == (ROWS if aligned else 0)
        assert made.shared == 0
        found = resources_of(made)
        assert found.registers <= 80
        assert found.spilled == 0


def test_spilled_registers_of_a_compiled_kernel_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The assembler is limited to 24 registers per thread, fewer than the kernel needs."""
    from meshstep.optim.kernels import triton_rounding_kernel as module

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"ALIGNED": True, "LANES": LANES, "ROWS": ROWS, "CHUNK": module.CHUNK}
    made = compile_kernel(module.round_chunks, constants)
    limited = replace(made, ptx=re.sub(r"\.reqntid \d+", r"\g<0>\n.maxnreg 24", made.ptx, count=1))
    assert resources_of(made).spilled == 0 < resources_of(limited).spilled


# Ranks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("states_only", [False, True])
def test_triton_rounding_is_equal_on_replicas_and_differs_between_shards(
    interpreted: Interpreted, states_only: bool
) -> None:
    ranks = interpreted.run(4, stepped_on_ranks, states_only)
    assert len(ranks[0]["whole"]) == (2 if states_only else 3)
    assert_replicas_equal_and_shards_different(ranks)
