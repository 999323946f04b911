"""Every page of the repository: its snippets run and print the shown output, its links and pictures exist.

A page is any Markdown file. Its Python blocks run in order in one session, except on pages in PROGRAMS, where each block
is a program of its own. Pages that need several ranks, errors or other packages have other tests, named in ELSEWHERE. So
every Python block is run, where the packages that it needs are installed.
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
ELSEWHERE = {  # page -> the test files that run its Python blocks, directly or through the harness
    "docs/explanation/MUSEUM.md": "docs/test_museum.py",
    "docs/explanation/SCALE.md": "docs/test_scale.py",
    "docs/howto/CLUSTERS.md": "docs/test_clusters.py",
    "docs/howto/PARAMETER_GROUPS.md": "docs/test_howto.py",
    "docs/howto/FINE_TUNING.md": "docs/test_howto.py",
    "docs/howto/LORA.md": "docs/test_howto.py",
    "docs/howto/LOGGING.md": "docs/test_howto.py",
    "docs/howto/ZERO.md": "docs/test_howto.py",
    "docs/howto/TENSOR_PARALLEL.md": "docs/test_howto.py",
    "docs/howto/PIPELINES.md": "docs/test_howto.py",
    "docs/howto/VERIFY_A_LAYOUT.md": "docs/test_howto.py",
    "docs/howto/REPLICA_CHECKS.md": "docs/test_howto.py",
    "docs/howto/EXPERTS.md": "docs/test_howto.py",
    "docs/howto/FSDP2_AND_DTENSOR.md": "docs/test_howto.py",
    "docs/howto/CLIP_DTENSORS.md": "docs/test_howto.py",
    "docs/howto/TESTING.md": "docs/test_howto.py",
    "docs/integrations/PYTORCH.md": "docs/test_readme.py",
    "docs/integrations/COLOSSALAI.md": "docs/test_readme.py",
    "docs/integrations/MEGATRON_CORE.md": "docs/test_readme.py interop/test_megatron.py",
    "docs/integrations/DEEPSPEED.md": "docs/test_readme.py",
    "docs/integrations/TRANSFORMERS.md": "interop/test_transformers.py harness/trainer_runs.py",
    "docs/integrations/TORCHTITAN.md": "interop/run_torchtitan.py",
    "docs/integrations/NEMO_AUTOMODEL.md": "interop/test_trainer_loops.py",
    "docs/integrations/VERL.md": "interop/test_trainer_loops.py",
    "docs/integrations/ACCELERATE.md": "interop/run_accelerate.py",
    "docs/integrations/LIGHTNING_FABRIC.md": "interop/run_fabric.py",
    "docs/integrations/TIMM.md": "interop/run_timm.py",
    "docs/reference/ERRORS.md": "docs/test_errors_page.py",
    "docs/tutorials/FIRST_MLP.md": "docs/test_first_mlp.py",
}
# Languages of blocks other than Python.
OTHERS = {"text", "bash", "sh", "diff", "console", "yaml"}
WORDS = 900


def with_python(pages: dict[str, str]) -> list[str]:
    return [name for name, page in pages.items() if blocks("python", page)]


# Snippets -------------------------------------------------------------------------------------------------------------


def test_pages_listed_in_test_tables_exist() -> None:
    assert len(PAGES) >= 20
    assert {*ELSEWHERE, *PROGRAMS} <= {*PAGES}


@pytest.mark.parametrize("name", [name for name in with_python(PAGES) if name not in ELSEWHERE])
def test_python_snippets_print_the_shown_output(name: str) -> None:
    session: dict[str, Any] = {"__name__": name}
    try:
        for code, output in blocks("python", PAGES[name]):
            assert printed_by(code, name, {"__name__": name} if name in PROGRAMS else session) == output
    finally:
        if torch.distributed.is_initialized():  # some snippets start a process group, even for one process
            torch.distributed.destroy_process_group()


def test_pages_run_by_other_tests_are_named_in_those_tests() -> None:
    for page, tests in ELSEWHERE.items():
        for test in tests.split():
            assert Path(page).name in (ROOT / "tests" / test).read_text(), f"{test} does not run {page}"


def test_every_integration_page_with_a_diff_is_run_by_a_test() -> None:
    with_code = {name for name, page in PAGES.items() if name.startswith("docs/integrations/") and blocks("diff", page)}
    assert with_code <= {*ELSEWHERE}


@pytest.mark.parametrize("name", PAGES)
def test_code_blocks_have_a_known_language(name: str) -> None:
    assert languages(PAGES[name]) <= {"python", *OTHERS}


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if blocks("console", page)])
def test_console_blocks_show_the_printed_topology_table(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for text, _ in blocks("console", PAGES[name]):
        command, _, output = text.partition("\n")
        prefix = "$ python -m meshstep.parallel "
        assert command.startswith(prefix)
        print_topology(command.removeprefix(prefix).split())
        assert capsys.readouterr().out == output


def commands(page: str) -> list[list[str]]:
    text = "".join(text for text, _ in blocks("sh", page)).replace("\\\n", " ")
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


def source_of(words: list[str]) -> Path | None:
    """Return the file of the repository that `python` or `torchrun` runs, by `-m module` or by name; else None."""
    if "-m" in words:
        module = words[words.index("-m") + 1]
        if not module.startswith(("meshstep", "tests")):
            return None
        folder = module.replace(".", "/").replace("meshstep/testing", "src/meshstep/testing").removeprefix("meshstep/")
        return ROOT / folder / "__main__.py"
    return next((ROOT / word for word in words if word.endswith(".py")), None)


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if commands(page)])
def test_commands_use_existing_files_and_flags(name: str) -> None:
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
def test_files_named_on_a_page_exist(name: str) -> None:
    for path in re.findall(r"(?<![\w/.])(?:examples|tests|parallel|amp|optim|docs)/[\w/.]+\w", PAGES[name]):
        assert (ROOT / path).exists() or (ROOT / name).parent.joinpath(path).exists(), path


def slug(heading: str) -> str:
    """Return the anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w -]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)).lower().replace(" ", "-")


def targets(page: str) -> list[str]:
    """Return the targets of the relative links and pictures of a page."""
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    return [target for target in re.findall(r"\]\(([^)]+)\)", prose) if not target.startswith(("http:", "https:"))]


def dead(name: str, page: str) -> list[str]:
    """Return the targets of a page that do not exist."""
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
def test_links_of_a_page_are_valid(name: str) -> None:
    assert dead(name, PAGES[name]) == []


def test_dead_links_are_detected() -> None:
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
        assert path.resolve() in linked, f"no page links to {path.relative_to(ROOT)}"


def test_every_picture_has_alternative_text() -> None:
    for name, page in PAGES.items():
        for words in re.findall(r"!\[([^]]*)\]", page):
            assert len(words.split()) >= 8, f"{name}: {words}"


# The README -----------------------------------------------------------------------------------------------------------


def test_readme_has_at_most_900_words() -> None:
    assert len(PAGES["README.md"].split()) <= WORDS


def test_readme_starts_with_picture_norm_error_and_diff() -> None:
    first, _, _ = PAGES["README.md"].partition("## Run it")
    assert first.index("docs/pictures/wrong_norms.svg") < first.index("-45.7%") < first.index("```diff")
    assert len(first.split()) < 420


def test_readme_feature_table_names_exported_symbols_and_has_links() -> None:
    """Code in the second column uses names that meshstep exports."""
    import meshstep

    table = PAGES["README.md"].partition("## What works")[2].partition("**Tested on one GPU")[0]
    rows = [line.split("|")[2:4] for line in table.splitlines() if line.startswith("| ") and "](" in line]
    assert len(rows) >= 12
    for code, link in rows:
        assert targets(link), code
        for expression in re.findall(r"`([^`]+)`", code):
            called = re.match(r"(\w+)[(.]", expression)
            assert called is None or hasattr(meshstep, called[1]), expression


# The CI ----------------------------------------------------------------------------------------------------------------


def test_github_workflow_runs_the_ci_script() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert re.findall(r"^ +(?:- )?run: (.*)$", workflow, re.MULTILINE) == [".ci/run"]


def test_modules_started_by_sh_blocks_can_be_imported() -> None:
    found = {words[words.index("-m") + 1] for page in PAGES.values() for words in commands(page) if "-m" in words}
    # "tests.gpu" is a folder of the repository, and the other two are packages of the extra `dev`.
    for module in found - {"tests.gpu", "mkdocs", "ruff"}:
        assert importlib.util.find_spec(module) is not None, module
