from __future__ import annotations

import multiprocessing.forkserver

import pytest
from world import PRELOAD

# What ranks of the tests here import of the neighbours, for seconds each.
NEIGHBOURS = (
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "deepspeed",
)


@pytest.fixture(scope="session", autouse=True)
def imported_once() -> None:
    """In the process that ranks are forked from, if there is none yet."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOAD, *NEIGHBOURS])
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DS_ACCELERATOR", "cpu")  # or DeepSpeed looks for others, and says so
        multiprocessing.forkserver.ensure_running()
