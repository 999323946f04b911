"""Another default process group for a while: what torch knows of process groups is put aside, and comes back untouched."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

# Tables by group or by tag; an older torch lacks some.
_TABLES = (
    *("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg", "pg_coalesce_state"),
    *("pg_flight_recorder_hooks", "comms"),
)


class ProcessGroups:
    """A default group and all that were made beside it, which are either torch's now, or kept here.

    Args:
        first_name: torch calls default groups by numbers, which must be the same on all members and nobody else's in this
            process: the first number to take.
    """

    def __init__(self, first_name: int) -> None:
        self._kept: dict[str, Any] = {}
        self._count = first_name
        self._default: dist.ProcessGroup | None = None

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Within it, `torch.distributed` has these groups, and those that it had before are out of its reach."""
        before = ProcessGroups(0)
        before._take()
        self._give()
        hook = sys.excepthook  # of which each default group puts one on top
        try:
            yield
        finally:
            sys.excepthook = hook
            self._take()
            before._give()

    def end(self) -> None:
        """Destroy them, without a wait for others' collectives."""
        with self.in_force():
            if dist.is_initialized() and "nccl" in dist.get_backend_config():
                distributed_c10d._abort_process_group()
            elif dist.is_initialized():
                dist.destroy_process_group()

    def _take(self) -> None:
        world: Any = distributed_c10d._world
        for name in _TABLES:
            table = getattr(world, name, None)
            if table is not None:
                self._kept[name] = table.copy()
                table.clear()
        self._count, self._default = world.group_count, world.default_pg
        for name in self._kept["pg_names"].values():
            _distributed_c10d._unregister_process_group(name)
        distributed_c10d._update_default_pg(None)

    def _give(self) -> None:
        world: Any = distributed_c10d._world
        for name, kept in self._kept.items():
            table = getattr(world, name)
            table.clear()
            table.extend(kept) if isinstance(table, list) else table.update(kept)
        for group, name in self._kept.get("pg_names", {}).items():
            _distributed_c10d._register_process_group(name, group)
        world.group_count = self._count
        distributed_c10d._update_default_pg(self._default)
