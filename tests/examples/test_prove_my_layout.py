"""A user's project with the installed wheel, with a correct layout and with a planted bug."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forked_python import Forked

ROOT = Path(__file__).parent.parent.parent
PROJECT = ROOT / "examples" / "prove_my_layout"
# After each failed call the pool starts new ranks, so shrinking the example of a failed test takes seconds.
WITHOUT_SHRINKING = """
from hypothesis import Phase, settings

settings.register_profile("without shrinking", phases=(Phase.generate,))
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project in a folder of its own; the wheel is installed into ``site`` beside it."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("of_a_user")
    source, project = folder / "source", folder / "project"
    # Build in a copy, because a build writes files beside the sources, which an editable installation may be using.
    left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info", "tests", "examples")
    shutil.copytree(ROOT, source, ignore=left_out)
    for package in ("parallel", "amp", "optim"):
        link = source / "src" / "meshstep" / package  # a link of an editable installation, copied as a folder
        shutil.rmtree(link, ignore_errors=True)
    setup = source / "setup.py"
    assert '"-O3"' in setup.read_text()
    setup.write_text(setup.read_text().replace('"-O3"', '"-O0"'))  # optimizing the C kernels takes 8 s
    build = f"from setuptools import build_meta; print(build_meta.build_wheel({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, check=True)
    (wheel,) = folder.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(folder / "site")]
    subprocess.run([*pip, str(wheel)], capture_output=True, check=True)
    shutil.copytree(PROJECT, project, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    with (project / "conftest.py").open("a") as file:
        file.write(WITHOUT_SHRINKING)
    return project


def run_tests(project: Path, *flags: str, processes: int = 0) -> tuple[int, str]:
    """Run the tests of the project, under torchrun if ``processes`` > 0; return exit code and output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(project.parent / "site"), "OMP_NUM_THREADS": "1"}
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-W", "error", "-rs", *flags]
    done = Forked(*command, cwd=project, env=environment, processes=processes).completed(timeout=400)
    return done.returncode, done.stdout + done.stderr


def test_user_project_imports_the_installed_package(project: Path) -> None:
    code = "import meshstep.testing, meshstep.pytest_plugin; print(meshstep.testing.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(project.parent / "site")}
    done = Forked("-c", code, cwd=project, env=environment).completed()
    assert done.stdout.strip() == str(project.parent / "site" / "meshstep" / "testing" / "__init__.py"), done.stderr


def test_user_project_tests_pass_with_correct_layout(project: Path) -> None:
    code, printed = run_tests(project)
    assert code == 0, printed
    assert "5 passed" in printed


def test_user_project_tests_fail_and_name_parameters_of_planted_bug(project: Path) -> None:
    code, printed = run_tests(project, "--forget-sum", "--hypothesis-profile", "without shrinking")
    assert code == 1, printed
    assert "5 failed" in printed
    for name in ("norm.weight", "norm.bias"):
        assert printed.count(f"the gradient of {name}, ranks 0-") == 3, (
            "expected in two tests with fixed meshes and one with drawn meshes"
        )
    assert not re.search(r"the gradient of (up|down)\.", printed)


@pytest.mark.parametrize("flag", ["", "--forget-sum"])
def test_user_project_tests_under_torchrun_pass_or_fail_and_skip_larger_meshes(project: Path, flag: str) -> None:
    _, printed = run_tests(project, *filter(None, [flag]), processes=2)
    outcome = "2 failed, 3 skipped" if flag else "2 passed, 3 skipped"
    assert printed.count(outcome) == 2, printed
    assert "is_exact needs 4 ranks, and 2 processes were launched" in printed
