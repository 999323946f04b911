"""Time `clip_grad_norm_` for many small DTensors, without a registry, and torch's function, in CPU time of rank 0.

    python tests/benchmarks/dtensor_clip.py [--counts 100 1000 5000 20000] [--rounds 7] [--torch-limit 5000]

Half of the DTensors are on one mesh and half on another one, as experts are. torch's function raises for two meshes, so
it gets the same number of DTensors on one mesh. Columns, per DTensor in microseconds:

    first      the first call, which builds the registry and the plan, and compares replicas
    warm       a later call
    kernels    the same kernels on the local tensors: the sums of squares of all gradients, and one
               multiplication
    Python     warm minus kernels
    torch      `torch.nn.utils.clip_grad_norm_`, a later call

Calls of both functions alternate; each figure except "first" is the smallest of all rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

from world import World

Placed = tuple[object, tuple[object, ...]]


def dtensors(count: int, placed: list[Placed]) -> list[nn.Parameter]:
    """Return ``count`` parameters of two elements per rank with gradients, on the (mesh, placements) pairs in turn."""
    from torch.distributed.tensor import DTensor

    def local(mesh: object, placements: tuple[object, ...]) -> Tensor:
        return DTensor.from_local(torch.ones(2), mesh, placements, run_check=False)  # type: ignore[arg-type]

    params = []
    for index in range(count):
        param = nn.Parameter(local(*placed[index % len(placed)]))
        param.grad = local(*placed[index % len(placed)])
        params.append(param)
    return params


def seconds(function: Callable[[], object]) -> float:
    """Return the CPU time of one call in seconds."""
    start = time.process_time()
    function()
    return time.process_time() - start


def measured(count: int, rounds: int, with_torch: bool) -> tuple[float, float, float, float]:
    """Return microseconds per DTensor of the first call, a warm call, its kernels, and torch's call (NaN: not timed)."""
    from meshstep.optim import clip_grad_norm_
    from meshstep.optim.norm.powers import local_powers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    data = init_device_mesh("cpu", (2,), mesh_dim_names=(f"data_{count}",))
    experts = init_device_mesh("cpu", (1, 2), mesh_dim_names=(f"rest_{count}", f"expert_{count}"))
    params = dtensors(count, [(data, (Shard(0),)), (experts, (Replicate(), Shard(0)))])
    one_mesh = dtensors(count if with_torch else 0, [(data, (Shard(0),))])
    locals_ = [param.grad._local_tensor for param in params]  # type: ignore[union-attr]
    factor = torch.tensor(1.0)

    def kernels() -> None:
        local_powers(locals_, 2.0)
        torch._foreach_mul_(locals_, factor)

    first = seconds(lambda: clip_grad_norm_(params, 1.0))
    warm, plain, torchs = [], [], []
    for _ in range(rounds):
        warm.append(seconds(lambda: clip_grad_norm_(params, 1.0)))
        plain.append(seconds(kernels))
        if with_torch:
            torchs.append(seconds(lambda: nn.utils.clip_grad_norm_(one_mesh, 1.0)))
    each = 1e6 / count
    return first * each, min(warm) * each, min(plain) * each, min(torchs) * each if torchs else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[100, 1000, 5000, 20000], help="numbers of DTensors")
    parser.add_argument("--rounds", type=int, default=7, help="calls per function and number")
    parser.add_argument("--torch-limit", type=int, default=5000, help="largest number for which torch is timed")
    args = parser.parse_args()
    world = World()
    print(f"torch {torch.__version__}, 2 ranks over gloo; microseconds of CPU time per DTensor")
    print(f"{'DTensors':>9} {'first':>8} {'warm':>8} {'kernels':>8} {'Python':>8} {'torch':>8}")
    for count in args.counts:
        # torch's first call takes time quadratic in the number: eleven minutes for 20,000.
        by_rank = world.ranks.run(measured, 2, count, args.rounds, count <= args.torch_limit, timeout=3600.0)
        first, warm, plain, torchs = by_rank[0]
        print(
            f"{count:9d} {first:8.1f} {warm:8.2f} {plain:8.2f} {warm - plain:8.2f} "
            + (f"{torchs:8.2f}" if count <= args.torch_limit else f"{'-':>8}"),
            flush=True,
        )
    world.close()


if __name__ == "__main__":
    main()
