"""Imports of periphery packages by the core, which must step without those packages."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Set
from pathlib import Path

import forked_python
import pytest
from properties import repetitions
from test_import_layers import FOLDERS, ROOT, ImportEdge, library, own_import_edges, text_of

# Packages and modules that the core does not need. They may import each other.
PERIPHERY = (
    "parallel/adapters",
    "parallel/layers",
    "parallel/data",
    "parallel/ranks",
    "parallel/interop/megatron",
    "parallel/interop/megatron_mla",
    "parallel/interop/deepspeed",
    "parallel/interop/transformers",
    "parallel/interop/audit",
    "parallel/layout/picture",
    "parallel/__main__",
    "amp/fp8",
    "amp/fp8_linear",
    "amp/apex",
    "optim/lion",
    "optim/whole",
    "optim/telemetry",
    "optim/proof",
    "optim/recipe",
    "optim/schedule",
    "optim/states/replayable",
    "optim/kernels/triton",
    "optim/__main__",
    "testing",
)
# (core module, periphery module that it may import within a function), for features that run on the user's request only or,
# for the Triton kernels, only on a GPU.
ALLOWED = {
    ("optim/kernels/choice.py", "optim/kernels/triton.py"),  # the choice of kernels
    ("optim/step/update.py", "optim/kernels/triton.py"),  # updates by the Triton kernels
    ("parallel/interop/inferred_registry.py", "parallel/interop/transformers.py"),  # ParallelOptimizer.for_model
}
DELETED = (
    "parallel/adapters",
    "parallel/layers",
    "parallel/data",
    "amp/fp8_linear",
    "amp/apex",
    *(p for p in PERIPHERY if p.startswith("optim/")),
)
KEPT = ("optim/kernels/triton",)

STEP = """
import sys, torch, torch.distributed, torch._dynamo
from multiprocessing import get_context

def step(root):
    sys.path.insert(0, root)
    import meshstep.optim
    from meshstep.optim import ParallelOptimizer, Sharded, Offloaded
    from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
    assert meshstep.__file__.startswith(root), meshstep.__file__
    from meshstep.amp import Bf16, Fp32, NaiveFp16
    for precision, states in ((Fp32(), ()), (Bf16(), (Sharded("data"), Offloaded(0.5))), (NaiveFp16(init_scale=4.0), ())):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        precision.prepare(model)
        declare(model, {"*": P()})
        with ProcessGroupRegistry(Topology(data=1)) as registry:
            adamw = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
            optimizer = ParallelOptimizer(adamw, registry, max_norm=0.1, precision=precision, states=states)
            before = [param.detach().clone() for param in model.parameters()]
            for _ in range(3):
                optimizer.zero_grad()
                optimizer.backward(model(torch.ones(2, 4, dtype=before[0].dtype)).float().sum())
                stats = optimizer.step()
            assert float(stats.total_norm) > 0
            assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters()))

if __name__ == "__main__":
    processes = [(root, get_context("fork").Process(target=step, args=(root,))) for root in sys.argv[1:]]
    for root, process in processes:
        process.start()
        process.join()
        assert process.exitcode == 0, root
"""


def is_periphery(name: str, packages: tuple[str, ...] = PERIPHERY) -> bool:
    return any(name.startswith((f"{package}/", f"{package}.py")) for package in packages)


def periphery_imports(found: Set[ImportEdge]) -> list[ImportEdge]:
    """Return the imports of the periphery by the core, except in ``__init__``, which exports both."""
    return sorted(
        (source, target)
        for source, target in found
        if not is_periphery(source) and not source.endswith("__init__.py") and is_periphery(target)
    )


def test_core_imports_periphery_only_where_allowed() -> None:
    assert {*periphery_imports(own_import_edges())} == ALLOWED


def test_import_of_periphery_by_core_is_detected() -> None:
    edge = ("optim/clip/base.py", "optim/telemetry/monitor.py")
    assert periphery_imports({edge, ("optim/__init__.py", edge[1]), (edge[1], edge[0])}) == [edge]


def without(package: str) -> set[str]:
    """Return the files to delete with a periphery package: its files and the periphery files that import them."""
    found, gone = own_import_edges(), {name for name in library(ROOT) if is_periphery(name, (package,))}
    while more := {
        source
        for source, target in found
        if target in gone and source not in gone and is_periphery(source) and not is_init(source, gone)
    }:
        gone |= more
    return gone


def is_init(name: str, gone: set[str]) -> bool:
    """Return whether a file is an ``__init__`` of a folder that keeps some files."""
    if not name.endswith("__init__.py"):
        return False
    folder = name.removesuffix("__init__.py")
    return any(other.startswith(folder) and other != name and other not in gone for other in library(ROOT))


class _WithoutNames(ast.NodeTransformer):
    """Removes names from the lists of exported names, and from the table of former names."""

    def __init__(self, names: Set[str]) -> None:
        self.names = names

    def visit_List(self, node: ast.List) -> ast.List:
        node.elts = [item for item in node.elts if not (isinstance(item, ast.Constant) and item.value in self.names)]
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.Dict:
        pairs = list(zip(node.keys, node.values, strict=True))
        kept = [(key, value) for key, value in pairs if not (isinstance(value, ast.Name) and value.id in self.names)]
        node.keys, node.values = [key for key, _ in kept], [value for _, value in kept]
        return node


def copy_without(gone: set[str], root: Path) -> None:
    """Copy the library without the files ``gone`` and their exports."""
    modules = {name.removesuffix(".py").removesuffix("/__init__") for name in gone}
    for name in library(ROOT):
        if name in gone:
            continue
        place = root / "meshstep" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        text = text_of(ROOT, name)
        if name.endswith("__init__.py"):
            tree, dropped = ast.parse(text), set[str]()
            for node in list(tree.body):
                if not isinstance(node, ast.ImportFrom) or node.level != 1:
                    continue
                if f"{name.removesuffix('/__init__.py')}/{(node.module or '').replace('.', '/')}" in modules:
                    dropped |= {alias.name for alias in node.names}
                    tree.body.remove(node)
            text = ast.unparse(_WithoutNames(dropped).visit(tree))
        place.write_text(text)
    shutil.copy(ROOT / "src" / "meshstep" / "__init__.py", root / "meshstep" / "__init__.py")


def test_optimizer_steps_after_periphery_packages_are_deleted(tmp_path: Path) -> None:
    roots = []
    packages = repetitions([p for p in DELETED if p not in KEPT], "deleted", default=2)
    for package in (*packages, "everything"):
        root = tmp_path / package.replace("/", "_")
        gone = set[str]().union(*map(without, DELETED[:-1])) if package == "everything" else without(package)
        gone = {name for name in gone if not is_periphery(name, KEPT)}
        assert gone, package
        copy_without(gone, root)
        roots.append(str(root))
    script = tmp_path / "step.py"
    script.write_text(STEP)
    done = forked_python.run(str(script), *roots)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", PERIPHERY)
def test_every_periphery_package_exists(package: str) -> None:
    folder, _, rest = package.partition("/")
    place = ROOT / FOLDERS[folder] / rest
    assert place.is_dir() or place.with_suffix(".py").is_file()
