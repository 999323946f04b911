"""Run the unmodified DeepSpeed on CPU ranks over gloo, without its compiled shared-memory kernel. The process groups
in its modules are reset after each `deepspeed_on_cpu` block."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest import mock


@contextmanager
def deepspeed_on_cpu() -> Iterator[Any]:
    place = {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "DS_SKIP_CUDA_CHECK": "1"}
    with warnings.catch_warnings(), mock.patch.dict(os.environ, place):
        warnings.simplefilter("ignore")
        import deepspeed
        from deepspeed.utils import groups, logger

        comm, backend = import_module("deepspeed.comm.comm"), import_module("deepspeed.comm.torch")
        logger.setLevel("ERROR")
        before = {module: {name: _copy(value) for name, value in vars(module).items()} for module in (comm, groups)}
        try:
            with mock.patch.object(backend, "build_shm_op", return_value=None):
                yield deepspeed
        finally:
            for module, values in before.items():
                vars(module).update(values)


def _copy(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value
