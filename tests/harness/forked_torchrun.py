"""torchrun, whose processes are forked from one that has imported what the script imports.

    python forked_torchrun.py PROCESSES SCRIPT ARGUMENTS...

To import a trainer takes a core up to six seconds, in each process again. The environment, the store and the watch over the
processes are torchrun's own.
"""

from __future__ import annotations

import runpy
import sys

from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args


def run(script: str, *arguments: str) -> None:
    """As ``python SCRIPT ARGUMENTS...``."""
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def main(processes: str, script: str, *arguments: str) -> None:
    runpy.run_path(script, run_name="imported")
    standalone = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "of this run"]
    config, _, _ = config_from_args(parse_args([*standalone, "--nproc-per-node", processes, script]))
    config.start_method = "fork"
    elastic_launch(config, run)(script, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
