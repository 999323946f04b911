"""Command line ``python -m meshstep COMMAND``: list the commands, or run one of them."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence

COMMANDS = {
    "parallel": "print the coordinate of each rank on named axes: python -m meshstep.parallel data=2 tensor=4",
    "optim": "draw the curves of a run, or compare two runs: python -m meshstep.optim report run.jsonl",
    "testing": "compare the gradients of a layout with its declarations: python -m meshstep.testing audit --help",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the module ``meshstep.COMMAND``, where COMMAND is the first argument, with the other arguments.

    If the first argument is ``--help``, print the commands and exit with code 0. If it is missing or is no command, write a
    message to stderr and exit with code 2.
    """
    command = sys.argv[1:] if arguments is None else list(arguments)
    if command and command[0] in COMMANDS:
        sys.argv = [f"meshstep.{command[0]}", *command[1:]]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    parser = argparse.ArgumentParser(
        prog="python -m meshstep",
        description="The exact optimizer step for hand-written parallel PyTorch models.",
        epilog="python -m meshstep COMMAND --help describes a command.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, description in COMMANDS.items():
        commands.add_parser(name, help=description)
    parser.parse_args(command)


if __name__ == "__main__":
    main()
