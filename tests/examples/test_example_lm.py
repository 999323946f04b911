"""accumulate_lm.py: curves and state hashes on several layouts, and rejected sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from meshstep.parallel import ProcessGroupRegistry, Topology
from run_example import (
    assert_same_test_losses,
    example,
    losses_of_tests,
    printed_by_example,
    read_curve,
    run_example,
)
from world import World

# The 104 training paragraphs make 7 steps per epoch: 6 of 16 paragraphs, and one of 8. With `--accumulate 2`, the last step
# of an epoch has only one micro-batch.
FLAGS = ["--paragraphs", "232", "--batch-size", "16", "--epochs", "2", "--width", "32", "--depth", "1", "--seed", "3"]
STEPS = 14


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.Tensor, str]:
    """The curve and the printed text of a run in one process."""
    path = tmp_path_factory.mktemp("lm") / "one.csv"
    printed = run_example("accumulate_lm", "--curve", str(path), *FLAGS)
    curve = read_curve(path)
    assert curve.shape == (STEPS, 3)
    before, after = losses_of_tests(printed)
    assert after < before - 1, "the model should learn"
    return curve, printed


@pytest.mark.parametrize(
    ("topology", "accumulate"), [("data=2,tensor=2", 2), ("data=2,cp=2", 1), ("cp=2,tensor=2", 2), ("cp=4", 1)]
)
def test_lm_example_on_several_layouts_matches_single_process_run(
    world: World, topology: str, accumulate: int, one_process: tuple[torch.Tensor, str], tmp_path: Path
) -> None:
    """Data ranks, sequence shards and micro-batches have different numbers of tokens."""
    path = tmp_path / "split.csv"
    how = ["--curve", str(path), "--accumulate", str(accumulate), *FLAGS]
    printed, *others = world.run(4, printed_by_example, "accumulate_lm", how, topology)
    assert others == ["", "", ""]
    curve, expected = one_process
    torch.testing.assert_close(read_curve(path), curve, rtol=2e-5, atol=0)
    assert_same_test_losses(printed, expected)
    written = "it writes:"
    assert printed[printed.index(written) :] == expected[expected.index(written) :]


@pytest.mark.parametrize(("ranks", "zero"), [(2, 0), (4, 2), (8, 1)])
def test_lm_example_prints_equal_hash_and_losses_on_1_2_4_and_8_data_ranks(
    world: World, ranks: int, zero: int, tmp_path: Path
) -> None:
    """Hashes and losses must be bitwise identical. As a negative control, another number of micro-batches must change
    the hash."""
    short = [*FLAGS[:4], "--steps", "4", "--width", "16", "--depth", "1"]
    hashes, curves = list[str](), list[torch.Tensor]()
    for count, micro_batches, flags in ((1, 8, []), (ranks, 8, ["--zero", str(zero)]), (1, 4, [])):
        path = tmp_path / f"{len(curves)}.csv"
        how = ["--curve", str(path), "--micro-batches", str(micro_batches), *flags, *short]
        printed = world.run(count, printed_by_example, "accumulate_lm", how, f"data={count}")[0]
        hashes += [line for line in printed.splitlines() if line.startswith("state hash:")]
        curves.append(read_curve(path))
    assert hashes[0] == hashes[1] != hashes[2]
    assert torch.equal(curves[0], curves[1])


def too_few_heads() -> None:
    with (
        ProcessGroupRegistry(Topology(cp=2, tensor=1)) as registry,
        pytest.raises(ValueError, match=r"3 attention heads can't be divided evenly among 2 ranks \(tensor x cp\)"),
    ):
        example("models.gpt").GPT(registry, 30, 3, 1)


def test_attention_heads_not_divisible_by_tensor_and_context_ranks_raise(world: World) -> None:
    world.run(2, too_few_heads)
