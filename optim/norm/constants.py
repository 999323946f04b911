"""Tensors made of numbers of the host, on a GPU without waiting for it, and made once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from ...amp.capture import is_captured

KEPT = 64


class Constants:
    """The `KEPT` that were asked for last; which gradients there are may differ from step to step."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Tensor] = OrderedDict()
        self._of_graphs: dict[Hashable, Tensor] = {}  # graphs read them where they lie, as long as they are replayed

    def __call__(
        self, key: Hashable, values: Callable[[], Sequence[float]], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """1-dim, on ``device``: what ``values`` returns, which is called where there is none under the key. Host reads:
        none.

        Raises:
            RuntimeError: A CUDA graph is made, in which they can't be brought from the host.
        """
        key = (key, dtype, device)
        if key in self._of_graphs:
            return self._of_graphs[key]
        if key in self._kept:
            self._kept.move_to_end(key)
        elif is_captured():
            raise RuntimeError(
                "other parameters have gradients in the step that is captured in a CUDA graph than in the steps before: "
                "make a step before with the same ones"
            )
        else:
            host = torch.tensor(values(), dtype=dtype, pin_memory=device.type == "cuda")
            self._kept[key] = host.to(device, non_blocking=True)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        if is_captured():
            self._of_graphs[key] = self._kept[key]
        return self._kept[key]
