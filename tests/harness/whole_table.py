"""The axes of the table of full-tensor optimizers: optimizers, layouts, placements of states."""

from __future__ import annotations

from home_runs import adafactor, shampoo, soap
from measured import MAKES
from whole_runs import STATES, WHOLE_LAYOUTS, Make, muon

OPTIMIZERS: dict[str, Make] = {
    "Muon": muon,
    "SOAP": soap,
    "Shampoo": shampoo,
    **MAKES,
    "whole(torch.optim.Adafactor(...))": adafactor,
}
LAYOUTS = {
    "tensor=2": "tensor",
    "row=2,col=2": "grid",
    "input=2,output=2": "diagonal",
    "data=3": "data=3",
    "data=2,tensor=2": "data x tensor",
    "data=2,expert=2": "experts",
    "pipe=2": "pipe, tied",
    "tensor=3, uneven": "uneven",
    "tensor=2, blocks": "fused blocks",
    "tensor=2, sequence": "sequence",
    "depth=2,row=1,col=2": "2.5-D",
    "input=2,weight=2,output=2": "3-D",
}
PLACEMENTS = {"whole": "whole", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "offload": "offload"}


def fitting(layout: str) -> list[str]:
    has_data = "data" in WHOLE_LAYOUTS[LAYOUTS[layout]].topology.axes
    return [name for name, state in PLACEMENTS.items() if state in STATES and (has_data or "zero" not in name)]
