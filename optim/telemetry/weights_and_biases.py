"""Reports as a run of Weights & Biases."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from .report import Report


class WeightsAndBiases:
    """A callback of `Monitor` that logs each report's numbers. A context manager, or `close` it.

    A run that goes on is told so by its own options, ``id="...", resume="must"``: the service ignores steps that it has
    already, and with ``resume_from="<id>?_step=100"`` it forgets later ones.

    Args:
        **options: Of ``wandb.init``, which is called with the first report, so on global rank 0 only: ``project="...",
            mode="offline"``.
    Raises:
        ImportError: The package wandb is not installed.
    """

    def __init__(self, **options: Any) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError(
                f"WeightsAndBiases needs the package wandb ({error}); pip install 'meshstep[wandb]'"
            ) from error
        self._wandb: Any = wandb
        self.options = options
        self._run: Any = None

    def __call__(self, report: Report) -> None:
        """Log one point of each curve."""
        if self._run is None:
            self._run = self._wandb.init(**self.options)
        self._run.log(report.scalars(), step=report.step)

    def close(self, exit_code: int = 0) -> None:
        """Send what is pending. A second call does nothing."""
        if self._run is not None:
            self._run.finish(exit_code=exit_code)
            self._run = None

    def __enter__(self) -> WeightsAndBiases:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(exit_code=0 if kind is None else 1)
