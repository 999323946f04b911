"""A debug model of torchtitan on 4 ranks: stock, with the recipe, and resumed with the recipe.

The model is llama3; with expert parallelism it is Qwen3 MoE, and no run is resumed. `on_cpus` makes torchtitan run on CPUs.
The command is run_torchtitan.py FOLDER LAYOUT.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent / "harness"))

import torch
from recipes import in_turn, recipe
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

torch.set_num_threads(1)
with mock.patch("torch._utils._get_available_device_type", return_value="cpu"):  # read once, at import
    import torchtitan.components.metrics as metrics
    import torchtitan.distributed.fsdp as fsdp
    import torchtitan.distributed.utils as dist_utils
    import torchtitan.models.llama3 as llama3
    import torchtitan.models.qwen3 as qwen3
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel
    from torchtitan.models.qwen3.config_registry import qwen3_debugmodel
    from torchtitan.trainer import Trainer

VOCAB, LENGTH, BATCH, STEPS, SAVE_EVERY = 2048, 32, 2, 4, 2
LAYERS = 2  # the debug model has 6 layers of the same kind
WITH_EXPERTS = "fsdp x ep"
SMALL_EXPERTS = {"n_layers": LAYERS, "num_experts": 4, "top_k": 2, "moe_hidden_dim": 64, "n_heads": 2, "n_kv_heads": 2}
LAYOUTS = {
    "fsdp x tp": {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
    "hsdp": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2},
    WITH_EXPERTS: {"data_parallel_shard_degree": 4, "expert_parallel_degree": 2},
    "pp x fsdp": {"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 2},
}


class Data(BaseDataLoader):  # type: ignore[misc, unused-ignore]  # the package may be missing
    """Random tokens, by step and data rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc, unused-ignore]
        pass

    def __init__(self, config: Config, *, dp_rank: int, **_: Any) -> None:
        self.rank, self.read = dp_rank, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(10 * self.read + self.rank)
            self.read += 1
            ids = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
            yield {"input": ids[:, :-1], "positions": torch.arange(LENGTH).expand(BATCH, -1)}, ids[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.read = state_dict["read"]


class Numbers(BaseTokenizer):  # type: ignore[misc, unused-ignore]  # the package may be missing
    """A tokenizer for data that already consist of token numbers."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc, unused-ignore]
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCAB


def on_cpus() -> None:
    """Replace the parts of torchtitan that need a GPU.

    These are: memory statistics; an attention kernel without a backward on CPUs; two collectives that gloo does not
    support, a reduction with PREMUL_SUM and `all_to_all` of lists of unequal tensors; and a barrier with device ids.
    """

    class NoMemory:
        device_name = "cpu"

        def get_peak_stats(self) -> Any:
            return metrics.DeviceMemStats(*[0] * len(metrics.DeviceMemStats._fields))

        def reset_peak_stats(self) -> None:
            pass

    undivided = fsdp.disable_fsdp_gradient_division

    def plain_sums(model: nn.Module) -> None:
        undivided(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    def all_to_all(received: list[Tensor], sent: list[Tensor], group: Any = None) -> None:
        output_sizes, input_sizes = ([len(each) for each in tensors] for tensors in (received, sent))
        joint = torch.cat(received)
        torch.distributed.all_to_all_single(joint, torch.cat(sent), output_sizes, input_sizes, group=group)
        for target, source in zip(received, joint.split(output_sizes), strict=True):
            target.copy_(source)

    torch.distributed.all_to_all = all_to_all  # type: ignore[assignment]
    metrics.build_device_memory_monitor = NoMemory
    fsdp.disable_fsdp_gradient_division = plain_sums
    llama3.get_attention_config = qwen3.get_attention_config = lambda _: ScaledDotProductAttention.Config()
    dist_utils.set_pg_timeouts = lambda **_: None


def config_of(folder: Path, layout: str) -> Any:
    if layout == WITH_EXPERTS:
        layers = qwen3._build_qwen3_moe_layers
        config = qwen3_debugmodel()
        with mock.patch.object(qwen3, "_build_qwen3_moe_layers", lambda **given: layers(**{**given, **SMALL_EXPERTS})):
            config.model_spec = qwen3.model_registry("debugmodel_moe")
    else:
        config = llama3_debugmodel()
        config.model_spec = llama3.model_registry("debugmodel")
    del config.model_spec.model.layers[LAYERS:]
    config.dataloader, config.tokenizer, config.hf_assets_path = Data.Config(), Numbers.Config(), ""
    config.training.seq_len, config.training.local_batch_size, config.training.steps = LENGTH, BATCH, STEPS
    if layout == WITH_EXPERTS:
        config.training.steps = 2
    config.training.disable_cuda_graphs, config.training.mixed_precision_param = True, "float32"
    for name, degree in LAYOUTS[layout].items():
        setattr(config.parallelism, name, degree)
    config.loss.num_chunks = 2
    config.debug.seed, config.validator.enable, config.activation_checkpoint = 42, False, None
    if config.parallelism.pipeline_parallel_degree > 1:
        config.parallelism.pipeline_parallel_microbatch_size, config.training.local_batch_size = BATCH, 2 * BATCH
        config.parallelism.pipeline_parallel_schedule = "1F1B"  # one stage per rank
    config.checkpoint.enable, config.checkpoint.interval, config.dump_folder = True, SAVE_EVERY, str(folder)
    return config


def exact_norm(trainer: Any) -> float:
    params = [param for part in trainer.model_parts for param in part.parameters()]
    grads = [param.grad.full_tensor() for param in params if param.grad is not None]
    power = torch.stack([grad.double().square().sum() for grad in grads]).sum()
    stages = trainer.parallel_dims.get_optional_mesh("pp")
    if stages is not None:
        torch.distributed.all_reduce(power, group=stages.get_group())
    return float(power.sqrt())


def main(how: str, folder: Path, layout: str, resumed: bool) -> None:
    """Run the trainer; ``resumed``: from the checkpoint before the last one."""
    if resumed and os.environ["RANK"] == "0":  # before other ranks start
        shutil.rmtree(folder / how / "checkpoint" / f"step-{STEPS}")
    on_cpus()
    config = config_of(folder / how, layout)
    if how == "ours" and layout == WITH_EXPERTS:
        recipe("TORCHTITAN.md", "With expert parallelism")
    elif how == "ours":
        config.optimizer = recipe("TORCHTITAN.md", "Inside the trainer")["Optimizers"].Config(
            param_groups=config.optimizer.param_groups
        )
    trainer = Trainer(config)
    exact: list[float] = []
    clip = dist_utils.clip_grad_norm_

    def measured(*args: Any, **kwargs: Any) -> Tensor:
        exact.append(exact_norm(trainer))
        norm: Tensor = clip(*args, **kwargs)
        return norm

    dist_utils.clip_grad_norm_ = measured
    rows: list[tuple[int, float, float]] = []
    trainer.metrics_processor.log = lambda step, loss, _, norm, **__: rows.append((step, loss, norm))
    # The trainer sleeps for two seconds on rank 0, so that the other ranks finish first. Here a barrier does this.
    with mock.patch("torchtitan.trainer.time", SimpleNamespace(**{**vars(time), "sleep": lambda _: None})):
        trainer.train()
    torch.distributed.barrier()
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:  # the last stage has the loss
        for row, norm in zip(rows, exact, strict=True):
            print("resumed" if resumed else how, *row, norm)
    trainer.close()


if __name__ == "__main__":
    runs = [("stock", False), ("ours", False), ("ours", True)]
    if sys.argv[2] == WITH_EXPERTS:  # this recipe keeps the optimizer and its checkpoints
        runs = runs[:2]
    in_turn(*(partial(main, how, Path(sys.argv[1]), sys.argv[2], resumed) for how, resumed in runs))
