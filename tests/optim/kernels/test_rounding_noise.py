"""The random numbers for stochastic rounding in plain torch, and rounding by torch operators without kernels."""

from __future__ import annotations

import torch
from kernel_formulas import noise_of, philox
from meshstep.amp.stochastic_rounding import (
    Drawn,
    Noise,
    _add_noise_by_mask,
    _add_noise_to_default_nans,
    round_all_,
    stochastic_round_,
)
from rounding_cases import BF16, values
from torch import Tensor

# The noise ------------------------------------------------------------------------------------------------------------


def words(key: int, counter: list[int]) -> list[int]:
    """Return the words of Philox 4x32-10, computed with Python integers."""
    k, mask = [key & 0xFFFFFFFF, key >> 32], 0xFFFFFFFF
    c = list(counter)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & mask, a >> 32 ^ c[3] ^ k[1], a & mask]
        k = [k[0] + 0x9E3779B9 & mask, k[1] + 0xBB67AE85 & mask]
    return c


def test_plain_philox_matches_published_vectors() -> None:
    """The vectors are those of the Random123 library (kat_vectors)."""
    assert words(0, [0] * 4) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words(2**64 - 1, [2**32 - 1] * 4) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert words(0x299F31D0A4093822, pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    for key, counter in ((0, [0] * 4), (2**64 - 1, [2**32 - 1] * 4), (0x299F31D0A4093822, pi)):
        assert philox(key, torch.tensor(counter).view(4, 1)).flatten().tolist() == words(key, counter)


def test_rounding_noise_is_uniform_and_depends_on_key_and_tensor_number_and_step() -> None:
    numel = 100_000
    first = noise_of(5, 0, 0, numel)
    for others in ((6, 0, 0), (5, 1, 0), (5, 0, 1), (5, 0, 2**32)):
        assert float((noise_of(*others, numel) == first).double().mean()) < 1e-3
    assert torch.equal(noise_of(5, 0, 0, 9000), first[:9000])
    counts = torch.bincount(first >> 8, minlength=256).double()
    chi_squared = float(((counts - numel / 256) ** 2 / (numel / 256)).sum())
    assert 255 - 5 * 510**0.5 < chi_squared < 255 + 5 * 510**0.5
    assert len(first.unique()) > 0.75 * 2**16  # 78 % of the numbers are expected


# Other operators ------------------------------------------------------------------------------------------------------


def test_rounding_with_and_without_nan_mask_is_bitwise_equal_except_for_nans() -> None:
    """`_add_noise_by_mask` rounds on a CPU, and `_add_noise_to_default_nans` on a GPU without Triton kernels."""
    flat = values((40_000,), 3)
    noise = torch.randint(-(2**15), 2**15, (40_000,), generator=torch.Generator().manual_seed(1)).to(torch.int16)
    before = flat.clone()
    masked, found = _add_noise_by_mask(flat, noise), _add_noise_to_default_nans(flat, noise)
    assert torch.equal(flat.view(torch.int32), before.view(torch.int32))
    assert torch.equal(masked[~flat.isnan()], found[~flat.isnan()])
    assert bool(found.to(torch.int16).view(BF16)[flat.isnan()].isnan().all())


def test_tensors_not_supported_by_rounding_kernel_are_rounded_by_torch() -> None:
    sources = [torch.randn(50, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    pairs = [(torch.zeros(50, dtype=BF16), source) for source in sources]
    drawn = [Drawn(Noise(1, 2, name), [pair]) for name, pair in zip("ab", pairs, strict=True)]
    round_all_(drawn, 10**6, lambda everything: [one for one in everything if one.noise.name == "b"])
    assert not pairs[0][0].any()
    expected = torch.empty(50, dtype=BF16)
    stochastic_round_(expected, sources[1], torch.Generator().manual_seed(drawn[1].noise.generator_seed))
    assert torch.equal(pairs[1][0], expected)


def test_drawn_noise_of_a_parameter_does_not_depend_on_parameters_rounded_with_it() -> None:
    def rounded(names: str) -> dict[str, Tensor]:
        pairs = {}
        for name in names:
            source = torch.randn(50 + ord(name), generator=torch.Generator().manual_seed(ord(name)))
            pairs[name] = torch.zeros(len(source), dtype=BF16), source
        round_all_([Drawn(Noise(1, 2, name), [pair]) for name, pair in pairs.items()], 10**6, None)
        return {name: target for name, (target, _) in pairs.items()}

    together = rounded("abc")
    for names in ("a", "b", "cb", "ca"):
        for name, target in rounded(names).items():
            assert torch.equal(target, together[name])
