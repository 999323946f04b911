"""The signatures of the exported functions, classes and their methods (`PACKAGES`) are those in public_signatures.txt.

A changed default or argument changes the programs of users, so it must be changed in that file too:
`PYTHONPATH=tests/harness:tests/docs python tests/docs/test_public_signatures.py` writes it.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

PACKAGES = ("meshstep.parallel", "meshstep.optim", "meshstep.amp")
FILE = Path(__file__).with_name("public_signatures.txt")


def _signature(function: Callable[..., object]) -> str:
    """Return the signature of ``function`` with names and defaults, but without annotations and long texts."""
    found, parameters = inspect.signature(function), []
    for parameter in found.parameters.values():
        is_text = isinstance(parameter.default, str) and len(parameter.default) > 40
        default = "..." if is_text else parameter.default
        parameters.append(parameter.replace(annotation=inspect.Parameter.empty, default=default))
    text = str(found.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _lines_of(name: str, value: object) -> Iterator[str]:
    if not inspect.isclass(value):
        if inspect.isfunction(value):
            yield f"{name}{_signature(value)}"
        return
    try:
        yield f"class {name}{_signature(value)}"
    except ValueError:  # the class has no signature, such as an enumeration
        yield f"class {name}"
    for member, method in sorted(vars(value).items()):
        function = method.__func__ if isinstance(method, (classmethod, staticmethod)) else method
        # torch copies an inherited `step` into the class of an optimizer when the first one is created
        is_copied = hasattr(function, "hooked") and not function.__qualname__.startswith(f"{value.__qualname__}.")
        if not member.startswith("_") and inspect.isfunction(function) and not is_copied:
            yield f"    {member}{_signature(function)}"


def public_signatures() -> str:
    lines: list[str] = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        lines.append(f"# {package}")
        for name in sorted(module.__all__):
            lines += _lines_of(name, getattr(module, name))
    return "\n".join(lines) + "\n"


def test_public_signatures_match_public_signatures_txt() -> None:
    found, listed = public_signatures().splitlines(), FILE.read_text().splitlines()
    assert sorted({*found} - {*listed}) == [], "not in public_signatures.txt"
    assert sorted({*listed} - {*found}) == [], "only in public_signatures.txt"
    assert found == listed


if __name__ == "__main__":
    FILE.write_text(public_signatures())
