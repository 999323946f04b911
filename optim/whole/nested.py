"""The state of any optimizer for a tensor, dictionaries and lists within each other, as tensors alone.

What is no tensor, and how all hangs together, is text in one of them. So it travels, is saved and restored like the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

PLAN = "plan"
_KINDS: dict[type, str] = {list: "list", tuple: "tuple"}


def flattened(nested: Any) -> dict[str, Any]:
    """By path; under `PLAN` the text, as bytes. What is neither plain nor a container of such is there as it is."""
    found: dict[str, Any] = {}
    plan = _planned(nested, "", found)
    return {PLAN: torch.frombuffer(bytearray(json.dumps(plan).encode()), dtype=torch.uint8), **found}


def is_plain(value: Any) -> bool:
    """Whether text says it exactly."""
    return value is None or type(value) in (bool, int, float, str)


def _planned(value: Any, path: str, found: dict[str, Any]) -> dict[str, Any]:
    if is_plain(value):
        return {"value": value}
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        inner = [[key, _planned(one, _beneath(path, key), found)] for key, one in value.items()]
        return {"dict": inner}
    if type(value) in _KINDS:
        return {_KINDS[type(value)]: [_planned(one, _beneath(path, at), found) for at, one in enumerate(value)]}
    while path in found or path == PLAN:
        path += "_"
    found[path] = value
    return {"at": path, "cpu": isinstance(value, Tensor) and value.is_cpu}


def _beneath(path: str, key: Any) -> str:
    name = str(key).replace("/", "_")
    return f"{path}.{name}" if path else name


def nested(found: Mapping[str, Any], device: torch.device) -> Any:
    """What `flattened` was given.

    Args:
        device: Of what was not on the CPU.
    """
    plan = json.loads(bytes(found[PLAN].cpu().tolist()).decode())
    return _followed(plan, found, device)


def _followed(plan: Mapping[str, Any], found: Mapping[str, Any], device: torch.device) -> Any:
    ((kind, content), *_) = plan.items()
    if kind == "value":
        return content
    if kind == "dict":
        return {key: _followed(one, found, device) for key, one in content}
    if kind == "at":
        value = found[content]
        return value.to("cpu" if plan["cpu"] else device) if isinstance(value, Tensor) else value
    items = [_followed(one, found, device) for one in content]
    return tuple(items) if kind == "tuple" else items
