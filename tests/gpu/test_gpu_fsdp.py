"""A model under fully_shard in a world of one rank over NCCL (gloo on the CPU) trains like the plain model."""

from __future__ import annotations

import torch
from fully_sharded import Net, adamw, data
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, declare
from meshstep.parallel.interop.local_parameters import local_tensor
from on_gpu import nobody_waits, ranks
from torch.distributed.fsdp import fully_shard

STEPS = 6


def trained(device: torch.device, is_sharded: bool) -> dict[str, torch.Tensor]:
    """Return the norms and the final parameters. Steps after the second must not synchronize with the host."""
    with ProcessGroupRegistry(Topology(data=1) if is_sharded else Topology()) as registry:
        net = Net().to(device)
        if is_sharded:
            mesh = registry.device_mesh("data")
            fully_shard(net.layers[0], mesh=mesh)
            fully_shard(net, mesh=mesh, ignored_params={net.scale})
            annotate(net.scale, P(), "scale")
        else:
            declare(net, {"*": P()})
        optimizer = ParallelOptimizer(adamw(net.parameters()), registry, max_norm=0.3)
        norms = []
        for step in range(STEPS):
            optimizer.zero_grad()
            optimizer.backward(net(data(step).float().to(device)).mean())
            with nobody_waits(device if step > 1 else torch.device("cpu")):
                stats = optimizer.step()
            assert stats is not None
            norms.append(stats.total_norm)
        found = {name: local_tensor(param).detach().cpu() for name, param in net.named_parameters()}
        return found | {"norms": torch.stack(norms).cpu()}


def test_fully_sharded_model_of_one_rank_trains_like_plain_model(device: torch.device) -> None:
    expected = trained(device, False)
    (found,) = ranks("nccl" if device.type == "cuda" else "gloo", 1, trained, device, True)
    assert bool((expected["norms"] > 0.3).any())  # some steps are clipped
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6, msg=name)
