"""The documentation site: its pages, exported names, links and search index."""

from __future__ import annotations

import html
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import meshstep
import pytest

ROOT = Path(__file__).parent.parent.parent
HOOKS = runpy.run_path(str(ROOT / "docs" / "website" / "hooks.py"))
SEARCHED = ("weight decay", "RMSNorm", "ZeRO-3", "LoRA", "GradScaler")


def exported_names() -> list[str]:
    return [f"{package}.{name}" for package in HOOKS["PACKAGES"] for name in import_module(package).__all__]


def pages_in(entry: Any) -> Iterator[str]:
    """Yield the pages of a navigation entry, in their order."""
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from pages_in(part)


# Navigation: needs no MkDocs ------------------------------------------------------------------------------------------


def test_api_pages_cover_all_public_packages() -> None:
    assert {f"meshstep.{package}" for package in (*meshstep._PACKAGES, "testing")} == {*HOOKS["PACKAGES"]}


def test_each_exported_name_has_one_page_and_a_summary() -> None:
    pages, entries = HOOKS["api_pages"]()
    expected = {f"docs/api/{name.rpartition('.')[0]}/{name.rpartition('.')[2]}.md" for name in exported_names()}
    assert {page for page in pages if not page.endswith("index.md")} == expected
    assert sorted(pages_in(entries)) == sorted(pages)
    rows = re.findall(r"^\| \[`(\w+)`\]\(\S+\) \| (.*) \|$", pages["docs/api/index.md"], re.MULTILINE)
    assert len(rows) == len(expected)
    assert [name for name, summary in rows if not summary] == []


def test_navigation_has_each_page_once_under_its_purpose() -> None:
    pages = HOOKS["pages_of_repository"]()
    nav = HOOKS["navigation"](pages, [])
    assert sorted(pages_in(nav)) == sorted(pages)
    assert next(pages_in(nav)) == "README.md"
    sections = {section: [*pages_in(content)] for entry in nav for section, content in entry.items()}
    assert [*sections] == ["Home", *HOOKS["SECTIONS"]]
    for section, folder in HOOKS["SECTIONS"].items():
        assert {page for page in pages if page.startswith(f"{folder}/")} <= {*sections.get(section, [])}


def test_navigation_lists_howto_pages_in_the_order_of_the_docs_index() -> None:
    pages = HOOKS["pages_of_repository"]()
    index = (ROOT / "docs" / "README.md").read_text()
    howto = [page for page in pages_in(HOOKS["navigation"](pages, [])) if page.startswith("docs/howto/")]
    linked = [*dict.fromkeys(f"docs/{name}" for name in re.findall(r"\]\((howto/\w+\.md)", index))]
    assert [page for page in howto if page in linked] == linked


def test_list_of_exported_names_that_torch_also_has_is_complete() -> None:
    modules = ("amp", "nn.utils", "optim", "optim.lr_scheduler", "distributed.tensor", "distributed.fsdp", "nn")
    names = {name.rpartition(".")[2] for name in exported_names()}
    assert {n for n in names if any(hasattr(import_module(f"torch.{m}"), n) for m in modules)} == HOOKS["ALSO_IN_TORCH"]


def test_names_that_two_modules_define_are_not_linked() -> None:
    """For example, `registry_of` is for Transformers models, and another one is for Megatron-core."""
    names = HOOKS["linked_names"]()
    assert {"ParallelOptimizer", "Sharded", "audit"} <= names
    assert "registry_of" not in names
    assert names & HOOKS["ALSO_IN_TORCH"] == set()


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("README.md", "index.html"),
        ("docs/README.md", "pages/index.html"),
        ("docs/howto/CLIP_RULES.md", "howto/clip_rules/index.html"),
        ("docs/integrations/README.md", "integrations/index.html"),
        ("examples/README.md", "examples/index.html"),
        ("CHANGELOG.md", "changelog/index.html"),
        ("docs/api/index.md", "api/index.html"),
        ("docs/api/meshstep.optim/ZClip.md", "api/meshstep.optim/ZClip/index.html"),
    ],
)
def test_site_url_of_a_page_follows_its_file_name(page: str, expected: str) -> None:
    assert HOOKS["url_path"](page) == expected


def test_site_urls_are_unique_ignoring_case() -> None:
    """On a file system that ignores case, pages whose URLs differ only in case would overwrite each other."""
    urls = [HOOKS["url_path"](page).lower() for page in (*HOOKS["pages_of_repository"](), *HOOKS["api_pages"]()[0])]
    assert len({*urls}) == len(urls)


def test_ci_script_runs_the_site_tests_and_mkdocs_is_strict() -> None:
    run = (ROOT / ".ci" / "run").read_text()
    assert re.search(r"^ +\.venv-more/bin/python -m pytest -n 0 tests/docs/test_site\.py$", run, re.MULTILINE)
    assert re.search(r"^strict: true$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    assert re.search(r'^docs = \["mkdocs-material>=', extras, re.MULTILINE)
    assert re.search(r'^dev = \["meshstep\[.*docs.*\]"', extras, re.MULTILINE)


# The built site: where MkDocs is installed (the extra `docs`), as in a step of .ci/run --------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site. A warning, a dead link or a dead anchor fails the build."""
    pytest.importorskip("mkdocs", reason="needs MkDocs (the extra 'docs')")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_built_api_pages_show_the_docstring_summaries(site: Path) -> None:
    sources = HOOKS["Sources"]()
    for name in exported_names():
        package, _, symbol = name.rpartition(".")
        page = (site / "api" / package / symbol / "index.html").read_text()
        text = re.sub(r"<[^>]+>", "", page.partition("<article")[2])
        summary = sources.summary(package, symbol)
        longest = " ".join(max(re.split("[`*]", summary), key=len).split())
        assert longest in " ".join(html.unescape(text).split()), f"{name}: {summary}"


def test_built_howto_page_links_an_exported_name(site: Path) -> None:
    page = (site / "howto" / "zero" / "index.html").read_text()
    assert re.search(r'<a href="\.\./\.\./api/meshstep\.optim/Sharded/"><code>Sharded</code></a>', page)


def test_built_page_of_a_named_tuple_shows_its_fields(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "api" / "meshstep.optim" / "ClipResult" / "index.html").read_text())
    assert re.search(r"ClipResult\(\s*factors: ", text)


def test_built_pages_have_formulas_as_mathml(site: Path) -> None:
    page = (site / "explanation" / "norms_of_layouts" / "index.html").read_text()
    assert page.count("<math") >= 5
    assert re.findall(r"arithmatex|\\\(|\\\[|\$\$", page) == []


@pytest.mark.parametrize("words", SEARCHED)
def test_search_index_contains_usual_terms(site: Path, words: str) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    assert any(words.lower() in (entry["title"] + " " + entry["text"]).lower() for entry in index["docs"])


def test_built_site_shows_readme_picture_and_loads_nothing_from_other_hosts(site: Path) -> None:
    front = (site / "index.html").read_text()
    assert (site / "pictures" / "wrong_norms.svg").is_file()
    assert 'src="pictures/wrong_norms.svg"' in front
    for page in (front, (site / "api" / "meshstep.optim" / "ZClip" / "index.html").read_text()):
        assert re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?:', page) == []
