"""``python -m meshstep``: lists the commands of the packages, and runs them."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence

COMMANDS = {
    "parallel": "print where each rank is on named axes: python -m meshstep.parallel data=2 tensor=4",
    "optim": "draw the curves of a run as one page: python -m meshstep.optim report run.jsonl",
    "testing": "compare the gradients of a layout with its declarations: python -m meshstep.testing audit --help",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``python -m meshstep.COMMAND`` with the other arguments, or print the commands."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given and given[0] in COMMANDS:
        sys.argv = [f"meshstep.{given[0]}", *given[1:]]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    parser = argparse.ArgumentParser(
        prog="python -m meshstep",
        description="The exact optimizer step for hand-written parallel PyTorch models.",
        epilog="python -m meshstep COMMAND --help tells more.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, said in COMMANDS.items():
        commands.add_parser(name, help=said)
    parser.parse_args(given)


if __name__ == "__main__":
    main()
