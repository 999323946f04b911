"""Stochastic rounding by the compiled loop, compared bitwise with plain torch and the Triton kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import pytest
import torch
from interpreted import Interpreted, why_no_triton
from kernel_formulas import noise_of, round_plainly
from loops import using, variants_here, with_threads, with_variant
from meshstep.amp.stochastic_rounding import Drawn, Noise, round_all_, stochastic_round_
from meshstep.optim.kernels.native import torchs_threads
from meshstep.optim.kernels.rounding import round_by_kernels
from rounding_cases import BF16, F32, assert_replicas_equal_and_shards_different, bits, stepped_on_ranks, values
from torch import Tensor, nn
from world import World

VARIANTS = variants_here()
SIZES = (0, 1, 15, 16, 17, 64, 511, 512, 513, 1025, 4095, 4096, 4097, 16384, 16385 + 4096)
STEPS = (0, 7, 2**33 + 1)


@pytest.fixture(autouse=True)
def _native_loops() -> Iterator[None]:
    with using("auto"):
        yield


def moved(tensor: Tensor, offset: int) -> Tensor:
    """Return a copy of a 1-dim tensor whose address is ``offset`` elements after an aligned address."""
    return torch.cat([tensor.new_zeros(offset), tensor])[offset:]


def expected(drawn: Drawn) -> list[Tensor]:
    """Return the bits of the tensors as plain torch rounds them."""
    key, steps = drawn.noise.key, drawn.noise.steps
    return [
        bits(round_plainly(source.float(), noise_of(key, number, steps, source.numel())))
        for number, (_, source) in enumerate(drawn.pairs)
    ]


def wrong(everything: Sequence[Drawn]) -> list[str]:
    """Round all tensors by the compiled loop. Return the tensors whose bits differ from those of plain torch."""
    assert round_by_kernels(everything) == []
    return [
        f"{drawn.noise}, tensor {number}"
        for drawn in everything
        for number, ((target, _), rounded) in enumerate(zip(drawn.pairs, expected(drawn), strict=True))
        if not torch.equal(bits(target), rounded)
    ]


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_native_loop_rounding_is_bitwise_equal_to_plain_torch_for_many_sizes_and_addresses(
    variant: str, steps: int
) -> None:
    """One call rounds all tensors, at several addresses modulo 16 bytes."""
    everything = []
    for index, (numel, offset) in enumerate(product(SIZES, (0, 1, 3))):
        sources = [moved(values((numel,), 10 * index + number), offset) for number in range(2)]
        pairs = [(moved(torch.zeros(numel, dtype=BF16), 7 - offset), source) for source in sources]
        everything.append(Drawn(Noise(3, steps, f"weight {index}"), pairs))
    with with_variant(variant):
        assert wrong(everything) == []
    other = everything[-1]._replace(noise=Noise(3, steps + 1, everything[-1].noise.name))
    assert not torch.equal(bits(other.pairs[0][0]), expected(other)[0])  # negative control


@pytest.mark.parametrize("variant", VARIANTS)
def test_native_loop_rounding_keeps_bfloat16_values_infinities_and_upper_nan_bits(variant: str) -> None:
    exact = torch.randn(1000).to(BF16).float()
    subnormals = torch.tensor([1, -(2**31) + 1, 0x7FFFFF, 0x10000], dtype=torch.int32).view(F32)
    kept = torch.cat([exact, torch.tensor([0.0, -0.0, torch.inf, -torch.inf]), subnormals[3:]]).repeat(20)
    nans = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1, 0x7FC0FFFF], dtype=torch.int32).view(F32).repeat(3000)
    targets = [torch.zeros(source.shape, dtype=BF16) for source in (kept, nans, subnormals)]
    pairs = [*zip(targets, (kept, nans, subnormals), strict=True)]
    for steps in range(5):
        with with_variant(variant):
            assert wrong([Drawn(Noise(0, steps, "weight"), pairs)]) == []
        assert torch.equal(targets[0].float().view(torch.int32), kept.view(torch.int32))
        assert torch.equal(targets[1].view(torch.int16).int(), nans.view(torch.int32) >> 16)
        assert bool((targets[2].float().abs() <= 2.0**-126).all())


def test_native_loop_rounding_is_bitwise_equal_for_all_loop_variants_and_threads() -> None:
    sources = [values((numel,), numel) for numel in (3, 1_000_003, 17, 300_001)]
    found = list[Tensor]()
    for variant, threads, torchs in product(VARIANTS, (1, 2, 5), (True, False)):
        targets = [torch.zeros(source.shape, dtype=BF16) for source in sources]
        with with_threads(threads, torchs), with_variant(variant):
            round_by_kernels([Drawn(Noise(1, 2, "weight"), [*zip(targets, sources, strict=True)])])
        found.append(torch.cat([*map(bits, targets)]))
    assert all(torch.equal(one, found[0]) for one in found)
    drawn = Drawn(Noise(1, 2, "weight"), [*zip(targets, sources, strict=True)])
    assert torch.equal(found[0], torch.cat(expected(drawn)))
    assert torchs_threads() is not None  # otherwise the loops never use torch's threads


def test_native_loop_rounding_draws_noise_in_row_major_order_for_strided_tensors() -> None:
    source = values((40, 61), 1)
    turned, strided = source.t().contiguous().t(), torch.stack([source, source], -1)[..., 0]
    pairs = [
        (torch.zeros(61, 40, dtype=BF16).t(), turned),
        (torch.zeros(40, 61, 2, dtype=BF16)[..., 0], strided),
        (torch.zeros(40, 61, dtype=BF16), source.double()),
        (torch.zeros((), dtype=BF16), source[0, 0]),
    ]
    assert wrong([Drawn(Noise(0, 0, "weight"), pairs)]) == []


@pytest.mark.skipif(bool(why_no_triton()), reason=why_no_triton())
def test_native_loop_rounding_is_bitwise_equal_to_interpreted_triton_kernel(interpreted: Interpreted) -> None:
    by_triton, by_loop = interpreted(rounded_here), rounded_here()
    assert by_loop == by_triton
    with using("torch"):  # negative control
        assert rounded_here() != by_triton


def rounded_here() -> list[list[int]]:
    """Return the bits of tensors that this process rounds with the kernels in use."""
    sources = [values((numel,), numel) for numel in (1, 17, 1025, 16384 + 4096 + 600)]
    targets = [torch.zeros(source.shape, dtype=BF16) for source in sources]
    pairs = [*zip(targets, sources, strict=True)]
    round_all_([Drawn(Noise(5, 2**33 + 1, "weight"), pairs)], 10**6, round_by_kernels)
    return [bits(target).tolist() for target in targets]


def test_torch_kernels_round_with_random_numbers_of_torch_generator() -> None:
    source = values((1025,), 1)
    by_loop, by_torch, reference = (torch.zeros(1025, dtype=BF16) for _ in range(3))
    noise = Noise(1, 2, "weight")
    round_all_([Drawn(noise, [(by_loop, source)])], 10**6, round_by_kernels)
    with using("torch"):
        drawn = [Drawn(noise, [(by_torch, source)])]
        assert round_by_kernels(drawn) == drawn
        round_all_(drawn, 10**6, round_by_kernels)
    stochastic_round_(reference, source, torch.Generator().manual_seed(noise.generator_seed))
    assert torch.equal(bits(by_torch), bits(reference))
    assert not torch.equal(bits(by_loop), bits(by_torch))


def test_native_loop_rounding_leaves_tensor_subclasses_and_lazy_negative_tensors_to_torch() -> None:
    class Other(Tensor):
        pass

    plain, target = torch.ones(4), torch.zeros(4, dtype=BF16)
    negated = torch.imag(torch.ones(4, dtype=torch.complex64).conj())
    assert negated.is_neg()
    unsupported = [
        Drawn(Noise(0, 0, "subclass"), [(target, plain.as_subclass(Other))]),
        Drawn(Noise(0, 0, "negated"), [(target, plain), (target, negated)]),
    ]
    supported = Drawn(Noise(0, 0, "parameter"), [(nn.Parameter(torch.zeros(4, dtype=BF16)), plain)])
    assert round_by_kernels([unsupported[0], supported, unsupported[1]]) == unsupported
    assert not target.any()
    assert supported.pairs[0][0].tolist() == [1.0] * 4


def test_native_loop_rounding_of_tensor_saved_by_autograd_makes_backward_raise() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=BF16))
    loss = weight.square().sum()
    round_by_kernels([Drawn(Noise(0, 0, "weight"), [(weight, torch.ones(4))])])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("states_only", [False, True])
def test_native_loop_rounding_is_equal_on_replicas_and_differs_between_shards(world: World, states_only: bool) -> None:
    assert_replicas_equal_and_shards_different(world.run(4, stepped_on_ranks, states_only))
