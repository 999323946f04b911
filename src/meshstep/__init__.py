"""The exact optimizer step of hand-written parallel PyTorch models: the step that the dense model would take.

All public names of `meshstep.parallel`, `meshstep.amp` and `meshstep.optim` are available here: ``from meshstep import P``.
Names are imported at first use, so ``import meshstep`` alone does not import torch.
"""

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .amp import *  # noqa: F403
    from .optim import *  # noqa: F403
    from .parallel import *  # noqa: F403

__version__ = "0.3.0"

_PACKAGES = ("parallel", "amp", "optim")


def _package_by_name() -> dict[str, str]:
    return {name: package for package in _PACKAGES for name in import_module(f".{package}", __name__).__all__}


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return import_module(f".{name}", __name__)
    if name == "__all__":
        return sorted(_package_by_name())
    if not name.startswith("_"):
        package = _package_by_name().get(name, "optim")  # ``__getattr__`` of ``meshstep.optim`` accepts former names
        with suppress(AttributeError):
            return getattr(import_module(f".{package}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PACKAGES, *_package_by_name()])
