"""A small network learns handwritten digits, in one process or in several (pip install 'meshstep[examples]')."""

import argparse

import torch
from meshstep.optim import Monitor, ParallelOptimizer
from meshstep.parallel import (
    ColumnParallelLinear,
    ProcessGroupRegistry,
    RowParallelLinear,
    Topology,
    init_distributed,
    prepare_dataloader,
)
from sklearn.datasets import load_digits

if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
world_size = init_distributed().world_size
tensor = 2 if world_size % 2 == 0 else 1
registry = ProcessGroupRegistry(Topology(data=world_size // tensor, tensor=tensor))

digits = load_digits()
images, labels = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)
dataset = torch.utils.data.TensorDataset(images, labels)
loader = prepare_dataloader(dataset, registry, 64 // registry.size("data"), shuffle=True, drop_last=True)

torch.manual_seed(0)  # draws the full weights; each rank keeps its part of them
up, down = ColumnParallelLinear(64, 128, registry), RowParallelLinear(128, 10, registry)
model = torch.nn.Sequential(up, torch.nn.GELU(), down).to(registry.device)
adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-2, fused=True)
optimizer = ParallelOptimizer(adamw, registry, max_norm=1.0)
monitor = Monitor(registry, lambda r: print(f"step {r.step}: loss {r.loss:.3f}, norm {r.grad_norm:.3f}"), every=28)
for _ in range(4):
    for inputs, targets in loader:
        optimizer.zero_grad()
        logits = model(inputs.to(registry.device))
        loss = torch.nn.functional.cross_entropy(logits, targets.to(registry.device))
        optimizer.backward(loss)
        monitor(optimizer.step(), loss.detach(), count=len(inputs))
