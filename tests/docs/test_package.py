"""The files of the source distribution, and the package description without relative links."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("parallel", "amp", "optim", "tests", "examples", "docs")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The text of each file of the source distribution, by name."""
    pytest.importorskip("setuptools")
    folder, source = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("source") / "meshstep"
    # Build in a copy, because a build writes files beside the sources, which an editable installation may be using.
    left_out = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "__pycache__", ".hypothesis", "build", "*.egg-info")
    shutil.copytree(ROOT, source, symlinks=True, ignore=left_out)
    build = f"from setuptools import build_meta; print(build_meta.build_sdist({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        files = {member.name.partition("/")[2]: tar.extractfile(member) for member in tar if member.isfile()}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def test_source_distribution_contains_sources_tests_and_docs(sdist: dict[str, str]) -> None:
    there = {path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.*") if path.is_file()}
    there |= {path.relative_to(ROOT) for pattern in ("*.md", "*.toml", "*.py") for path in ROOT.glob(pattern)}
    there |= {
        Path("LICENSE"),
        Path(".ci/run"),
        Path(".github/workflows/ci.yml"),
        Path(".github/workflows/wheels.yml"),
        Path("CITATION.cff"),
        Path("mkdocs.yml"),
        Path("src/meshstep/__init__.py"),
        Path("src/meshstep/py.typed"),
    }
    made = {path for path in there if "__pycache__" in path.parts or path.suffix == ".so"}  # compiled on this machine
    assert sorted(str(path) for path in there - made if str(path) not in sdist) == []
    assert not {str(path) for path in made} & {*sdist}


def test_source_distribution_does_not_repeat_linked_package_folders(sdist: dict[str, str]) -> None:
    assert [name for name in sdist if re.match(r"src/meshstep/(parallel|amp|optim)/", name)] == []


def test_package_description_has_no_relative_links(sdist: dict[str, str]) -> None:
    page = message_from_string(sdist["PKG-INFO"])
    assert page["Description-Content-Type"] == "text/markdown"
    text = page.get_payload()
    assert isinstance(text, str)
    assert "(docs/integrations/README.md)" in (ROOT / "README.md").read_text()
    assert re.findall(r"\]\((?!https?:)[^)]*\)", text) == []
    assert re.search(r"\| Integrations \| PyTorch", text)
