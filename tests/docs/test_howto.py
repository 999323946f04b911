"""How-to pages that need several ranks, other packages, or pytest: their snippets print what the page shows.

CLUSTERS.md runs in test_clusters.py, and the other how-to pages run in test_pages.py.
``python tests/docs/test_howto.py PAGE``, with ``tests/harness`` on the path, writes the printed text into the page.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import forked_python
import pytest
from meshstep.optim.kernels.choice import kernels_here
from snippets import blocks, printed_by
from world import World

ROOT = Path(__file__).parent.parent.parent
HOWTO = ROOT / "docs" / "howto"
RANKS = {  # page -> the number of ranks that its snippets run on
    "PARAMETER_GROUPS.md": 2,
    "FINE_TUNING.md": 2,
    "LORA.md": 2,
    "ZERO.md": 2,
    "TENSOR_PARALLEL.md": 4,
    "PIPELINES.md": 2,
    "REPLICA_CHECKS.md": 2,
    "VERIFY_A_LAYOUT.md": 2,
    "EXPERTS.md": 2,
    "FSDP2_AND_DTENSOR.md": 4,
    "CLIP_DTENSORS.md": 4,
    "SAME_BITS.md": 2,
}
HASH = re.compile(r"\b[0-9a-f]{16}\b")


def session(codes: list[str], name: str) -> list[str]:
    """Return the text that each snippet of a page prints on this rank."""
    namespace: dict[str, Any] = {"__name__": name}
    try:
        return [printed_by(code, name, namespace) for code in codes]
    finally:
        if "registry" in namespace:
            namespace["registry"].close()


def parts_of(page: str) -> tuple[list[str], list[str]]:
    codes, shown = zip(*blocks("python", (HOWTO / page).read_text()), strict=True)
    return list(codes), list(shown)


@pytest.mark.parametrize("page", RANKS)
def test_howto_snippets_on_several_ranks_print_the_shown_text(world: World, page: str) -> None:
    codes, shown = parts_of(page)
    first, *others = world.run(RANKS[page], session, codes, page)
    if kernels_here() == "torch":  # the shown hashes are those of the compiled kernels
        first, shown = ([HASH.sub("", text) for text in texts] for texts in (first, shown))
    assert first == shown
    assert others == [[""] * len(codes)] * (RANKS[page] - 1)


@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_same_bits_page_snippets_print_same_hash_on_1_2_4_and_8_ranks(world: World, ranks: int) -> None:
    codes, _ = parts_of("SAME_BITS.md")
    on_two_ranks = world.run(2, session, codes, "SAME_BITS.md")[0]
    assert world.run(ranks, session, codes, "SAME_BITS.md")[0] == on_two_ranks


# LOGGING.md -----------------------------------------------------------------------------------------------------------


class Service:
    """A substitute for the package of a dashboard, which may not be installed. It records the logged steps."""

    def __init__(self) -> None:
        self.steps: set[int] = set()

    def log(self, data: dict[str, float], step: int) -> None:
        assert data
        self.steps.add(step)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        assert name
        self.steps.add(step)

    def finish(self, exit_code: int) -> None:
        assert exit_code == 0

    def close(self) -> None:
        pass


def test_logging_page_snippets_write_to_every_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wandb, tensorboard = Service(), Service()
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **options: wandb))
    writer = types.SimpleNamespace(SummaryWriter=lambda log_dir: tensorboard)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", writer)
    monkeypatch.chdir(tmp_path)
    codes, shown = parts_of("LOGGING.md")
    assert session(codes, "LOGGING.md") == shown
    assert wandb.steps == tensorboard.steps == {10, 20}
    lines = (tmp_path / "runs" / "1.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [10, 20]
    assert len((tmp_path / "runs" / "1.csv").read_text().splitlines()) == 3


# TESTING.md -----------------------------------------------------------------------------------------------------------


def test_testing_page_example_fails_only_with_wrong_spec(tmp_path: Path) -> None:
    page = (HOWTO / "TESTING.md").read_text()
    ((code, _),), ((message, _),) = blocks("python", page), blocks("text", page)
    right, wrong = "declare(self, self.specs)", 'declare(self, {**self.specs, "up": P()})'
    assert right in code
    assert f"Replace `{right}` by `{wrong}`" in page
    (tmp_path / "test_right.py").write_text(code)
    (tmp_path / "test_wrong.py").write_text(code.replace(right, wrong))
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-q", "test_right.py", "test_wrong.py"]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", "0"]
    done = forked_python.run(*command, cwd=tmp_path)
    assert "2 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "FAILED test_right.py" not in done.stdout
    assert all(line in done.stdout for line in message.splitlines()), done.stdout


# Writing the printed text into pages ----------------------------------------------------------------------------------


def write(name: str) -> None:
    """Put the text that a page prints now into the page."""
    path = HOWTO / name
    codes, _ = parts_of(name)
    world = World()
    texts = world.run(RANKS[name], session, codes, name)[0] if name in RANKS else session(codes, name)
    world.close()
    page = path.read_text()
    for code, text in zip(codes, texts, strict=True):
        before, _, after = page.partition(code)
        if text:
            shown, _, after = after.partition("```text\n")
            page = f"{before}{code}{shown}```text\n{text}```{after.partition('```')[2]}"
    path.write_text(page)


if __name__ == "__main__":
    for page_name in sys.argv[1:]:
        write(page_name)
