"""The layers: which subpackage may import which, what each package exports, and that users need no more than the exports.

Imports are read from the files, also those within functions. Imports under TYPE_CHECKING do not count: they name a type and
load nothing.
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
PACKAGES = tuple(FOLDERS)  # each uses those before it
OFFERED = ("parallel", "amp", "optim")  # at the front as well
# Within a package, from the ground floor up: a room uses rooms of lower floors, not its neighbours. A room is a folder,
# or a file directly in the package; "*" is all files there that no floor names. `__init__` is the front door, above all.
FLOORS: Mapping[str, tuple[frozenset[str], ...]] = {
    "parallel": (
        frozenset({"mesh", "launch"}),
        frozenset({"layout", "data", "ranks"}),
        frozenset({"interop", "layers"}),
        frozenset({"__main__"}),
    ),
    "amp": (
        frozenset({"capture", "casting", "loss_scale", "by_bucket"}),
        frozenset({"modes", "master_weights", "fp8_linear"}),
        frozenset({"apex", "stochastic_rounding", "fp8"}),
    ),
    "optim": (
        frozenset({"kernels", "lion"}),
        frozenset({"norm"}),
        frozenset({"gradients"}),
        frozenset({"clip"}),
        frozenset({"step"}),
        frozenset({"states"}),
        frozenset({"whole"}),
        frozenset({"build"}),
        frozenset({"parallel_optimizer"}),
        frozenset({"schedule", "telemetry", "checkpoint"}),
        frozenset({"recipe"}),
        frozenset({"proof"}),
        frozenset({"__main__"}),
    ),
    "testing": (frozenset({"*"}),),
}
# What examples and snippets import from.
PUBLIC = {f"meshstep.{package}" for package in PACKAGES} | {
    "meshstep.optim.whole",
    "meshstep.parallel.launch",
    "meshstep.testing.strategies",
}

Arrow = tuple[str, str]


# Reading --------------------------------------------------------------------------------------------------------------


def library(root: Path) -> list[str]:
    """The library's files, as paths from the root; those of a folder that is not there, by its package."""
    return sorted(
        f"{package}/{path.relative_to(root / folder)}"
        for package, folder in FOLDERS.items()
        for path in (root / folder).rglob("*.py")
    )


def text_of(root: Path, name: str) -> str:
    package, _, rest = name.partition("/")
    return (root / FOLDERS[package] / rest).read_text()


def imported(tree: ast.AST) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """(level, module, names) of every import statement that is executed, at whatever depth it stands."""
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


def arrows(root: Path) -> set[Arrow]:
    """(who imports, what is imported) among the library's files."""
    files = library(root)
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in files}
    found = set()
    for name in files:
        for level, module, names in imported(ast.parse(text_of(root, name))):
            above = Path(name).parts[:-level] if level else ()
            whole = ".".join((*above, module) if module else above).removeprefix("meshstep.")
            # `from .room import thing`: the thing is a file of the room, or a name in the room's __init__.
            targets = {modules.get(f"{whole}.{thing}", modules.get(whole)) for thing in names or ("",)}
            found |= {(name, target) for target in targets if target is not None and target != name}
    return found


@cache
def own_arrows() -> frozenset[Arrow]:
    """Return the arrows of this library, which takes a second or two to read."""
    return frozenset(arrows(ROOT))


def circles(found: Set[Arrow]) -> list[tuple[str, ...]]:
    """The sets of files that import each other in a loop."""
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
    """(package, room, floor) of a file.

    Raises:
        LookupError: FLOORS has no place for it.
    """
    package, *rest = name.removesuffix(".py").split("/")
    if rest == ["__init__"]:
        return package, "__init__", len(FLOORS[package])
    for floor, rooms in enumerate(FLOORS[package]):
        if rest[0] in rooms:
            return package, rest[0], floor
    if len(rest) == 1 and "*" in FLOORS[package][0]:
        return package, "*", 0
    raise LookupError(f"{name} is in a room of {package} that FLOORS does not name: give it a floor")


def upward(found: Set[Arrow], package: str) -> list[str]:
    """The imports of a package's files that go up or sideways, or into a package above."""
    bad = []
    for source, target in sorted(found):
        (own, room, floor), (other, other_room, other_floor) = place(source), place(target)
        down = other_floor < floor if own == other else PACKAGES.index(other) < PACKAGES.index(own)
        if own == package and not down and (own, room) != (other, other_room):
            bad.append(f"{source} imports {target}")
    return bad


def too_deep(code: str) -> list[str]:
    """What lines of Python import from inside of meshstep; read as text, because diffs don't parse."""
    statement = r"^[ +-]*(?:from|import) +(meshstep[\w.]*)(?: +import +(?:\(([^)]*)\)|(.*)))?"
    rooms = frozenset().union(*(floor for floors in FLOORS.values() for floor in floors)) - {"launch"}
    found = set()
    for module, within, beside in re.findall(statement, code, re.MULTILINE):
        if module not in PUBLIC | {"meshstep"}:
            found.add(module)
        elif module != "meshstep":
            found |= {f"{module}.{name}" for name in re.findall(r"\w+", within or beside) if name in rooms}
    return sorted(found)


# The house ------------------------------------------------------------------------------------------------------------


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles(own_arrows()) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_rooms_use_what_is_below_them(package: str) -> None:
    assert upward(own_arrows(), package) == []


def test_every_floor_is_there() -> None:
    for package, floors in FLOORS.items():
        for room in frozenset().union(*floors) - {"*"}:
            place = ROOT / FOLDERS[package] / room
            assert place.is_dir() or place.with_suffix(".py").is_file(), f"{package}/{room}"


@pytest.mark.parametrize("package", ["parallel", "amp", "optim"])
def test_architecture_page_lists_the_layers(package: str) -> None:
    page = (ROOT / "docs" / "maintainers" / "ARCHITECTURE.md").read_text()
    page = page.partition(f"## Layers of `{package}`")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (`[^|]*`) \|", page, re.MULTILINE)
    told: list[set[str]] = [set() for _ in FLOORS[package]]
    for floor, names in rows:
        told[int(floor)] |= set(re.findall(r"`(\w+)(?:\.py|/)`", names))
    assert told == [set(floor) for floor in FLOORS[package]]
    assert [int(floor) for floor, _ in rows] == sorted(int(floor) for floor, _ in rows)


def test_the_library_imports_itself_relatively() -> None:
    for name in library(ROOT):
        for level, module, _ in imported(ast.parse(text_of(ROOT, name))):
            assert level or module.partition(".")[0] != "meshstep", f"{name} imports {module}"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_offers_what_it_imports_and_nothing_else(package: str) -> None:
    module = importlib.import_module(f"meshstep.{package}")
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    tree = ast.parse(text_of(ROOT, f"{package}/__init__.py"))
    assert sorted(module.__all__) == sorted(name for _, _, names in imported(tree) for name in names)


def test_what_is_installed_is_every_folder_with_an_init() -> None:
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


def test_all_that_the_packages_offer_is_offered_at_the_front_as_well() -> None:
    offered = [
        (package, name) for package in OFFERED for name in importlib.import_module(f"meshstep.{package}").__all__
    ]
    assert len({name for _, name in offered}) == len(offered), "a name means one thing"
    front: Any = meshstep
    for package, name in offered:
        assert getattr(meshstep, name) is getattr(importlib.import_module(f"meshstep.{package}"), name), name
        assert name in dir(meshstep)
        assert name in front.__all__
    nodes = [node for node in ast.walk(ast.parse(FRONT.read_text())) if isinstance(node, ast.ImportFrom) and node.level]
    seen = [(node.level, node.module, [alias.name for alias in node.names]) for node in nodes]
    assert seen == [(1, package, ["*"]) for package in sorted(OFFERED)], "what type checkers see"


def test_a_name_that_nobody_offers_is_the_usual_error() -> None:
    with pytest.raises(AttributeError, match="module 'meshstep' has no attribute 'Nothing'"):
        _ = meshstep.Nothing


def test_to_ask_for_the_version_loads_nothing() -> None:
    code = "import sys, meshstep; print(meshstep.__version__, *(name for name in sys.modules if 'torch' in name))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"\d+\.\d+\.\d+ ?", printed.rstrip("\n"))
    assert printed.split()[0] == importlib.metadata.version("meshstep")


def test_examples_and_readmes_need_no_more_than_what_is_offered() -> None:
    readmes = [ROOT / "README.md", *(ROOT / package / "README.md" for package in OFFERED)]
    texts = [path for path in (*sorted((ROOT / "examples").glob("*.py")), *readmes) if path.is_file()]
    assert sum("meshstep" in path.read_text() for path in texts) > 8
    assert {str(path.relative_to(ROOT)): deep for path in texts if (deep := too_deep(path.read_text()))} == {}


# What is planted is found ---------------------------------------------------------------------------------------------


def plant(root: Path, files: Mapping[str, str]) -> set[Arrow]:
    """The arrows of a tree that has these files too."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return arrows(root)


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
def test_a_circle_is_found(tmp_path: Path, closing: str) -> None:
    spec, topology = "parallel/layout/spec.py", "parallel/mesh/topology.py"
    assert circles(plant(tmp_path, {spec: "from ..mesh.topology import Topology\n", topology: ""})) == []
    found = plant(tmp_path, {topology: closing})
    assert circles(found) == [(spec, topology)]
    assert upward(found, "parallel") == [f"{topology} imports {spec}"]


def test_an_import_of_a_type_is_no_circle(tmp_path: Path) -> None:
    spec, topology = "parallel/layout/spec.py", "parallel/mesh/topology.py"
    type_only = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..layout.spec import P\n"
    found = plant(tmp_path, {spec: "from ..mesh.topology import Topology\n", topology: type_only})
    assert circles(found) == []
    assert upward(found, "parallel") == []


@pytest.mark.parametrize(
    ("source", "text", "target"),
    [
        ("optim/norm/plan.py", "from ..gradients.buckets import x\n", "optim/gradients/buckets.py"),
        ("optim/checkpoint/save.py", "def f():\n    from ..telemetry import monitor\n", "optim/telemetry/monitor.py"),
        ("amp/casting.py", "from .fp8 import Fp8\n", "amp/fp8.py"),
        ("amp/modes.py", "from .master_weights import MasterWeights\n", "amp/master_weights.py"),
        ("amp/fp8_linear.py", "from ..optim.norm import plan\n", "optim/norm/plan.py"),
        ("parallel/launch.py", "from .mesh.topology import Topology\n", "parallel/mesh/topology.py"),
        ("parallel/layers/tensor_1d.py", "from .. import P\n", "parallel/__init__.py"),
    ],
)
def test_an_import_upward_or_sideways_is_found(tmp_path: Path, source: str, text: str, target: str) -> None:
    assert upward(plant(tmp_path, {source: "", target: ""}), source.partition("/")[0]) == []
    assert upward(plant(tmp_path, {source: text}), source.partition("/")[0]) == [f"{source} imports {target}"]


def test_a_room_without_a_floor_is_found(tmp_path: Path) -> None:
    found = plant(tmp_path, {"optim/attic/box.py": "from ..norm import plan\n", "optim/norm/plan.py": ""})
    with pytest.raises(LookupError, match=r"optim/attic/box.py is in a room of optim that FLOORS does not name"):
        upward(found, "optim")


def test_a_snippet_that_reaches_in_is_found() -> None:
    assert too_deep("from meshstep.parallel import P\n+from meshstep.parallel.launch import init_distributed\n") == []
    assert too_deep("+    from meshstep.optim.norm.plan import Bucket\n") == ["meshstep.optim.norm.plan"]
    assert too_deep("from meshstep.optim import Booster, norm\nnorm(1)\n") == ["meshstep.optim.norm"]
    assert too_deep("from meshstep.optim import (\n    Booster,\n    norm,\n)\n") == ["meshstep.optim.norm"]


# Start-up -------------------------------------------------------------------------------------------------------------

IMPORTED = """
import sys, torch, torch.distributed
before = {*sys.modules}
import meshstep.parallel, meshstep.amp, meshstep.optim
print(*sorted({*sys.modules} - before))
"""


def test_what_a_user_may_do_without_is_not_imported() -> None:
    """DTensor alone takes most of a second, in every process."""
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
