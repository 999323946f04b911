"""Train with Transformers' Trainer, plain or with the recipe of docs/integrations/TRANSFORMERS.md."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from recipes import recipe
from torch import Tensor
from transformers import Trainer, TrainingArguments, default_data_collator
from transformers.distributed import DistributedConfig

MAX_NORM = 0.5


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, fused=True)


def rows(number: int) -> list[dict[str, Tensor]]:
    """Return ``number`` samples of eight tokens, the same at every call."""
    tokens = torch.randint(0, 64, (number, 8), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in tokens]


def run(
    path: str, folder: Path, ours: bool, mesh: tuple[int, int] | None = None, resume: bool = False
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the norms that the Trainer logs and the weights after four steps.

    With ``resume``, continue from an earlier run's checkpoint of two steps.

    Args:
        ours: True: train with the recipe. False: train with the plain Trainer.
        mesh: The sizes fsdp x tp. None: the model is replicated, and the Trainer wraps it in DistributedDataParallel.
    """
    transformers.utils.logging.disable_progress_bar()
    AcceleratorState._reset_state()
    ParallelismConfig._validate_accelerator = lambda *_: None  # this check allows tensor parallelism on GPUs only
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=MAX_NORM,
        learning_rate=0.01,
        lr_scheduler_type="linear",
        report_to=[],
        save_steps=2,
        save_only_model=mesh is not None,
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    split = None if mesh is None else DistributedConfig(fsdp_size=mesh[0], tp_size=mesh[1])
    model = transformers.AutoModelForCausalLM.from_pretrained(path, distributed_config=split, dtype=torch.float32)
    given = {"train_dataset": rows(32), "data_collator": default_data_collator}
    if ours:
        make = recipe("TRANSFORMERS.md", "Inside the Trainer")["make_trainer" if mesh is None else "make_split_trainer"]
        trainer = make(model, arguments, adamw, **given)
    else:
        trainer = Trainer(model, arguments, optimizers=(adamw(model.parameters()), None), **given)
    if resume:
        if arguments.process_index == 0:
            shutil.rmtree(folder / "checkpoint-4")
        trainer.accelerator.wait_for_everyone()
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    weights = {
        name: param.full_tensor() if hasattr(param, "full_tensor") else param
        for name, param in model.named_parameters()
    }
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    return norms, {name: weight.detach().clone() for name, weight in weights.items()}
