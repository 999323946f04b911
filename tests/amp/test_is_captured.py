"""Recognition of CUDA graph captures, without a GPU."""

from __future__ import annotations

import pytest
import torch
from meshstep.amp.capture import is_captured


@pytest.mark.parametrize(
    ("initialized", "capturing"), [(False, False), (False, True), (True, False), (True, True)], ids=str
)
def test_is_captured_requires_initialized_device_and_capturing_stream(
    monkeypatch: pytest.MonkeyPatch, initialized: bool, capturing: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert is_captured() is (initialized and capturing)
