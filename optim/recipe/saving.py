"""A run on disk, with the loader's position in its epoch: what a `Booster` saves and loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ...parallel.data.loader import ShardedDataLoader
from ..parallel_optimizer import ParallelOptimizer


class Saving:
    """Saves and loads what `Booster.boost` returned."""

    def save(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        optimizer: ParallelOptimizer,
        lr_scheduler: LRScheduler | None = None,
        dataloader: ShardedDataLoader[Any] | None = None,
        *,
        extra: Any = None,
        keep: int = 1,
    ) -> Path:
        """`save_checkpoint`, with the loader's position in its epoch. Every rank calls it.

        Args, returns, raises, collectives: as there; all of them as `boost` returned them.
        """
        from ..checkpoint import save_checkpoint

        position = None if dataloader is None else dataloader.state_dict()
        own = {"extra": extra, "dataloader": position}
        return save_checkpoint(path, model, optimizer, lr_scheduler=lr_scheduler, extra=own, keep=keep)

    def load(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        optimizer: ParallelOptimizer,
        lr_scheduler: LRScheduler | None = None,
        dataloader: ShardedDataLoader[Any] | None = None,
    ) -> Any:
        """`load_checkpoint` of what `save` wrote, into what `boost` returned, on this mesh or another. Every rank calls it.

        The next ``for`` over the loader has what was left of the saved epoch; see `ShardedDataLoader.load_state_dict`.

        Returns, raises, collectives: as there; and ValueError, once all else is loaded, where the loader does not have the
            saved epoch's order.
        """
        from ..checkpoint import load_checkpoint

        own = load_checkpoint(path, model, optimizer, lr_scheduler=lr_scheduler)
        if dataloader is not None and own["dataloader"] is not None:
            dataloader.load_state_dict(own["dataloader"])
        return own["extra"]
