"""Draw the shards of each published layout, with the code of `python -m meshstep.parallel ... --svg FILE`."""

from __future__ import annotations

from common import HERE
from meshstep.parallel import Topology
from meshstep.parallel.layout.picture import draw

LAYOUTS = {
    "1d": "tensor=4",
    "2d": "data=2 row=2 col=2",
    "2p5d": "depth=2 row=2 col=2",
    "3d": "input=2 weight=2 output=2",
    "experts": "edp=2 mid=2 tensor=2 data=edp+mid expert=mid+tensor",
}


def main() -> None:
    for name, axes in LAYOUTS.items():
        (HERE / f"layout_{name}.svg").write_text(draw(Topology.parse(axes)), encoding="utf-8")


if __name__ == "__main__":
    main()
