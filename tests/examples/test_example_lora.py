"""The LoRA example, sharded and in one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from run_example import losses_of_tests, printed_by_example, run_example
from world import World

SIZE = ["--width", "32", "--depth", "1"]
FLAGS = [*SIZE, "--steps", "40", "--r", "4"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a checkpoint of accumulate_lm.py."""
    path = str(tmp_path_factory.mktemp("lora") / "base")
    few = ["--paragraphs", "232", "--steps", "20", "--save-every", "20"]
    run_example("accumulate_lm", "--resume", path, *few, *SIZE)
    return path


def bytes_of(printed: str) -> int:
    found = re.search(r"memory: +(\d+) bytes", printed)
    assert found is not None, printed
    return int(found.group(1))


def losses_of(printed: str) -> list[float]:
    found = re.search(r"losses: +([\d. ]+)", printed)
    assert found is not None, printed
    return [*map(float, found.group(1).split()), *map(float, losses_of_tests(printed))]


@pytest.mark.parametrize("dora", [False, True])
def test_lora_example_has_same_losses_sharded_as_in_one_process(world: World, base: str, dora: bool) -> None:
    flags = ["--base", base, *FLAGS, *(["--dora"] if dora else [])]
    one = run_example("finetune_lora", *flags)
    before, after = losses_of_tests(one)
    assert after < before - 0.3, "the adapters should learn"
    full = run_example("finetune_lora", "--base", base, *FLAGS, "--full", "--steps", "1")  # for its memory
    assert bytes_of(one) * 5 < bytes_of(full)
    for ranks, topology, more in ((2, "tensor=2", []), (4, "data=2,tensor=2", ["--fsdp"])):
        printed = world.run(ranks, printed_by_example, "finetune_lora", [*flags, *more], topology)[0]
        assert losses_of(printed) == pytest.approx(losses_of(one), abs=1.01e-4)
        assert bytes_of(printed) < bytes_of(one)


def test_lora_example_without_base_checkpoint_exits_with_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"has no checkpoint; write one with accumulate_lm\.py --resume"):
        run_example("finetune_lora", "--base", str(tmp_path), *FLAGS)
