"""The files of a release agree with the code: the version, the facts of SECURITY.md, and the jobs that build wheels."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import meshstep

ROOT = Path(__file__).parent.parent.parent
# Modules of the library that unpickle, and the words of SECURITY.md about them.
UNPICKLING = {
    "parallel/mesh/process_group_collectives.py": "`gather_objects`",
    "parallel/ranks/interface.py": "`run_ranks`",
    "parallel/ranks/pool.py": "`RankPool`",
    "parallel/ranks/run.py": "`run_ranks`",
}


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Yield (dotted name, call) for each call of an attribute of a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            yield f"{node.func.value.id}.{node.func.attr}", node


def library() -> list[Path]:
    folders = [ROOT / folder for folder in ("parallel", "amp", "optim")]
    return [path for folder in folders for path in folder.rglob("*.py")] + [
        *(ROOT / "src/meshstep/testing").glob("*.py")
    ]


def test_version_is_the_same_in_all_files() -> None:
    changes = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert changes[0] == meshstep.__version__
    assert cited == [meshstep.__version__]


def test_security_page_names_all_functions_that_unpickle() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    found = {
        str(path.relative_to(ROOT))
        for path in library()
        for name, _ in calls(path)
        if name in ("pickle.load", "pickle.loads", "pickle.Unpickler")
    }
    assert found == {*UNPICKLING}
    assert all(words in page for words in UNPICKLING.values())


def test_every_torch_load_call_of_the_library_uses_weights_only() -> None:
    loads = [call for path in library() for name, call in calls(path) if name == "torch.load"]
    assert loads
    for call in loads:
        weights_only = [keyword.value for keyword in call.keywords if keyword.arg == "weights_only"]
        assert [ast.literal_eval(value) for value in weights_only] == [True]


def test_wheels_workflow_runs_quickstart_before_publishing() -> None:
    workflow = (ROOT / ".github" / "workflows" / "wheels.yml").read_text()
    jobs = dict(re.findall(r"^  (\w+):\n((?:    .*\n|\n)+)", workflow.partition("\njobs:\n")[2], re.MULTILINE))
    assert [*jobs] == ["sdist", "wheel", "quickstart", "publish"]
    assert "needs: [sdist, wheel]" in jobs["quickstart"]
    assert "quickstart.py" in jobs["quickstart"]
    assert "needs: quickstart" in jobs["publish"]
    assert "id-token: write" in jobs["publish"]
    assert "id-token" not in "".join(text for name, text in jobs.items() if name != "publish")
    assert {"manylinux_x86_64", "manylinux_aarch64", "macosx_arm64"} <= {*re.findall(r"platform: (\w+)", jobs["wheel"])}
    assert all("twine check --strict dist/*" in jobs[job] for job in ("sdist", "wheel"))
    assert "CIBW_BUILD: cp310-" in jobs["wheel"]
    assert 'py_limited_api": "cp310"' in (ROOT / "setup.py").read_text()
