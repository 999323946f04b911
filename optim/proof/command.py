"""Command that checks a model's layout with `prove`, or finds it with `infer`.

    python -m meshstep.testing audit SCRIPT:BUILD --topology data=2,tensor=2

The exit code is 0 without findings, 1 with findings, 2 without a result.
"""

from __future__ import annotations

import argparse
import inspect
import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...parallel.launch import read_environment
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.text import aligned, named_ranks, printable
from ...parallel.mesh.topology import Topology
from ...parallel.ranks.interface import RanksError
from ...parallel.ranks.run import run_ranks
from .prove import Finding, InferredLayout, Proof, infer, prove

# Table ----------------------------------------------------------------------------------------------------------------

_HEADER = ("parameter", "declared", "correct", "mistake", "axes", "factor")


def report(proof: Proof) -> str:
    """Return a table of the findings in forward order, if there are any, followed by the text of the proof."""
    if proof.is_correct:
        return str(proof)
    table = _with_rich if find_spec("rich") else _plain
    return f"{table([_row(finding) for finding in proof.findings])}\n\n{proof}"


def _row(finding: Finding) -> tuple[str, ...]:
    return (
        printable(finding.name),
        "" if finding.declared is None else str(finding.declared),
        "" if finding.inferred is None else str(finding.inferred),
        finding.cause,
        " x ".join(finding.axes),
        "" if finding.factor is None else f"{finding.factor:.4f}",
    )


def _plain(rows: list[tuple[str, ...]]) -> str:
    return "\n".join(aligned([_HEADER, *rows], right={5}))


def _with_rich(rows: list[tuple[str, ...]]) -> str:
    table: Any = import_module("rich.table").Table(*_HEADER)
    table.columns[5].justify = "right"
    text: Any = import_module("rich.text").Text
    for row in rows:
        table.add_row(*map(text, row))
    written = io.StringIO()
    import_module("rich.console").Console(file=written, width=1_000_000).print(table)  # so wide that no cell is wrapped
    return written.getvalue().rstrip()


# Command --------------------------------------------------------------------------------------------------------------

WRONG, UNTOLD = 1, 2  # exit codes: there are findings; there is no result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, print the result, and return the exit code.

    It is 0 without findings (and for ``--help``), 1 with findings, 2 without a result. Under a launcher such as torchrun,
    the launched processes are the ranks; otherwise this function starts processes. Only the process with rank 0 prints
    the result, and only it may return an exit code other than 0. Every process prints the help and the errors of the
    argument parser.
    """
    parser = _parser()
    first = _launched()[0] == 0
    try:
        options = parser.parse_args(arguments)
        found = _audited(options)
    except (ValueError, RanksError) as error:
        if first:
            print(f"{parser.prog} audit: error: {error}", file=sys.stderr)
        return UNTOLD if first else 0
    except SystemExit as ended:  # argparse has already printed its message
        return int(ended.code or 0) if first else 0
    if not first:
        return 0
    proof = found[0].proof if isinstance(found[0], InferredLayout) else found[0]
    print(json.dumps(_values(found), indent=2) if options.json else _text(found))
    return 0 if proof.is_correct else WRONG


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m meshstep.testing", description="Tests of parallel models, from the command line."
    )
    audit = parser.add_subparsers(required=True, metavar="audit").add_parser(
        "audit",
        help="check a model's layout",
        description="Build a parallel model on local processes, compare the gradient of every parameter with the loss, "
        "and print the mistakes. Exit code 0: no mistakes; 1: mistakes; 2: no result.",
        epilog="example: python -m meshstep.testing audit train.py:build --topology data=2,tensor=2",
        allow_abbrev=False,
    )
    add = audit.add_argument
    add("build", metavar="SCRIPT:BUILD", help="a file or module, and its function: registry -> (model, loss_fn)")
    add("--topology", required=True, metavar="AXIS=SIZE,...", help="mesh axes, slowest first")
    add("--infer", action="store_true", help="print specs for declare(), found without the declared specs")
    add("--json", action="store_true", help="print JSON")
    add(
        "--max-parameters",
        type=int,
        metavar="N",
        help="check at most N parameters, spread evenly; not used with --infer",
    )
    add(
        "--own-dtype",
        action="store_true",
        help="compute in the model's own dtype, not in float64; needed for float32 DTensors",
    )
    add(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="time limit of the audit (default: %(default)s)"
    )
    return parser


def _launched() -> tuple[int, int]:
    """Return this process's rank and the number of processes; (0, 1) without a launcher."""
    try:
        place = read_environment(os.environ)
    except RuntimeError:
        return 0, 1
    return place.rank, place.world_size


def _audited(options: argparse.Namespace) -> list[Proof | InferredLayout]:
    """Run `prove` or `infer` on all ranks, and return their results in the order of ranks."""
    topology = Topology.parse(options.topology)
    processes = _launched()[1]
    if processes > 1 and processes != topology.world_size:
        raise ValueError(
            f"--topology {options.topology} has {topology.world_size} ranks, but the launcher started {processes} "
            f"processes; launch {topology.world_size}, or start without a launcher"
        )
    loaded(options.build)
    return run_ranks(on_rank, topology.world_size, options, timeout=options.timeout)


def loaded(build: str) -> Callable[[ProcessGroupRegistry], Any]:
    """Import the script of ``SCRIPT:BUILD`` as a module, and return its function BUILD; raise ValueError if that fails."""
    script, colon, name = build.rpartition(":")
    if not colon or not script or not name:
        raise ValueError(f"{build!r} is not SCRIPT:BUILD; give a file or module and a function, such as train.py:build")
    module = _of_file(Path(script)) if script.endswith(".py") else _of_name(script)
    function: object = getattr(module, name, None)
    if not callable(function):
        there = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        raise ValueError(f"{script} has no function {name}; it has {', '.join(there) or 'none'}")
    return function


def _of_file(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    name = path.stem
    if getattr(sys.modules.get(name), "__file__", None) != str(path.resolve()):
        spec = spec_from_file_location(name, path.resolve())
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        if str(path.resolve().parent) not in sys.path:
            sys.path.insert(0, str(path.resolve().parent))  # as Python does for a script on its command line
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise _not_imported(path, error) from error
    return sys.modules[name]


def _of_name(name: str) -> Any:
    try:
        found = find_spec(name)
    except ModuleNotFoundError:  # the parent package of ``name`` is missing
        found = None
    if found is None:
        raise ValueError(f"there is no module {name}; the name of a file must end in .py")
    try:
        return import_module(name)
    except Exception as error:
        raise _not_imported(name, error) from error


def _not_imported(script: object, error: Exception) -> ValueError:
    return ValueError(f"{script} can't be imported: {type(error).__name__}: {error}")


def on_rank(options: argparse.Namespace) -> Proof | InferredLayout:
    """Build the model on this rank, and return the result of `prove`, or of `infer` if ``options.infer``."""
    with ProcessGroupRegistry(Topology.parse(options.topology)) as registry:
        made = loaded(options.build)(registry)
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
            raise TypeError(
                f"{options.build} returned {type(made).__name__}; return (model, loss_fn): an nn.Module, and a function "
                "from the model to its loss"
            )
        model, loss_fn = made
        dtype = None if options.own_dtype else torch.float64
        if options.infer:
            return infer(model, loss_fn, registry, dtype=dtype)
        return prove(model, loss_fn, registry, max_parameters=options.max_parameters, dtype=dtype)


def _text(found: Sequence[Proof | InferredLayout]) -> str:
    if isinstance(found[0], Proof):
        return report(found[0])
    blocks = [f"# on {named_ranks(ranks)}\n{one}" for ranks, one in _by_rules(found)]
    return blocks[0].partition("\n")[2] if len(blocks) == 1 else "\n\n".join(blocks)


def _values(found: Sequence[Proof | InferredLayout]) -> Mapping[str, Any]:
    if isinstance(found[0], Proof):
        return found[0].to_json()
    rules = [
        {"ranks": ranks, "declare": {name: repr(spec) for name, spec in one.rules.items()}}
        for ranks, one in _by_rules(found)
    ]
    return {"rules": rules, "dims_unknown": found[0].dims_unknown, "proof": found[0].proof.to_json()}


def _by_rules(found: Sequence[Proof | InferredLayout]) -> list[tuple[list[int], InferredLayout]]:
    """Return (ranks with equal rules, result of the first of them) pairs. Rules may differ between pipeline stages."""
    groups: list[tuple[list[int], InferredLayout]] = []
    for rank, one in enumerate(found):
        assert isinstance(one, InferredLayout)
        group = next((ranks for ranks, other in groups if other.rules == one.rules), None)
        if group is None:
            groups.append(([rank], one))
        else:
            group.append(rank)
    return groups
