"""Every page of the repository: its snippets run and print what they show, its links and pictures are there.

A page is any Markdown file. Its Python blocks are one session, in their order; or, in PROGRAMS, programs of their own.
Pages that need more (several ranks, errors, other packages) have a test of their own, which ELSEWHERE names. So no block
can be added that nothing runs.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from meshstep.parallel.__main__ import main as print_topology
from snippets import blocks, languages, printed_by

ROOT = Path(__file__).parent.parent.parent
FOLDERS = (".", "parallel", "amp", "optim", "examples", "docs", "tests")
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for folder in FOLDERS
    for path in sorted((ROOT / folder).glob("*.md") if folder == "." else (ROOT / folder).rglob("*.md"))
}
PROGRAMS = ("README.md",)
ELSEWHERE = {  # page -> the tests that run its Python, or whose harness does
    "docs/explanation/MUSEUM.md": "docs/test_museum.py",
    "docs/explanation/SCALE.md": "docs/test_scale.py",
    "docs/howto/CLUSTERS.md": "docs/test_clusters.py",
    "docs/howto/PARAMETER_GROUPS.md": "docs/test_howto.py",
    "docs/howto/FINE_TUNING.md": "docs/test_howto.py",
    "docs/howto/LOGGING.md": "docs/test_howto.py",
    "docs/howto/ZERO.md": "docs/test_howto.py",
    "docs/howto/TENSOR_PARALLEL.md": "docs/test_howto.py",
    "docs/howto/PIPELINES.md": "docs/test_howto.py",
    "docs/howto/VERIFY_A_LAYOUT.md": "docs/test_howto.py",
    "docs/howto/REPLICA_CHECKS.md": "docs/test_howto.py",
    "docs/howto/EXPERTS.md": "docs/test_howto.py",
    "docs/howto/FSDP2_AND_DTENSOR.md": "docs/test_howto.py",
    "docs/howto/TESTING.md": "docs/test_howto.py",
    "docs/integrations/PYTORCH.md": "docs/test_readme.py",
    "docs/integrations/COLOSSALAI.md": "docs/test_readme.py",
    "docs/integrations/MEGATRON_CORE.md": "docs/test_readme.py interop/test_megatron.py",
    "docs/integrations/DEEPSPEED.md": "docs/test_readme.py",
    "docs/integrations/TRANSFORMERS.md": "interop/test_transformers.py harness/trainer_runs.py",
    "docs/integrations/TORCHTITAN.md": "interop/run_torchtitan.py",
    "docs/integrations/ACCELERATE.md": "interop/run_accelerate.py",
    "docs/integrations/LIGHTNING_FABRIC.md": "interop/run_fabric.py",
    "docs/integrations/TIMM.md": "interop/run_timm.py",
    "docs/reference/ERRORS.md": "docs/test_errors_page.py",
    "docs/tutorials/FIRST_MLP.md": "docs/test_first_mlp.py",
}
# What is shown, and by whom it is run, where it is neither Python nor what Python prints.
OTHERS = {"text", "bash", "sh", "diff", "console", "yaml"}
WORDS = 900


def with_python(pages: dict[str, str]) -> list[str]:
    return [name for name, page in pages.items() if blocks("python", page)]


# Snippets -------------------------------------------------------------------------------------------------------------


def test_there_are_pages() -> None:
    assert len(PAGES) >= 20
    assert {*ELSEWHERE, *PROGRAMS} <= {*PAGES}


@pytest.mark.parametrize("name", [name for name in with_python(PAGES) if name not in ELSEWHERE])
def test_the_snippets_print_what_the_page_shows(name: str) -> None:
    session: dict[str, Any] = {"__name__": name}
    try:
        for code, output in blocks("python", PAGES[name]):
            assert printed_by(code, name, {"__name__": name} if name in PROGRAMS else session) == output
    finally:
        if torch.distributed.is_initialized():  # some join the processes, even if it is one
            torch.distributed.destroy_process_group()


def test_pages_that_other_tests_run_are_named_in_those_tests() -> None:
    for page, tests in ELSEWHERE.items():
        for test in tests.split():
            assert Path(page).name in (ROOT / "tests" / test).read_text(), f"{test} does not run {page}"


def test_every_diff_and_snippet_of_an_integration_is_run() -> None:
    with_code = {name for name, page in PAGES.items() if name.startswith("docs/integrations/") and blocks("diff", page)}
    assert with_code <= {*ELSEWHERE}


@pytest.mark.parametrize("name", PAGES)
def test_a_block_has_a_language_that_somebody_runs(name: str) -> None:
    assert languages(PAGES[name]) <= {"python", *OTHERS}


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if blocks("console", page)])
def test_what_the_table_of_ranks_prints(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for text, _ in blocks("console", PAGES[name]):
        command, _, output = text.partition("\n")
        prefix = "$ python -m meshstep.parallel "
        assert command.startswith(prefix)
        print_topology(command.removeprefix(prefix).split())
        assert capsys.readouterr().out == output


def commands(page: str) -> list[list[str]]:
    """The words of each line of its `sh` blocks."""
    text = "".join(text for text, _ in blocks("sh", page)).replace("\\\n", " ")
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


def source_of(words: list[str]) -> Path | None:
    """The file that `python [-m module | file]` or `torchrun [-m module | file]` runs, if it is the repository's."""
    if "-m" in words:
        module = words[words.index("-m") + 1]
        if not module.startswith(("meshstep", "tests")):
            return None
        folder = module.replace(".", "/").replace("meshstep/testing", "src/meshstep/testing").removeprefix("meshstep/")
        return ROOT / folder / "__main__.py"
    return next((ROOT / word for word in words if word.endswith(".py")), None)


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if commands(page)])
def test_commands_name_files_and_flags_that_exist(name: str) -> None:
    for words in commands(PAGES[name]):
        source = source_of(words)
        if source is None:
            continue
        assert source.is_file(), words
        start = words.index("-m") + 1 if "-m" in words else next(i for i, w in enumerate(words) if w.endswith(".py"))
        flags = {word for word in words[start:] if word.startswith("--")}
        said = "".join(path.read_text() for path in (source, ROOT / "examples" / "command_line.py"))
        assert {flag for flag in flags if flag not in said} == set(), words


# Files, links, pictures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_files_that_it_names_exist(name: str) -> None:
    for path in re.findall(r"(?<![\w/.])(?:examples|tests|parallel|amp|optim|docs)/[\w/.]+\w", PAGES[name]):
        assert (ROOT / path).exists() or (ROOT / name).parent.joinpath(path).exists(), path


def slug(heading: str) -> str:
    """As GitHub names it in a link."""
    return re.sub(r"[^\w -]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)).lower().replace(" ", "-")


def targets(page: str) -> list[str]:
    """What its links and pictures lead to."""
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    return [target for target in re.findall(r"\]\(([^)]+)\)", prose) if not target.startswith(("http:", "https:"))]


def dead(name: str, page: str) -> list[str]:
    """Its links that lead nowhere."""
    bad = []
    for target in targets(page):
        path, _, heading = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        text = page if not path else file.read_text() if heading and file.is_file() else ""
        headings = [slug(found) for found in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
        if (path and not file.exists()) or (heading and heading not in headings):
            bad.append(target)
    return bad


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    assert dead(name, PAGES[name]) == []


def test_a_dead_link_would_be_noticed() -> None:
    links = ("docs/README.md#how-to-guides", "optim/NONE.md", "README.md#none", "#here")
    page = "# Here\n" + " ".join(f"[a]({link})" for link in links) + " ![e](docs/none.svg)\n"
    assert dead("PAGE.md", page) == ["optim/NONE.md", "README.md#none", "docs/none.svg"]


def test_every_page_and_every_picture_is_linked() -> None:
    linked = {
        ((ROOT / name).parent / target.partition("#")[0]).resolve()
        for name, page in PAGES.items()
        for target in targets(page)
        if not target.startswith("#")
    }
    pictures = [path for folder in FOLDERS[1:] for path in (ROOT / folder).rglob("*.svg")]
    for path in (*(ROOT / name for name in PAGES if name != "README.md"), *pictures):
        assert path.resolve() in linked, f"nobody links to {path.relative_to(ROOT)}"


def test_every_picture_has_words_for_who_does_not_see_it() -> None:
    for name, page in PAGES.items():
        for words in re.findall(r"!\[([^]]*)\]", page):
            assert len(words.split()) >= 8, f"{name}: {words}"


# The README -----------------------------------------------------------------------------------------------------------


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].split()) <= WORDS


def test_why_and_the_change_are_on_its_first_screen() -> None:
    first, _, _ = PAGES["README.md"].partition("## Run it")
    assert first.index("docs/pictures/wrong_norms.svg") < first.index("-45.7%") < first.index("```diff")
    assert len(first.split()) < 420


def test_its_table_names_what_there_is() -> None:
    """What is in code marks in the second column are expressions of names that meshstep offers."""
    import meshstep

    table = PAGES["README.md"].partition("## What works")[2].partition("**Not on a GPU")[0]
    rows = [line.split("|")[2:4] for line in table.splitlines() if line.startswith("| ") and "](" in line]
    assert len(rows) >= 12
    for code, link in rows:
        assert targets(link), code
        for expression in re.findall(r"`([^`]+)`", code):
            called = re.match(r"(\w+)[(.]", expression)
            assert called is None or hasattr(meshstep, called[1]), expression


# The CI ----------------------------------------------------------------------------------------------------------------


def test_the_workflow_calls_what_ci_is() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert re.findall(r"^ +(?:- )?run: (.*)$", workflow, re.MULTILINE) == [".ci/run"]


def test_modules_that_sh_blocks_start_can_be_imported() -> None:
    found = {words[words.index("-m") + 1] for page in PAGES.values() for words in commands(page) if "-m" in words}
    for module in found - {"tests.gpu", "mkdocs", "ruff"}:  # of this folder, and of the extra `dev`
        assert importlib.util.find_spec(module) is not None, module
