"""Reports as curves of TensorBoard."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from types import TracebackType
from typing import Any

from .report import Report


class TensorBoardWriter:
    """A callback of `Monitor` that writes each report's numbers to TensorBoard. A context manager, or `close` it.

    Args:
        log_dir: Of the run; the file in it is made with the first report, so on global rank 0 only.
    Raises:
        ImportError: The package tensorboard is not installed.
    """

    def __init__(self, log_dir: str | PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"TensorBoardWriter needs the package tensorboard ({error}); pip install 'meshstep[tensorboard]'"
            ) from error
        self._make: Callable[[str], Any] = SummaryWriter
        self.log_dir = str(log_dir)
        self._writer: Any = None

    def __call__(self, report: Report) -> None:
        """Write one point of each curve."""
        if self._writer is None:
            self._writer = self._make(self.log_dir)
        for name, value in report.scalars().items():
            self._writer.add_scalar(name, value, report.step)

    def close(self) -> None:
        """Write what is pending. A second call does nothing."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> TensorBoardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
