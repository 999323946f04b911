"""How groups over NCCL are asked for; there is no NCCL here."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from meshstep.parallel.mesh.local_group import new_local_group


class Options:
    """As torch 2.15 has them."""

    lazy_init = False
    _timeout = timedelta(minutes=10)


class OlderOptions:
    pass


def asked_for(monkeypatch: pytest.MonkeyPatch, options: type, backend: str) -> Any:
    """The options that a group is asked for with."""
    found: list[Any] = []

    def new_group(*_: Any, pg_options: Any, **__: Any) -> None:
        found.append(pg_options)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "new_group", new_group)
    with pytest.raises(RuntimeError, match="doesn't let a process group be named"):
        new_local_group((0, 1), "a group", timeout=timedelta(seconds=7), backend=backend)
    return found[0]


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_the_communicator_is_made_at_the_first_collective(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    options = asked_for(monkeypatch, Options, backend)
    assert options.lazy_init
    assert options._timeout == timedelta(seconds=7)


def test_an_older_torch_makes_it_then_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_for(monkeypatch, OlderOptions, "nccl") is None


def test_other_backends_are_asked_for_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_for(monkeypatch, Options, "gloo") is None
