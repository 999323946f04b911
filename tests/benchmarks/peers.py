"""Time the optimizer step of other libraries and of meshstep in one interleaved run, with equal shapes and gradients.

    python tests/benchmarks/peers.py [--seconds 30] [--ranks 2] [--train [--layers 9]] [--no-cpu-adam] [--keep]

Needs the extra ``interop``, and megatron-core without its dependencies. The time begins after backward, with the gradients
where each library expects them, and ends when the next forward may begin: norm, clip, update, masters, copies to the model.
On several ranks every tensor is sharded (tensor parallel), with the same size per rank. With ``--train``, forward and
backward of a transformer of that size are timed too.

Each row is the median over rounds of (contender / bare fused float32 AdamW of torch) in the same round. On one rank with
one thread it is CPU time, which is independent of other load; else wall time of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed_on_cpu import deepspeed_on_cpu
from megatron_on_cpu import megatron
from meshstep.amp import Bf16, NaiveFp16
from meshstep.amp.modes import Precision
from meshstep.optim import ParallelOptimizer, use_kernels
from meshstep.optim.kernels.choice import Kernels
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from meshstep.parallel.interop.deepspeed import ModelParallelUnit
from stepped_sizes import transformer_parameters
from timed_transformer import VOCAB, Transformer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

LR, MAX_NORM = 1e-4, 0.7
BARE = "bare fused AdamW"
CPU = torch.device("cpu")


@dataclass
class Contender:
    """One way to step. ``refill`` writes the gradients as backward does; it is timed only with ``--train``."""

    refill: Callable[[], object]
    step: Callable[[], object]


class Given(torch.autograd.Function):
    """A loss of zero whose backward returns given gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.gradients = gradients
        return weights[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(gradient.clone() for gradient in ctx.gradients))


class Layer(nn.Module):
    """A module with the parameters of a transformer, whose backward sets given gradients."""

    def __init__(self, dtype: torch.dtype, width: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        shapes = transformer_parameters(CPU, width)
        self.weights = nn.ParameterList([nn.Parameter(param.detach().to(dtype)) for param in shapes])
        self.gradients = [torch.randn_like(weight) for weight in self.weights]

    def forward(self) -> Tensor:
        return Given.apply(self.gradients, *self.weights)  # type: ignore[no-any-return]


class Trained(nn.Module):
    """A transformer of this width and number of layers, with a batch."""

    def __init__(self, dtype: torch.dtype, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = Transformer(width, layers).to(dtype)
        self.ids = torch.randint(VOCAB, (4, 129))

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def forward(self) -> Tensor:
        loss: Tensor = self.model(self.ids)
        return loss.float()


@dataclass(frozen=True)
class Run:
    """The configuration of a measurement.

    ``registry`` has the ranks over which every tensor is sharded. ``train``: time forward and backward too, of ``layers``
    layers. ``deepspeed`` is the package. ``cpu_adam``: time DeepSpeed's CPUAdam too.
    """

    registry: ProcessGroupRegistry
    train: bool
    width: int
    layers: int
    deepspeed: Any
    cpu_adam: bool

    def model(self, dtype: torch.dtype) -> Any:
        return Trained(dtype, self.width, self.layers) if self.train else Layer(dtype, self.width)

    def contender(self, model: Any, step: Callable[[], object], dtype: torch.dtype | None = None) -> Contender:
        """Return a contender whose gradients are in ``.grad``, in ``dtype``."""

        def backward() -> None:
            for weight in model.weights:
                weight.grad = None
            if self.train:
                model().backward()
                return
            for weight, gradient in zip(model.weights, model.gradients, strict=True):
                weight.grad = gradient.to(dtype or gradient.dtype, copy=True)

        return Contender(backward, step)

    # The contenders --------------------------------------------------------------------------------------------------

    def bare(self) -> Contender:
        model = self.model(torch.float32)
        return self.contender(model, adamw(model.weights).step)

    def torchs(self) -> Contender:
        """Return a contender that uses torch's clip_grad_norm_ and AdamW; on several ranks the weights are DTensors."""
        model = self.model(torch.float32)
        weights = list(model.weights)
        if self.registry.topology.world_size > 1:
            mesh = init_device_mesh("cpu", (self.registry.topology.world_size,))
            weights = [nn.Parameter(DTensor.from_local(weight.detach(), mesh, [Shard(0)])) for weight in weights]
            gradients = [DTensor.from_local(gradient, mesh, [Shard(0)]) for gradient in model.gradients]
        optimizer = adamw(weights)

        def step() -> None:
            nn.utils.clip_grad_norm_(weights, MAX_NORM)
            optimizer.step()

        def refill() -> None:
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient.clone()

        return self.contender(model, step) if self.registry.topology.world_size == 1 else Contender(refill, step)

    def plain_chain(self, dtype: torch.dtype) -> Contender:
        """Return hand-written masters on one rank: cast, check and unscale (fp16), measure, clip, step, copy back."""
        model = self.model(dtype)
        masters = [nn.Parameter(weight.detach().float()) for weight in model.weights]
        optimizer = adamw(masters)
        scale, found_inf = torch.tensor(2.0), torch.zeros(())

        @torch.no_grad()
        def step() -> None:
            for weight, master in zip(model.weights, masters, strict=True):
                master.grad = weight.grad.float()
            if dtype == torch.float16:
                grads = [master.grad for master in masters if master.grad is not None]
                torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf.zero_(), 1 / scale)
                if found_inf.item():
                    return
            nn.utils.clip_grad_norm_(masters, MAX_NORM)
            optimizer.step()
            torch._foreach_copy_(list(model.weights), [master.detach() for master in masters])

        return self.contender(model, step)

    def meshsteps(
        self, dtype: torch.dtype, precision: Precision | str = "fp32", kernels: Kernels = "auto"
    ) -> Contender:
        model = self.model(dtype)
        if isinstance(precision, Precision) and self.train:
            precision.prepare(model)
        declare(model, {"*": P("tensor") if self.registry.topology.world_size > 1 else P()})
        optimizer: Any = ParallelOptimizer(
            adamw(model.weights),
            self.registry,
            max_norm=MAX_NORM,
            precision=precision,  # type: ignore[arg-type]
            check_replicas=False,  # other libraries do not compare replicas
        )
        wide = isinstance(precision, Precision) and precision.main_grads
        given = self.contender(model, optimizer.step, torch.float32 if wide else None)

        def step() -> None:
            use_kernels(kernels)
            if not self.train:
                optimizer.scale_loss(torch.zeros(()))  # as backward does
            optimizer.step()

        def backward() -> None:
            optimizer.zero_grad()
            if self.train:
                optimizer.backward(model())
            else:
                given.refill()

        return Contender(backward, step)

    def megatrons(self, dtype: torch.dtype) -> Contender:
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.optimizer.grad_scaler import ConstantGradScaler
        from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

        model = self.model(dtype)
        for weight in model.weights:
            weight.tensor_model_parallel = self.registry.topology.world_size > 1
        config: Any = OptimizerConfig(
            optimizer="adam",
            lr=LR,
            clip_grad=MAX_NORM,
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
            params_dtype=dtype,
            use_distributed_optimizer=False,
        )
        if dtype == torch.float32:
            optimizer: Any = FP32Optimizer(adamw(model.weights), config, lambda *_: None)
        else:
            scaler = ConstantGradScaler(2.0) if dtype == torch.float16 else None
            optimizer = Float16OptimizerWithFloat16Params(adamw(model.weights), config, scaler, lambda *_: None)

        def backward() -> None:
            if self.train:
                optimizer.scale_loss(model()).backward()
            for index, weight in enumerate(model.weights):  # where the DDP of Megatron puts gradients
                gradient = weight.grad if self.train else model.gradients[index]
                weight.main_grad, weight.grad = gradient.to(torch.float32, copy=True), None

        return Contender(backward, optimizer.step)

    def deepspeeds(self, dtype: torch.dtype) -> Contender:
        model = self.model(dtype)
        several = self.registry.topology.world_size > 1
        for weight in model.weights:
            weight.model_parallel = several
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": MAX_NORM}
        if dtype == torch.bfloat16:
            config["bf16"] = {"enabled": True}
        if dtype == torch.float16:
            config["fp16"] = {"enabled": True, "loss_scale": 2.0}
        made = self.deepspeed.initialize(
            model=model,
            optimizer=adamw(model.weights),
            config=config,
            mpu=ModelParallelUnit(self.registry) if several else None,
            dist_init_required=False,
        )
        engine = made[0]
        return Contender(lambda: engine.backward(engine()), engine.step)

    def cpu_adams(self) -> Contender:
        """Return DeepSpeed's kernel for offloaded states, without norm and clipping."""
        model = self.model(torch.float32)
        optimizer = self.deepspeed.ops.adam.DeepSpeedCPUAdam(list(model.weights), lr=LR)
        return self.contender(model, optimizer.step)

    @property
    def refuses_fp16(self) -> bool:
        """Return whether DeepSpeed rejects fp16, as on a CPU without fp16 instructions."""
        return not self.deepspeed.accelerator.get_accelerator().is_fp16_supported()

    def contenders(self) -> Mapping[str, Mapping[str, Callable[[], Contender]]]:
        """Return the contenders by precision and name. Ratios are relative to `BARE`, always in float32."""
        found: dict[str, dict[str, Callable[[], Contender]]] = {
            "fp32": {
                BARE: self.bare,
                "torch": self.torchs,
                "Megatron-core": lambda: self.megatrons(torch.float32),
                "DeepSpeed": lambda: self.deepspeeds(torch.float32),
                "DeepSpeed CPUAdam, alone": self.cpu_adams,
                "meshstep, torch's kernels": lambda: self.meshsteps(torch.float32, kernels="torch"),
                "meshstep": lambda: self.meshsteps(torch.float32),
            }
        }
        for name, dtype, mode in (("bf16", torch.bfloat16, Bf16), ("fp16", torch.float16, NaiveFp16)):
            found[f"{name}, float32 masters"] = {
                BARE: self.bare,
                "plain chain": partial(self.plain_chain, dtype),
                "Megatron-core": partial(self.megatrons, dtype),
                "DeepSpeed": partial(self.deepspeeds, dtype),
                "meshstep, torch's kernels": partial(self.meshsteps, dtype, mode(), "torch"),
                "meshstep": partial(self.meshsteps, dtype, mode()),
                "meshstep, main_grads=False": partial(self.meshsteps, dtype, mode(main_grads=False)),
            }
        if not self.cpu_adam:
            del found["fp32"]["DeepSpeed CPUAdam, alone"]
        if self.refuses_fp16:
            del found["fp16, float32 masters"]["DeepSpeed"]
        if self.registry.topology.world_size > 1:  # the norm of the plain chain covers one rank only
            found = {key: {name: m for name, m in of.items() if name != "plain chain"} for key, of in found.items()}
        return found


def adamw(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=LR, fused=True)


# Timing ---------------------------------------------------------------------------------------------------------------


def rounds(of: Mapping[str, Contender], seconds: float, run: Run, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Return seconds of the slowest rank for each contender in each round after one warm-up round."""
    times: dict[str, list[float]] = {name: [] for name in of}
    end, go_on = time.perf_counter() + seconds, torch.ones(())
    while go_on:
        for name, contender in of.items():
            dist.barrier()
            start = clock()
            contender.refill()
            start = start if run.train else clock()
            contender.step()
            spent = torch.tensor(clock() - start, dtype=torch.float64)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            times[name].append(float(spent))
        go_on.fill_(float(len(next(iter(times.values()))) < 4 or time.perf_counter() < end))
        dist.broadcast(go_on, 0)
    return {name: values[1:] for name, values in times.items()}


def ratios(times: Mapping[str, list[float]], base: str) -> dict[str, float]:
    return {
        name: median(mine / bare for mine, bare in zip(values, times[base], strict=True))
        for name, values in times.items()
    }


def keep(ranks: int, found: Mapping[str, Mapping[str, float]]) -> None:
    """Store the ratios for docs/pictures/peers.py."""
    path = Path(__file__).parents[2] / "docs" / "pictures" / "figures" / "peers.json"
    figures = json.loads(path.read_text()) if path.exists() else {}
    figures["one rank" if ranks == 1 else f"tensor={ranks}"] = {
        precision: {name: round(ratio, 3) for name, ratio in of.items() if name != BARE}
        for precision, of in found.items()
    }
    path.write_text(json.dumps(figures, indent=1) + "\n")


def measure(rank: int, store: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    ranks = arguments.ranks
    alone = ranks == arguments.threads == 1
    found: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        package = stack.enter_context(deepspeed_on_cpu())
        package.init_distributed("gloo")
        stack.enter_context(megatron(tensor_model_parallel_size=ranks))
        registry = stack.enter_context(ProcessGroupRegistry(Topology(tensor=ranks)))
        run = Run(registry, arguments.train, arguments.width, arguments.layers, package, arguments.cpu_adam)
        for precision, makers in run.contenders().items():
            times = rounds(
                {name: make() for name, make in makers.items()},
                arguments.seconds,
                run,
                time.process_time if alone else time.perf_counter,
            )
            found[precision] = ratios(times, BARE)
            if rank == 0:
                print(f"\n{precision} ({len(times[BARE])} rounds)")
                for name, ratio in found[precision].items():
                    print(f"  {name:32s} {median(times[name]) * 1e3:9.2f} ms   {ratio:5.2f}x", flush=True)
        if run.refuses_fp16 and rank == 0:
            print("\nDeepSpeed refuses fp16 on this processor: no row")
        if arguments.keep and rank == 0:
            keep(ranks, found)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="time for each precision")
    parser.add_argument("--ranks", type=int, default=1, help="every tensor is split over them")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--width", type=int, default=512, help="of the transformer: 512 has 30M parameters")
    parser.add_argument("--train", action="store_true", help="time forward and backward too; one rank")
    parser.add_argument("--layers", type=int, default=9, help="of the transformer, with --train")
    parser.add_argument(
        "--no-cpu-adam",
        dest="cpu_adam",
        action="store_false",
        help="leave out DeepSpeed's CPUAdam, which compiles its kernel for 90 s when it is first used",
    )
    parser.add_argument("--keep", action="store_true", help="store the ratios for docs/pictures/peers.py")
    arguments = parser.parse_args()
    if arguments.keep and not arguments.cpu_adam:
        parser.error("--keep stores the figures of all libraries: leave --no-cpu-adam out")
    if arguments.train and (arguments.ranks > 1 or arguments.keep):
        parser.error("--train runs on one rank, and its figures are not stored: use neither --ranks nor --keep")
    with TemporaryDirectory() as folder:
        store = f"{folder}/store"
        if arguments.ranks == 1:
            measure(0, store, arguments)
        else:
            mp.spawn(measure, (store, arguments), arguments.ranks)  # type: ignore[attr-defined,no-untyped-call]


if __name__ == "__main__":
    main()
