"""The commands of ``python -m meshstep.optim``.

python -m meshstep.optim report run.jsonl           # writes the curves of a run as an HTML page
python -m meshstep.optim compare A.jsonl B.jsonl    # finds the first difference of two runs
python -m meshstep.optim compare A.jsonl B.jsonl --json --tolerance bfloat16=0.1 --growth 0.2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..parallel.mesh.text import printable
from .telemetry.comparison import add_compare_command
from .telemetry.page import add_report_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code.

    The code is 0, or 1 if ``compare`` found a difference. It is 2, with a message on stderr, if a file can't be read or
    written, is not of the expected kind or has no step to show or compare, or if the value of an option is out of
    range. Other wrong arguments raise SystemExit with the code 2; ``--help`` raises it with the code 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m meshstep.optim", description="Plot a training run, or compare two runs."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    add_report_command(commands)
    add_compare_command(commands)
    options = parser.parse_args(arguments)
    try:
        code: int = options.run_command(options)
    except (OSError, ValueError) as error:
        print(f"{parser.prog} {options.command}: error: {printable(str(error))}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
