"""Float32 masters split into a bfloat16 weight and a 16-bit remainder, exactly.

The weight is rounded to nearest. A NaN stays a NaN, but some signalling NaNs become quiet.
"""

from __future__ import annotations

from array import array

import pytest
import torch
from loops import loops, variants_here, with_variant
from meshstep.amp import Bf16
from meshstep.amp.master_weights import join_master, split_master
from meshstep.optim.kernels.native import Kind, PointerColumns
from meshstep.optim.step.c_engine import update_by_loops
from torch import Tensor

QUIET = 0x400000
LOWER = (0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF)


def hard() -> Tensor:
    """Return bits of float32 as int32 [2^16 * 10 + 10^5]: every upper half with all of `LOWER`, then random bits."""
    upper = torch.arange(2**16, dtype=torch.int64).view(-1, 1) << 16
    generator = torch.Generator().manual_seed(1)
    bits = torch.cat([(upper + torch.tensor(LOWER)).view(-1), torch.randint(2**32, (100_000,), generator=generator)])
    return bits.to(torch.int32)


def of(bits: Tensor) -> Tensor:
    return bits.view(torch.float32)


def bits_of(values: Tensor) -> Tensor:
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def is_signalling(bits: Tensor) -> Tensor:
    return of(bits).isnan() & (bits & QUIET == 0)


def has_room(bits: Tensor) -> Tensor:
    """Return False for signalling NaNs with upper half 0x7f80 or 0xff80, which `split_master` makes quiet; else True."""
    return ~(is_signalling(bits) & (bits >> 16 & 0x7FFF == 0x7F80))


def test_split_and_join_master_restore_masters_bitwise_except_some_signalling_nans() -> None:
    everything = torch.arange(2**32 - 2**18, 2**32 + 2**18, dtype=torch.int64).to(
        torch.int32
    )  # negative NaNs, 0, subnormals
    for bits in (hard(), everything):
        weight, remainder = split_master(of(bits))
        assert (weight.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
        wanted = torch.where(has_room(bits), bits, bits | QUIET)
        assert torch.equal(bits_of(join_master(weight, remainder)), wanted)


def written() -> tuple[Tensor, Tensor]:
    """Return (weights, remainders), both [2^16, n]: every bfloat16 weight n times, each with a remainder that does not
    belong to it, as after a write to the weight."""
    stale = [0, 1, -1, 2, -2, 0x7FFF, -0x7FFF, 0x7FFE, -0x8000, 0x4000, -0x4000, 0x1234, -0x1234]
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randint(-(2**15), 2**15, (2**16, 8), generator=generator)
    rests = torch.cat([torch.tensor(stale).expand(2**16, -1), drawn], dim=1).to(torch.int16)
    weights = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    return weights.view(-1, 1).expand_as(rests).contiguous(), rests


def same_weight(found: Tensor, wanted: Tensor) -> Tensor:
    return torch.where(wanted.isnan(), found.isnan(), bits_of(found) == bits_of(wanted))


def test_joined_master_rounds_to_its_weight_for_unrelated_remainders() -> None:
    weight, remainder = written()
    master = join_master(weight, remainder)
    assert bool(same_weight(split_master(master)[0], weight).all())
    assert torch.equal(master.isnan(), weight.isnan())
    assert bool(master[weight.isfinite()].isfinite().all())
    finite = weight[weight.isfinite()].double()
    off = (master[weight.isfinite()].double() - finite).abs()
    exponent = torch.where(finite == 0, -125, torch.frexp(finite).exponent).clamp(min=-125)
    assert bool((off <= torch.ldexp(torch.full_like(off, 0.5), exponent - 8)).all()), "half a unit in the last place"
    exact = join_master(weight, torch.zeros_like(remainder))
    assert torch.equal(exact[~weight.isnan()], weight.float()[~weight.isnan()])


def test_join_master_of_zeros_and_infinities_ignores_outdated_remainders() -> None:
    for value in (0.0, -0.0, float("inf"), float("-inf")):
        weight = torch.full((2**16,), value, dtype=torch.bfloat16)
        remainder = torch.arange(-(2**15), 2**15).to(torch.int16)
        master = join_master(weight, remainder)
        stale = remainder > 0 if weight.isinf().all() else remainder < 0
        assert torch.equal(bits_of(master[stale]), bits_of(weight.float()[stale]))
        assert torch.equal(split_master(master[~stale])[1], remainder[~stale])


def test_split_with_ties_to_even_would_not_restore_all_masters() -> None:
    """Negative control: with ties to even, two masters would have the same weight and remainder."""
    bits = hard()
    bits = bits[of(bits).isfinite()]
    weight, remainder = of(bits).bfloat16(), split_master(of(bits))[1]
    lost = bits_of(join_master(weight, remainder)) != bits
    assert bool(lost.any())
    assert bool((bits[lost] & 0xFFFF == 0x8000).all())


def test_split_master_rounds_to_nearest_with_ties_away_from_zero() -> None:
    bits = hard()
    bits = bits[of(bits).isfinite()]
    master, tie = of(bits), bits & 0xFFFF == 0x8000
    weight = split_master(master)[0]
    assert torch.equal(bits_of(weight)[~tie], bits_of(master.bfloat16())[~tie])
    here = tie & weight.isfinite()
    exact, found, even = (value[here].double().abs() for value in (master, weight, master.bfloat16()))
    assert bool((found > exact).all())
    assert torch.equal((found - exact)[even.isfinite()], (even - exact).abs()[even.isfinite()])
    assert torch.equal(weight.isinf(), master.bfloat16().isinf())


def test_split_master_of_nan_gives_a_nan_weight() -> None:
    """Signalling NaNs with upper halves 0x7f80 and 0xff80 are quiet after `join_master`."""
    lower = torch.arange(1, 2**16, dtype=torch.int64)
    without_room = torch.cat([lower + 0x7F800000, lower + 0xFF800000]).to(torch.int32)
    for bits in (hard()[of(hard()).isnan()], without_room):
        weight, remainder = split_master(of(bits))
        assert bool(weight.isnan().all())
        back = bits_of(join_master(weight, remainder))
        assert torch.equal(back | QUIET, bits | QUIET)
        assert torch.equal(back[has_room(bits)], bits[has_room(bits)])
    assert not bool(has_room(without_room).any())


def test_split_master_gives_close_weights_and_remainder_zero_for_infinity() -> None:
    bits = hard()
    weight, remainder = split_master(of(bits))
    normal = weight.isfinite() & (weight.abs() >= torch.finfo(torch.bfloat16).tiny)
    off = (of(bits).double() - weight.double()).abs()[normal] / weight.double().abs()[normal]
    assert float(off.max()) <= 2**-8
    infinite = of(bits).isinf()
    assert bool(weight[infinite].isinf().all())
    assert bool((remainder[infinite] == 0).all())


def test_split_and_join_master_accept_several_memory_formats_and_shapes() -> None:
    master = of(hard())[:24].view(2, 3, 2, 2)
    for given in (master.to(memory_format=torch.channels_last), master.transpose(0, 1), master[:0], master[0, 0, 0, 0]):
        weight, remainder = split_master(given)
        assert weight.shape == remainder.shape == given.shape
        assert torch.equal(bits_of(join_master(weight, remainder)), bits_of(given))


def stepped_by_loops(weight: Tensor, remainder: Tensor, variant: str) -> None:
    """Apply AdamW with a learning rate of 0, in place."""
    size = weight.numel()
    grad, mean, square, step = (*torch.zeros(3, size).unbind(), torch.tensor(4.0))
    row = [weight.data_ptr(), mean.data_ptr(), square.data_ptr(), 0, step.data_ptr()]
    rests, numels = array("Q", [remainder.data_ptr()]), array("q", [size])
    columns = PointerColumns(array("Q", row), array("Q", [grad.data_ptr()]), numels, rests=rests)
    hyper = [0.0, 0.9, 0.999, 1e-8, 0.0, 1.0, 0.0]
    with with_variant(variant):
        update_by_loops(loops(), Kind.ADAM, columns, hyper, 1.0, torch.tensor(0.0), torch.float32)


@pytest.mark.parametrize("variant", variants_here())
def test_c_update_loops_at_zero_learning_rate_keep_weight_and_remainder(variant: str) -> None:
    """All values are restored, with quiet NaNs instead of signalling ones."""
    bits = hard()
    weight, remainder = split_master(of(bits))
    stepped_by_loops(weight, remainder, variant)
    wanted = split_master(of(torch.where(is_signalling(bits), bits | QUIET, bits)))
    assert torch.equal(bits_of(weight), bits_of(wanted[0]))
    assert torch.equal(remainder, wanted[1])


@pytest.mark.parametrize("variant", variants_here())
def test_c_update_loops_join_overwritten_weights_like_join_master(variant: str) -> None:
    weight, remainder = written()
    master = join_master(weight, remainder)
    wanted = split_master(of(torch.where(master.isnan(), bits_of(master) | QUIET, bits_of(master))))
    before = weight.clone()
    stepped_by_loops(weight, remainder, variant)
    assert bool(same_weight(weight, before).all())
    assert torch.equal(bits_of(weight), bits_of(wanted[0]))
    assert torch.equal(remainder, wanted[1])


def test_split_masters_reject_conflicting_options() -> None:
    with pytest.raises(ValueError, match="stochastic rounding has no master weights to split; keep only"):
        Bf16(stochastic_rounding=True, split_masters=True)
    with pytest.raises(ValueError, match="split master weights need float32 gradients; leave main_grads out"):
        Bf16(split_masters=True, main_grads=False)
