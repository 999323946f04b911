"""LoRA: adapt the small GPT of accumulate_lm.py to Python code, in one process, or with sharded layers.

    python examples/accumulate_lm.py --steps 200 --resume base
    python examples/finetune_lora.py --base base
    torchrun --standalone --nproc-per-node 2 examples/finetune_lora.py --base base --topology tensor=2
    torchrun --standalone --nproc-per-node 4 examples/finetune_lora.py --base base --topology data=2,tensor=2 --fsdp
    python examples/finetune_lora.py --base base --full

The first command trains the model on Python's documentation. The other commands load it in their own layout. They freeze
it, and train adapters on source code of Python's standard library. The losses are the same on every layout. With `--full`
they train all weights instead, for a comparison of losses and memory. `--adapter DIR` writes the adapter in the files of
PEFT.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accumulate_lm import collate
from command_line import CommandLine, add_model_size, add_steps, main
from meshstep.optim import ParallelOptimizer, load_checkpoint, newest_checkpoint
from meshstep.parallel import (
    ProcessGroupRegistry,
    Topology,
    add_lora,
    declare,
    prepare_dataloader,
    reduce_from,
    save_adapter,
    spec_of,
    vocab_parallel_cross_entropy,
)
from models.gpt import CONTEXT, GPT
from torch import Tensor
from torch.utils.data import Dataset

TARGETS = ("qkv", "out", "up", "down")  # the linear layers of each block
SAMPLES, TESTED = 512, 128


class SourceCode(Dataset[Tensor]):
    """Windows of the source code of Python's modules json and textwrap, in a fixed random order.

    A sample is a 0 and CONTEXT bytes, as integers [CONTEXT + 1].
    """

    def __init__(self, start: int, end: int) -> None:
        files = [Path(textwrap.__file__), *sorted(Path(json.__file__).parent.glob("*.py"))]
        code = b"".join(file.read_bytes() for file in files)
        order = torch.randperm(len(code) - CONTEXT, generator=torch.Generator().manual_seed(0))[start:end].tolist()
        self.samples = [torch.tensor([0, *code[offset : offset + CONTEXT]]) for offset in order]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        return self.samples[index]


class Trainer:
    """Model, data and optimizer of one run; `train` is the loop.

    Raises:
        ValueError: The topology has an axis over which `GPT` can't be sharded, its sizes do not divide the model's
            sizes, or there is no checkpoint of the base model.
    """

    def __init__(self, options: argparse.Namespace, registry: ProcessGroupRegistry) -> None:
        self.options, self.registry = options, registry
        self.gpt = GPT(registry, options.width, options.heads, options.depth)
        if newest_checkpoint(options.base) is None:
            raise ValueError(f"--base {options.base} has no checkpoint; write one with accumulate_lm.py --resume")
        load_checkpoint(options.base, self.gpt, None, registry=registry)
        if not options.full:
            add_lora(self.gpt, TARGETS, options.r, 2 * options.r, registry, use_dora=options.dora)
        if options.fsdp:
            self._shard_fully()
        trained = [(name, param) for name, param in self.gpt.named_parameters() if param.requires_grad]
        self.adamw = torch.optim.AdamW(trained, lr=options.lr, weight_decay=0.0, fused=True)
        sharded: dict[str, Any] = {"data_parallel": self.gpt} if options.fsdp else {}
        self.optimizer = ParallelOptimizer(self.adamw, registry, max_norm=1.0, **sharded)
        size = options.batch_size // registry.size("data")
        self.loader = prepare_dataloader(
            SourceCode(TESTED, TESTED + SAMPLES), registry, size, shuffle=True, seed=0, collate_fn=collate
        )
        self.test_loader = prepare_dataloader(SourceCode(0, TESTED), registry, size, collate_fn=collate)

    def _shard_fully(self) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = self.registry.device_mesh("data")
        specs = {name: spec_of(param) for name, param in self.gpt.named_parameters()}
        for block in self.gpt.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.gpt, mesh=mesh)
        declare(self.gpt, specs)  # fully_shard has replaced the parameters

    def train(self) -> list[float]:
        """Run all steps, and return the loss of each step."""
        losses: list[float] = []
        while len(losses) < self.options.steps:
            for inputs, targets in self.loader:
                loss = self.loss(inputs, targets)
                self.optimizer.zero_grad()
                self.optimizer.backward(loss)
                self.optimizer.step()
                mean = reduce_from(loss.detach(), self.registry, "data") / self.registry.size("data")
                losses.append(float(mean))
                if len(losses) == self.options.steps:
                    break
        return losses

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of this rank's samples."""
        logits = self.gpt(inputs.to(self.registry.device))
        return vocab_parallel_cross_entropy(logits, targets.to(self.registry.device), self.registry)

    @torch.no_grad()
    def test(self) -> float:
        """Return the mean loss of the test samples."""
        total = sum((self.loss(*batch) for batch in self.test_loader), torch.zeros((), device=self.registry.device))
        total = reduce_from(total, self.registry, "data") / self.registry.size("data")
        return float(total) / len(self.test_loader)

    def bytes_for_training(self) -> int:
        """Return the bytes of gradients and optimizer states on this rank."""
        states = [value for state in self.adamw.state.values() for value in state.values() if isinstance(value, Tensor)]
        gradients = [param.grad for param in self.gpt.parameters() if param.grad is not None]
        local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in (*states, *gradients))
        return sum(tensor.numel() * tensor.element_size() for tensor in local)


def run(trainer: Trainer) -> None:
    """Test, train and test; print the results on rank 0, and save the adapter if asked."""
    options, registry = trainer.options, trainer.registry
    before = trainer.test()
    losses = trainer.train()
    after = trainer.test()
    if options.adapter is not None:
        save_adapter(options.adapter, trainer.gpt, registry)
    if registry.global_rank != 0:
        return
    print(f"{registry.topology!r}: {options.steps} steps, {trainer.optimizer.plan.counted} trained elements")
    print(f"losses:       {losses[0]:.4f} {losses[len(losses) // 2]:.4f} {losses[-1]:.4f}")
    print(f"test before:  loss {before:.4f}")
    print(f"test after:   loss {after:.4f}")
    print(f"memory:       {trainer.bytes_for_training()} bytes of gradients and optimizer states on rank 0")


def read_options(processes: int, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ValueError: A flag is wrong.
    """
    parser = CommandLine(__doc__, "data: shards the batch; tensor: shards layers")
    add = parser.add_argument
    add("--base", type=Path, required=True, metavar="DIR", help="checkpoints of accumulate_lm.py --resume DIR")
    add("--full", action="store_true", help="train all weights instead of adapters")
    add("--dora", action="store_true", help="train magnitudes too (DoRA)")
    add("--fsdp", action="store_true", help="shard all parameters over the axis data with fully_shard")
    add("--r", type=int, default=8, help="rank of the adapters (default: %(default)s)")
    add("--lr", type=float, default=1e-2, help="learning rate (default: %(default)s)")
    add("--batch-size", type=int, default=32, help="samples in a full batch (default: %(default)s)")
    add("--adapter", type=Path, metavar="DIR", help="write the adapter there, in the files of PEFT")
    add_steps(parser, 60)
    add_model_size(parser, width=96)
    options = parser.read(processes, arguments)
    topology: Topology = options.topology
    sizes = {axis: topology.size(axis) for axis in topology.axes}
    if not {*sizes} <= {"data", "tensor"}:
        raise ValueError(f"--topology has axes {', '.join(sizes)}; give data, tensor, or both")
    options.topology = Topology(roles=None, aliases={}, **{"data": 1, "tensor": 1, **sizes})
    if options.batch_size % options.topology.size("data"):
        size = options.topology.size("data")
        raise ValueError(f"--batch-size {options.batch_size} must be a multiple of {size}, the size of the axis data")
    if options.full and (options.adapter is not None or options.dora):
        raise ValueError("--full trains no adapter: leave out --adapter and --dora")
    return options


if __name__ == "__main__":
    main(read_options, Trainer, run)
