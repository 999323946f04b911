"""The exact optimizer step for hand-written parallel PyTorch models.

All that `meshstep.parallel`, `meshstep.amp` and `meshstep.optim` offer is here too: ``from meshstep import P``. A name
is looked up when it is first asked for, so that ``import meshstep`` alone loads nothing, not even torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .amp import *  # noqa: F403
    from .optim import *  # noqa: F403
    from .parallel import *  # noqa: F403

__version__ = "0.2.0"

_PACKAGES = ("parallel", "amp", "optim")


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return import_module(f".{name}", __name__)
    if not name.startswith("_"):
        for package in _PACKAGES:
            module = import_module(f".{package}", __name__)
            if name in module.__all__:
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    offered = [name for package in _PACKAGES for name in import_module(f".{package}", __name__).__all__]
    return sorted([*globals(), *_PACKAGES, *offered])
