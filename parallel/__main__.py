"""``python -m meshstep.parallel pipe=2 data=2 row=2 col=2 [--rank 5] [--svg FILE]``: the rank grid and the groups, as text;
and who holds what, as a picture."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from .layout.picture import draw
from .mesh.topology import Topology


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a topology as a table. Bad input ends with exit code 2 and a message on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m meshstep.parallel",
        description="Print where each rank is on named process axes, and which ranks form a group.",
        epilog="example: python -m meshstep.parallel pipe=2 data=2 row=2 col=2 --rank 5",
    )
    parser.add_argument("axes", nargs="+", metavar="axis=size", help="an axis and its size, slowest axis first")
    parser.add_argument("--rank", type=int, help="mark this rank and show its own groups only")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw who holds what there too, up to 64 ranks")
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
