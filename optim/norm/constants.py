"""Tensors made of numbers of the host, on a GPU without waiting for it, and made once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

KEPT = 64


class Constants:
    """The `KEPT` that were asked for last; which gradients there are may differ from step to step."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Tensor] = OrderedDict()

    def __call__(
        self, key: Hashable, values: Callable[[], Sequence[float]], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """1-dim, on ``device``: what ``values`` returns, which is called where there is none under the key. Host reads:
        none."""
        key = (key, dtype, device)
        if key in self._kept:
            self._kept.move_to_end(key)
        else:
            host = torch.tensor(values(), dtype=dtype, pin_memory=device.type == "cuda")
            self._kept[key] = host.to(device, non_blocking=True)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return self._kept[key]
