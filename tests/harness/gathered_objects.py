"""Replace `process_group_collectives.all_gather_objects` in tests whose tensors have no elements or are not sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from meshstep.parallel.mesh import agreement
from meshstep.parallel.mesh import registry as registry_module


@contextmanager
def objects_gathered_by(gather: Callable[[Any, Any, torch.device], list[Any]]) -> Iterator[None]:
    """Replace the gathering of objects everywhere in the library."""
    with ExitStack() as stack:
        for module in (agreement, registry_module):
            stack.enter_context(mock.patch.object(module, "all_gather_objects", gather))
        yield


def said_by_all(value: Any, group: dist.ProcessGroup, _: torch.device) -> list[Any]:
    """Return ``value`` once per rank, as if every rank had contributed this rank's value."""
    return [value] * group.size()
