"""Command line ``python -m meshstep.parallel pipe=2 data=2 row=2 col=2 [--rank 5] [--svg FILE]``.

It prints the grid of ranks of a topology, and the groups of ranks along each axis. With ``--svg`` it also draws each
rank's shards of typical parameters.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from .layout.picture import draw
from .mesh.topology import Topology


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the grid of ranks and the groups of the topology in the arguments.

    With ``--svg FILE``, also write a picture of each rank's shards of typical parameters. Incorrect arguments, or a file
    that can't be written, exit with code 2.
    """
    parser = argparse.ArgumentParser(
        prog="python -m meshstep.parallel",
        description="Print the coordinate of each rank on named mesh axes, and the groups of ranks along each axis.",
        epilog="example: python -m meshstep.parallel pipe=2 data=2 row=2 col=2 --rank 5",
    )
    parser.add_argument("axes", nargs="+", metavar="axis=size", help="an axis and its size, slowest axis first")
    parser.add_argument("--rank", type=int, help="mark this rank and show only its groups")
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="draw the shards of each rank into FILE, up to 64 ranks"
    )
    options = parser.parse_args(arguments)
    try:
        topology = Topology.parse(" ".join(options.axes))
        table, picture = topology.table(options.rank), draw(topology) if options.svg else ""
        if options.svg:
            options.svg.write_text(picture, encoding="utf-8")
        print(table)
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
