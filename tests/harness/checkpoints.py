"""A model, its optimizer, and comparison of contents, for tests of rejected checkpoints and failed saves."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from arguments import arguments
from meshstep.optim import ParallelOptimizer
from meshstep.optim.checkpoint.directory import record_of
from meshstep.parallel import ProcessGroupRegistry, Topology
from torch import Tensor, nn


def content(value: Any) -> Any:
    """Convert nested containers with tensors to a comparable value: dtype and values of each tensor."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: content(inner) for key, inner in value.items()}
    return [content(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def model_of(shape: int = 3, names: tuple[str, ...] = ("one", "two"), buffer: bool = True) -> nn.Module:
    """Return a model of linear layers with these names; weights are equal at every call."""
    torch.manual_seed(1)
    model = nn.ModuleDict({name: nn.Linear(shape, 2) for name in names})
    if buffer:
        model.register_buffer("seen", torch.tensor([1, 2]))
    return model


def optimizer_of(
    model: nn.Module, groups: Callable[[nn.Module], Any] = nn.Module.parameters, precision: Any = "fp32", **options: Any
) -> ParallelOptimizer:
    kind = options.pop("kind", torch.optim.AdamW)
    if precision != "fp32":
        model.bfloat16()
    inner = kind(groups(model), lr=0.1)
    return ParallelOptimizer(inner, ProcessGroupRegistry(Topology()), **arguments(precision=precision, **options))


def zipped(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def sealed(checkpoint: Path, saved: bytes | None = None) -> None:
    """Rewrite the manifest so that all its checksums match the current files.

    ``saved`` is the content of meshstep.json as it was saved. None: its current content.
    """
    file = checkpoint / "meshstep.json"
    try:
        manifest = json.loads(saved or file.read_text())["manifest"]
    except ValueError:
        return  # the test replaced meshstep.json by text that is not JSON
    manifest["files"] = {name: record_of(checkpoint / name) for name in manifest["files"]}
    checksum = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
    file.write_text(json.dumps({"crc32": checksum, "manifest": manifest}))
