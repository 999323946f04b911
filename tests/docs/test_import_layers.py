"""Imports between subpackages and their layers, exports of the packages, and names that users need.

Imports are read from the files, also those within functions. Imports under TYPE_CHECKING do not count: they name a type
and load nothing.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Set
from functools import cache
from pathlib import Path
from typing import Any

import meshstep
import pytest

ROOT = Path(__file__).parent.parent.parent
FRONT = ROOT / "src" / "meshstep" / "__init__.py"
FOLDERS = {"parallel": "parallel", "amp": "amp", "optim": "optim", "testing": "src/meshstep/testing"}
PACKAGES = tuple(FOLDERS)  # each package may import the packages before it
EXPORTING = ("parallel", "amp", "optim")  # packages whose names `meshstep` exports too
# The layers of each package, lowest first: a part imports only from parts of lower layers. A part is a folder or a file
# directly in the package; "*" stands for all files in no other layer. `__init__` is above all layers.
LAYERS: Mapping[str, tuple[frozenset[str], ...]] = {
    "parallel": (
        frozenset({"mesh"}),
        frozenset({"launch"}),
        frozenset({"layout", "data", "ranks"}),
        frozenset({"interop", "layers"}),
        frozenset({"adapters"}),
        frozenset({"__main__"}),
    ),
    "amp": (
        frozenset({"capture", "casting", "loss_scale", "by_bucket"}),
        frozenset({"modes", "master_weights", "fp8_linear"}),
        frozenset({"apex", "stochastic_rounding", "fp8"}),
    ),
    "optim": (
        frozenset({"kernels"}),
        frozenset({"norm"}),
        frozenset({"gradients"}),
        frozenset({"clip"}),
        frozenset({"step"}),
        frozenset({"states", "lion"}),
        frozenset({"whole"}),
        frozenset({"arguments", "build"}),
        frozenset({"parallel_optimizer"}),
        frozenset({"schedule", "telemetry", "checkpoint"}),
        frozenset({"recipe"}),
        frozenset({"proof"}),
        frozenset({"__main__"}),
    ),
    "testing": (frozenset({"*"}),),
}
# Modules that examples and snippets may import.
PUBLIC = {f"meshstep.{package}" for package in PACKAGES} | {
    "meshstep.optim.whole",
    "meshstep.parallel.launch",
    "meshstep.testing.strategies",
}

ImportEdge = tuple[str, str]


# Imports between modules ----------------------------------------------------------------------------------------------


def library(root: Path) -> list[str]:
    """Return the files of the library as paths that begin with the name of the package."""
    return sorted(
        f"{package}/{path.relative_to(root / folder)}"
        for package, folder in FOLDERS.items()
        for path in (root / folder).rglob("*.py")
    )


def text_of(root: Path, name: str) -> str:
    package, _, rest = name.partition("/")
    return (root / FOLDERS[package] / rest).read_text()


def imported(tree: ast.AST) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Yield (level, module, names) of each import statement that is executed, also within functions."""
    type_only = {
        below
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for below in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node in type_only:
            continue
        if isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", tuple(alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((0, alias.name, ()) for alias in node.names)


def import_edges(root: Path) -> set[ImportEdge]:
    """Return (importing file, imported file) for all imports among the files of the library."""
    files = library(root)
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in files}
    found = set()
    for name in files:
        for level, module, names in imported(ast.parse(text_of(root, name))):
            above = Path(name).parts[:-level] if level else ()
            whole = ".".join((*above, module) if module else above).removeprefix("meshstep.")
            # `from .part import thing`: `thing` is a module in the folder `part`, or a name in part.py or part/__init__.py.
            targets = {modules.get(f"{whole}.{thing}", modules.get(whole)) for thing in names or ("",)}
            found |= {(name, target) for target in targets if target is not None and target != name}
    return found


@cache
def own_import_edges() -> frozenset[ImportEdge]:
    """Return the imports of this library. Reading the files takes a second or two."""
    return frozenset(import_edges(ROOT))


def import_cycles(found: Set[ImportEdge]) -> list[tuple[str, ...]]:
    """Return the sets of files that import each other in a cycle."""
    nexts: dict[str, set[str]] = {}
    for source, target in found:
        nexts.setdefault(source, set()).add(target)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = nexts.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        return seen

    reach = {name: reached(name) for name in nexts}
    return sorted({tuple(sorted(b for b in reach[a] if a in reach.get(b, ()))) for a in reach if a in reach[a]})


def place(name: str) -> tuple[str, str, int]:
    """Return (package, part, layer) of a file, or raise LookupError if the part is not in LAYERS."""
    package, *rest = name.removesuffix(".py").split("/")
    if rest == ["__init__"]:
        return package, "__init__", len(LAYERS[package])
    for layer, parts in enumerate(LAYERS[package]):
        if rest[0] in parts:
            return package, rest[0], layer
    if len(rest) == 1 and "*" in LAYERS[package][0]:
        return package, "*", 0
    raise LookupError(f"{name} is in a part of {package} that LAYERS does not name: add the part to a layer")


def upward_imports(found: Set[ImportEdge], package: str) -> list[str]:
    """Return the imports by files of ``package`` from another part of the same or a higher layer, or a higher package."""
    bad = []
    for source, target in sorted(found):
        (own, part, layer), (other, other_part, other_layer) = place(source), place(target)
        down = other_layer < layer if own == other else PACKAGES.index(other) < PACKAGES.index(own)
        if own == package and not down and (own, part) != (other, other_part):
            bad.append(f"{source} imports {target}")
    return bad


def private_imports(code: str) -> list[str]:
    """Return the private modules that lines of Python import. The lines may be a diff, so they are not parsed."""
    statement = r"^[ +-]*(?:from|import) +(meshstep[\w.]*)(?: +import +(?:\(([^)]*)\)|(.*)))?"
    parts = frozenset().union(*(layer for layers_of_package in LAYERS.values() for layer in layers_of_package)) - {
        "launch"
    }
    found = set()
    for module, within, beside in re.findall(statement, code, re.MULTILINE):
        if module not in PUBLIC | {"meshstep"}:
            found.add(module)
        elif module != "meshstep":
            found |= {f"{module}.{name}" for name in re.findall(r"\w+", within or beside) if name in parts}
    return sorted(found)


# Layers and exports ---------------------------------------------------------------------------------------------------


def test_library_has_no_import_cycles() -> None:
    assert import_cycles(own_import_edges()) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_import_only_from_lower_layers(package: str) -> None:
    assert upward_imports(own_import_edges(), package) == []


def test_all_modules_of_the_layer_table_exist() -> None:
    for package, layers_of_package in LAYERS.items():
        for part in frozenset().union(*layers_of_package) - {"*"}:
            place = ROOT / FOLDERS[package] / part
            assert place.is_dir() or place.with_suffix(".py").is_file(), f"{package}/{part}"


@pytest.mark.parametrize("package", ["parallel", "amp", "optim"])
def test_architecture_page_lists_the_layers(package: str) -> None:
    page = (ROOT / "docs" / "maintainers" / "ARCHITECTURE.md").read_text()
    page = page.partition(f"## Layers of `{package}`")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (`[^|]*`) \|", page, re.MULTILINE)
    told: list[set[str]] = [set() for _ in LAYERS[package]]
    for layer, names in rows:
        told[int(layer)] |= set(re.findall(r"`(\w+)(?:\.py|/)`", names))
    assert told == [set(layer) for layer in LAYERS[package]]
    assert [int(layer) for layer, _ in rows] == sorted(int(layer) for layer, _ in rows)


def test_library_uses_relative_imports_for_its_own_modules() -> None:
    for name in library(ROOT):
        for level, module, _ in imported(ast.parse(text_of(ROOT, name))):
            assert level or module.partition(".")[0] != "meshstep", f"{name} imports {module}"


@pytest.mark.parametrize("package", PACKAGES)
def test_package_exports_exactly_its_imported_names(package: str) -> None:
    module = importlib.import_module(f"meshstep.{package}")
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    tree = ast.parse(text_of(ROOT, f"{package}/__init__.py"))
    used_here = {"TYPE_CHECKING", "renamed_objects"}
    assert sorted(module.__all__) == sorted({name for _, _, names in imported(tree) for name in names} - used_here)


def test_pyproject_installs_every_package_folder() -> None:
    inits = [name.removesuffix("/__init__.py") for name in library(ROOT) if name.endswith("/__init__.py")]
    folders = {name: name.replace((package := name.partition("/")[0]), FOLDERS[package], 1) for name in inits}
    table = (ROOT / "pyproject.toml").read_text().partition("[tool.setuptools]")[2]
    listed = re.search(r"^packages = (\[.*?\])$", table, re.MULTILINE | re.DOTALL)
    assert listed is not None
    packages = ast.literal_eval(listed[1])
    expected = {"meshstep." + name.replace("/", "."): folder for name, folder in folders.items()}
    expected["meshstep"] = "src/meshstep"
    assert sorted(packages) == sorted(expected)
    where = table.partition("[tool.setuptools.package-dir]")[2].partition("\n[")[0]
    assert dict(re.findall(r'^"?([\w.]+)"? = "(.*)"$', where, re.MULTILINE)) == expected


def test_meshstep_exports_all_names_of_parallel_amp_and_optim() -> None:
    offered = [
        (package, name) for package in EXPORTING for name in importlib.import_module(f"meshstep.{package}").__all__
    ]
    assert len({name for _, name in offered}) == len(offered), "two packages export the same name"
    front: Any = meshstep
    for package, name in offered:
        assert getattr(meshstep, name) is getattr(importlib.import_module(f"meshstep.{package}"), name), name
        assert name in dir(meshstep)
        assert name in front.__all__
    nodes = [node for node in ast.walk(ast.parse(FRONT.read_text())) if isinstance(node, ast.ImportFrom) and node.level]
    seen = [(node.level, node.module, [alias.name for alias in node.names]) for node in nodes]
    assert seen == [(1, package, ["*"]) for package in sorted(EXPORTING)], "imports that type checkers read"


def test_unknown_attribute_of_meshstep_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'meshstep' has no attribute 'Nothing'"):
        _ = meshstep.Nothing


def test_version_can_be_read_without_importing_torch() -> None:
    code = "import sys, meshstep; print(meshstep.__version__, *(name for name in sys.modules if 'torch' in name))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"\d+\.\d+\.\d+ ?", printed.rstrip("\n"))
    assert printed.split()[0] == importlib.metadata.version("meshstep")


def test_examples_and_readmes_import_only_public_modules() -> None:
    readmes = [ROOT / "README.md", *(ROOT / package / "README.md" for package in EXPORTING)]
    texts = [path for path in (*sorted((ROOT / "examples").glob("*.py")), *readmes) if path.is_file()]
    assert sum("meshstep" in path.read_text() for path in texts) > 8
    assert {str(path.relative_to(ROOT)): deep for path in texts if (deep := private_imports(path.read_text()))} == {}


# Detection of planted mistakes ----------------------------------------------------------------------------------------


def plant(root: Path, files: Mapping[str, str]) -> set[ImportEdge]:
    """Add files to a tree, and return its imports."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return import_edges(root)


@pytest.mark.parametrize(
    "closing",
    [
        "from ..layout.spec import P\n",
        "def f():\n    from ..layout import spec\n",
        "def f():\n    import meshstep.parallel.layout.spec\n",
        "from meshstep.parallel.layout.spec import P\n",
    ],
    ids=["plain", "lazy", "by its full name", "from its full name"],
)
def test_import_cycle_is_detected(tmp_path: Path, closing: str) -> None:
    spec, topology = "parallel/layout/spec.py", "parallel/mesh/topology.py"
    assert import_cycles(plant(tmp_path, {spec: "from ..mesh.topology import Topology\n", topology: ""})) == []
    found = plant(tmp_path, {topology: closing})
    assert import_cycles(found) == [(spec, topology)]
    assert upward_imports(found, "parallel") == [f"{topology} imports {spec}"]


def test_imports_under_type_checking_are_ignored(tmp_path: Path) -> None:
    spec, topology = "parallel/layout/spec.py", "parallel/mesh/topology.py"
    type_only = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..layout.spec import P\n"
    found = plant(tmp_path, {spec: "from ..mesh.topology import Topology\n", topology: type_only})
    assert import_cycles(found) == []
    assert upward_imports(found, "parallel") == []


@pytest.mark.parametrize(
    ("source", "text", "target"),
    [
        ("optim/norm/plan.py", "from ..gradients.buckets import x\n", "optim/gradients/buckets.py"),
        ("optim/checkpoint/save.py", "def f():\n    from ..telemetry import monitor\n", "optim/telemetry/monitor.py"),
        ("amp/casting.py", "from .fp8 import Fp8\n", "amp/fp8.py"),
        ("amp/modes.py", "from .master_weights import MasterWeights\n", "amp/master_weights.py"),
        ("amp/fp8_linear.py", "from ..optim.norm import plan\n", "optim/norm/plan.py"),
        ("parallel/mesh/registry.py", "from ..launch import Launch\n", "parallel/launch.py"),
        ("parallel/layout/spec.py", "from .. import data\n", "parallel/data.py"),
        ("parallel/layers/tensor_1d.py", "from .. import P\n", "parallel/__init__.py"),
    ],
)
def test_import_from_same_or_higher_layer_is_detected(tmp_path: Path, source: str, text: str, target: str) -> None:
    assert upward_imports(plant(tmp_path, {source: "", target: ""}), source.partition("/")[0]) == []
    assert upward_imports(plant(tmp_path, {source: text}), source.partition("/")[0]) == [f"{source} imports {target}"]


def test_module_missing_in_the_layer_table_is_detected(tmp_path: Path) -> None:
    found = plant(tmp_path, {"optim/attic/box.py": "from ..norm import plan\n", "optim/norm/plan.py": ""})
    with pytest.raises(LookupError, match=r"optim/attic/box.py is in a part of optim that LAYERS does not name"):
        upward_imports(found, "optim")


def test_import_of_a_private_module_in_a_snippet_is_detected() -> None:
    assert (
        private_imports("from meshstep.parallel import P\n+from meshstep.parallel.launch import init_distributed\n")
        == []
    )
    assert private_imports("+    from meshstep.optim.norm.plan import NormBucket\n") == ["meshstep.optim.norm.plan"]
    assert private_imports("from meshstep.optim import Booster, norm\nnorm(1)\n") == ["meshstep.optim.norm"]
    assert private_imports("from meshstep.optim import (\n    Booster,\n    norm,\n)\n") == ["meshstep.optim.norm"]


# Start-up -------------------------------------------------------------------------------------------------------------

IMPORTED = """
import sys, torch, torch.distributed
before = {*sys.modules}
import meshstep.parallel, meshstep.amp, meshstep.optim
print(*sorted({*sys.modules} - before))
"""


def test_importing_meshstep_does_not_load_optional_packages() -> None:
    """For example, importing DTensor takes most of a second in every process."""
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    new = done.stdout.split()
    assert "meshstep.optim" in new
    others = (
        "torch.distributed.tensor",
        "torch.distributed.fsdp",
        "transformers",
        "accelerate",
        "megatron",
        "deepspeed",
    )
    assert [name for name in new if name in others] == []
