"""Tests that need an optional package, which is expensive to import."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def skip_module_without(package: str) -> None:
    """Skip the calling test file if ``package`` is not installed, but do not import the package.

    `pytest.importorskip` would import it in each process of pytest, which takes two seconds for Megatron.
    """
    if find_spec(package) is None:
        pytest.skip(reason=f"needs {package}, of the extra `interop`", allow_module_level=True)
