"""The Triton kernel for stochastic rounding in the interpreter: bitwise equal to plain torch, and unbiased."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted import Interpreted, interpreted_pool, why_no_triton
from meshstep.amp import Bf16
from meshstep.amp.stochastic_rounding import (
    Drawn,
    Noise,
    _add_noise_by_mask,
    _add_noise_to_default_nans,
    round_all_,
    stochastic_round_,
)
from meshstep.optim import HalfStates, ParallelOptimizer
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from torch import Tensor, nn

pytestmark = pytest.mark.skipif(bool(why_no_triton()), reason=why_no_triton())
BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def pool() -> Iterator[Interpreted]:
    with interpreted_pool() as made:
        yield made


def values(shape: Sequence[int], seed: int) -> Tensor:
    """Return values of many magnitudes, with infinities, zeros, denormals, values near the largest, and NaNs."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, tuple(shape), generator=generator).to(torch.int32)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 3.4028e38, 1e-45])
    special = torch.cat([special, torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(F32)])
    chosen = special[torch.randint(len(special), tuple(shape), generator=generator)]
    return torch.where(torch.rand(tuple(shape), generator=generator) < 0.1, chosen, bits.view(F32))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16)


# The reference --------------------------------------------------------------------------------------------------------


def words(key: int, counter: list[int]) -> list[int]:
    """Return the words of Philox 4x32-10, with Python's integers."""
    k, mask = [key & 0xFFFFFFFF, key >> 32], 0xFFFFFFFF
    c = list(counter)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & mask, a >> 32 ^ c[3] ^ k[1], a & mask]
        k = [k[0] + 0x9E3779B9 & mask, k[1] + 0xBB67AE85 & mask]
    return c


def test_plain_philox_matches_published_vectors() -> None:
    """The vectors are those of the Random123 library (kat_vectors)."""
    from meshstep.optim.kernels.triton_rounding import philox

    assert words(0, [0] * 4) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words(2**64 - 1, [2**32 - 1] * 4) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert words(0x299F31D0A4093822, pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    for key, counter in ((0, [0] * 4), (2**64 - 1, [2**32 - 1] * 4), (0x299F31D0A4093822, pi)):
        assert philox(key, torch.tensor(counter).view(4, 1)).flatten().tolist() == words(key, counter)


def test_noise_of_tensor_is_uniform_and_depends_on_every_argument() -> None:
    from meshstep.optim.kernels.triton_rounding import noise_of

    numel = 100_000
    first = noise_of(5, 0, 0, numel)
    for others in ((6, 0, 0), (5, 1, 0), (5, 0, 1), (5, 0, 2**32)):
        assert float((noise_of(*others, numel) == first).double().mean()) < 1e-3
    assert torch.equal(noise_of(5, 0, 0, 9000), first[:9000])
    counts = torch.bincount(first >> 8, minlength=256).double()
    chi_squared = float(((counts - numel / 256) ** 2 / (numel / 256)).sum())
    assert 255 - 5 * 510**0.5 < chi_squared < 255 + 5 * 510**0.5
    assert len(first.unique()) > 0.75 * 2**16  # 78 % of the numbers are expected


# The kernel -----------------------------------------------------------------------------------------------------------

SHAPES = ((16384 + 4096 + 600,), (3,), (4096,), (2, 3, 5), (0, 4), ())


def rounded_by_kernel() -> list[str]:
    """Round tensors of several shapes, strides, keys and steps. Return the cases in which bits differ from plain torch."""
    from meshstep.optim.kernels.rounding import round_by_kernels
    from meshstep.optim.kernels.triton_rounding import noise_of, round_plainly

    wrong = []
    for steps, strided in product((0, 7, 2**33 + 1), (False, True)):
        drawn, sources = [], []
        for index, shape in enumerate(SHAPES):
            pairs = []
            for number in range(2):
                source = values(shape, 10 * index + number)
                target = torch.empty(shape, dtype=BF16)
                if strided and len(shape) > 1:
                    source = source.transpose(0, -1).contiguous().transpose(0, -1)
                    target = target.transpose(0, -1).contiguous().transpose(0, -1)
                pairs.append((target, source))
                sources.append((index, number, target, source))
            drawn.append(Drawn(Noise(3, steps, f"weight {index}"), pairs))
        assert round_by_kernels(drawn) == []
        for index, number, target, source in sources:
            noise = noise_of(drawn[index].noise.key, number, steps, source.numel())
            if not torch.equal(bits(target), bits(round_plainly(source, noise))):
                wrong.append(f"{SHAPES[index]} {number} in step {steps}, strided {strided}")
    return wrong


def test_triton_rounding_is_bitwise_equal_to_plain_torch(pool: Interpreted) -> None:
    assert pool(rounded_by_kernel) == []


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


def test_triton_rounding_is_unbiased(pool: Interpreted) -> None:
    """The standard deviation of a mean of n draws is at most 1 / (2 sqrt n) units; allow 5 standard deviations."""
    assert max(pool(mean_errors)) < 5 * 0.5 / 40_000**0.5


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


def test_triton_rounding_keeps_bfloat16_values_infinities_and_nans(pool: Interpreted) -> None:
    pool(special_values)


def moved_by_one() -> None:
    """Round tensors whose addresses are not multiples of 16."""
    from meshstep.optim.kernels.rounding import round_by_kernels
    from meshstep.optim.kernels.triton_rounding import noise_of, round_plainly

    source, target = values((5001,), 1)[1:], torch.empty(5001, dtype=BF16)[1:]
    drawn = Drawn(Noise(0, 0, "weight"), [(target, source)])
    round_by_kernels([drawn])
    assert torch.equal(bits(target), bits(round_plainly(source, noise_of(drawn.noise.key, 0, 0, 5000))))


def test_triton_rounding_supports_tensors_at_unaligned_addresses(pool: Interpreted) -> None:
    pool(moved_by_one)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_triton_rounding_compiles_to_vector_loads_without_barriers(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aligned addresses use vectors of four, also for the stores of two bytes per element. Nothing goes through shared
    memory, and no instruction is approximate or atomic. The limit of registers allows six programs per SM."""
    from meshstep.optim.kernels import triton_rounding_kernel as module
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime import JITFunction

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel: Any = module.round_chunks
    if not isinstance(kernel, JITFunction):
        pytest.skip("TRITON_INTERPRET=1: this process interprets the kernels, and compiles none")
    names = list(kernel.arg_names)
    for aligned in (True, False):
        constants = {"ALIGNED": aligned, "LANES": module.LANES, "ROWS": module.ROWS, "CHUNK": module.CHUNK}
        signature = {name: "constexpr" if name in constants else "i32" if name == "step" else "*i64" for name in names}
        source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
        made = compile(source, target=GPUTarget("cuda", capability, 32))
        ptx = str(made.asm["ptx"])
        assert not re.search(r"\batom\.|\bred\.|\.approx|\bbar\.", ptx)
        assert len(re.findall(r"ld\.global\S*\.v4", ptx)) == (module.ROWS if aligned else 0)
        assert len(re.findall(r"st\.global\S*\.v2\.b32", ptx)) == (module.ROWS if aligned else 0)
        assert made.metadata.shared == 0
        if registers := registers_of(made.asm["cubin"], tmp_path):
            assert registers <= 80


def registers_of(cubin: bytes, folder: Path) -> int | None:
    """Return the number of registers per thread; None if Triton came without cuobjdump."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    printed = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+)", printed)
    assert found
    return int(found[1])


# Ranks ----------------------------------------------------------------------------------------------------------------


def stepped_on_ranks(states_only: bool) -> dict[str, list[list[float]]]:
    """Return the bfloat16 tensors of parameters that are replicated or sharded over two tensor ranks."""
    topology = Topology(data=2, tensor=2)
    with ProcessGroupRegistry(topology) as registry:
        dtype = F32 if states_only else BF16
        params = {name: nn.Parameter(torch.ones(50, dtype=dtype)) for name in ("whole", "sharded")}
        for name, spec in (("whole", P()), ("sharded", P("tensor"))):
            annotate(params[name], spec, name)
        adamw = torch.optim.AdamW(params.items(), lr=1e-3, fused=True)
        options: dict[str, Any] = {"states": HalfStates()} if states_only else {}
        precision: Any = "fp32" if states_only else Bf16(stochastic_rounding=True)
        optimizer = ParallelOptimizer(adamw, registry, precision=precision, check_replicas=False, **options)
        for step in range(3):
            with optimizer.window():
                for param in params.values():
                    param.grad = torch.full_like(param, 0.3 + step)
            optimizer.step()
        found = {}
        for name, param in params.items():
            tensors = [param, *(value for _, value in sorted(optimizer.state[param].items()))]
            found[name] = [tensor.tolist() for tensor in tensors if tensor.dtype == BF16]
        return found


@pytest.mark.parametrize("states_only", [False, True])
def test_triton_rounding_is_equal_on_replicas_and_differs_between_shards(pool: Interpreted, states_only: bool) -> None:
    ranks = pool.run(4, stepped_on_ranks, states_only)  # rank = 2 data + tensor
    assert len(ranks[0]["whole"]) == (2 if states_only else 3)
    assert all(len({*tensor}) > 1 for tensor in ranks[0]["whole"])
    assert all(rank["whole"] == ranks[0]["whole"] for rank in ranks)
    assert ranks[0] == ranks[2]
    assert ranks[1] == ranks[3]
    for one, other in zip(ranks[0]["sharded"], ranks[1]["sharded"], strict=True):
        assert one != other


# Other operators ------------------------------------------------------------------------------------------------------


def test_rounding_without_mask_is_bitwise_equal_except_for_nans() -> None:
    """`_add_noise_by_mask` rounds on a CPU, and `_add_noise_to_default_nans` on a GPU without Triton kernels."""
    flat = values((40_000,), 3)
    noise = torch.randint(-(2**15), 2**15, (40_000,), generator=torch.Generator().manual_seed(1)).to(torch.int16)
    before = flat.clone()
    masked, found = _add_noise_by_mask(flat, noise), _add_noise_to_default_nans(flat, noise)
    assert torch.equal(flat.view(torch.int32), before.view(torch.int32))
    assert torch.equal(masked[~flat.isnan()], found[~flat.isnan()])
    assert bool(found.to(torch.int16).view(BF16)[flat.isnan()].isnan().all())


def test_tensors_that_a_kernel_returns_are_rounded_by_torch() -> None:
    sources = [torch.randn(50, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    pairs = [(torch.zeros(50, dtype=BF16), source) for source in sources]
    drawn = [Drawn(Noise(1, 2, name), [pair]) for name, pair in zip("ab", pairs, strict=True)]
    round_all_(drawn, 10**6, lambda everything: [one for one in everything if one.noise.name == "b"])
    assert not pairs[0][0].any()
    expected = torch.empty(50, dtype=BF16)
    stochastic_round_(expected, sources[1], torch.Generator().manual_seed(drawn[1].noise.generator_seed))
    assert torch.equal(pairs[1][0], expected)
