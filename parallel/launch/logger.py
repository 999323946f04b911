"""A standard logger that knows its rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path

import torch.distributed as dist

from .environment import read_environment


def get_dist_logger(
    name: str = "meshstep",
    ranks: Collection[int] | None = (0,),
    file: str | os.PathLike[str] | None = None,
    level: int = logging.INFO,
) -> logging.Logger:
    """The logger ``name``, which writes to stderr on the given ranks only, with the rank before each line.

    The rank is looked up at each message, so the logger may be made before `init_distributed`. Loggers below it
    (``meshstep.optim``) speak through it. Asking again with other arguments replaces the former ones.

    Args:
        ranks: Who speaks; None for everybody.
        file: Append to this file too. ``{rank}`` in it becomes the rank, as several ranks can't share a file well.
        level: Messages below it are dropped.
    """
    logger = logging.getLogger(name)
    logger.setLevel(level)
    logger.propagate = False  # the root's handlers would write each line again, on every rank
    for handler in [handler for handler in logger.handlers if any(isinstance(f, _OnRanks) for f in handler.filters)]:
        logger.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if file is not None:
        path = Path(str(file).replace("{rank}", str(_rank())))
        path.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(path, delay=True, encoding="utf-8"))  # silent ranks leave no file
    for handler in handlers:
        handler.addFilter(_OnRanks(ranks))
        handler.setFormatter(logging.Formatter("[%(asctime)s rank %(rank)d %(levelname)s] %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
    return logger


class _OnRanks(logging.Filter):
    def __init__(self, ranks: Collection[int] | None) -> None:
        super().__init__()
        self._ranks = None if ranks is None else frozenset(ranks)

    def filter(self, record: logging.LogRecord) -> bool:
        rank = _rank()
        vars(record)["rank"] = rank  # for the formatter
        return self._ranks is None or rank in self._ranks


def _rank() -> int:
    if dist.is_initialized():
        return dist.get_rank()
    try:
        return read_environment(os.environ).rank
    except RuntimeError:  # half an environment is for init_distributed to complain about, not for a log line
        return 0
