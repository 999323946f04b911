"""Train a transformer with mixtures of experts on scikit-learn's handwritten digits, with experts on any axes.

    python examples/train_moe.py
    torchrun --standalone --nproc-per-node 4 examples/train_moe.py --topology data=4 --verify
    torchrun --standalone --nproc-per-node 4 examples/train_moe.py --topology data=2,expert=2 --experts expert --verify
    torchrun --standalone --nproc-per-node 4 examples/train_moe.py --topology data=2,tensor=2 --experts data,tensor
    torchrun --standalone --nproc-per-node 8 examples/train_moe.py \\
        --topology edp=2,mid=2,tensor=2,data=edp+mid,expert=mid+tensor --experts expert

Attention and shared experts are replicated, or sharded over `tensor`. Experts are sharded over the axes of `--experts`, and
all-to-alls send tokens to them and back. Ranks along these axes see different samples, as along `data`, except along
`tensor`, where ranks have the same tokens and each sends a part of them. If `tensor` is not among the axes of `--experts`,
each expert is sharded over it. The last command has two meshes of the same ranks: data=4,tensor=2 for dense layers, and
edp=2,expert=4 for experts.

The same seed gives the same loss curve on every topology with `--float64`. In float32, rounding sometimes changes the
choice of an expert. The model is in models/moe.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
import train_digits
from command_line import CommandLine, add_model_size, add_training_flags, check_training, main
from meshstep.parallel import ProcessGroupRegistry, Role, Topology
from models.digits import DenseReference, MixtureTransformer
from models.layers import DenseLayers
from models.moe import DenseMixture, Mixture, MixtureShape
from optimizer_flag import add_optimizer
from torch import Tensor, nn
from train_digits import Samples, run


class Trainer(train_digits.Trainer):
    """The trainer of train_digits with a mixture of experts, and a loss term for imbalanced experts.

    Raises:
        ValueError: As in train_digits; or an axis does not support experts, or the experts do not divide over it.
    """

    def __init__(self, options: argparse.Namespace, registry: ProcessGroupRegistry) -> None:
        self.dtype = torch.float64 if options.float64 else torch.float32
        topology = registry.topology
        strange = [axis for axis in (*topology.pipe_axes, *topology.model_axes) if axis != "tensor"]
        if strange:
            raise ValueError(
                f"--topology has {', '.join(strange)}, over which this script can't shard layers: use only data axes, the "
                "axes of --experts, and tensor"
            )
        self.shape = MixtureShape(options.num_experts, options.top_k, options.capacity)
        super().__init__(options, registry)

    def make_model(self) -> nn.Module:
        mixture = partial(Mixture, shape=self.shape, registry=self.registry, axes=self.options.experts)
        self.mixtures = MixtureTransformer(self.layers, mixture, *self.size)
        return self.mixtures

    def make_reference(self) -> DenseReference:
        mixture = partial(DenseMixture, shape=self.shape)
        return DenseReference(MixtureTransformer(DenseLayers(), mixture, *self.size), self.whole_loss)

    def whole_loss(self, model: nn.Module, patches: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the dense model."""
        assert isinstance(model, MixtureTransformer)
        loss = F.cross_entropy(model(patches), labels)
        return loss + self.weighed_imbalance(model)

    def forward(self, local: Samples) -> tuple[Tensor, Tensor]:
        loss, accuracy = super().forward(local)
        return loss + self.weighed_imbalance(self.mixtures).to(loss.dtype), accuracy

    def weighed_imbalance(self, model: MixtureTransformer) -> Tensor:
        """Return the loss term of the last forward; it is 0 if all experts are chosen equally often."""
        weighed: Tensor = self.options.balance * (model.routing()[0] - 1)
        return weighed

    def test(self) -> tuple[float, float]:
        measured = super().test()
        self.tested = self.split.mean(self.mixtures.routing()).tolist()
        return measured

    def remarks(self) -> list[str]:
        imbalance, dropped = self.tested
        return [f"experts:     imbalance {imbalance:.3f}, {dropped:.1%} of the choices in the test were dropped"]


def read_options(processes: int, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ValueError: A flag is wrong.
    """
    parser = CommandLine(
        __doc__,
        "data, and the other axes of --experts: shard the batch; tensor: 1-D layers",
    )
    add_training_flags(parser, batch_size=64, lr=3e-3, steps=200)
    add_model_size(parser, width=64)
    add_optimizer(parser)
    add = parser.add_argument
    axes = "axes, or aliases of --topology, over which experts are split (default: all data axes)"
    add("--experts", type=lambda text: tuple(text.split(",")), metavar="AXIS,...", help=axes)
    add("--num-experts", type=int, default=8, metavar="N", help="experts of a mixture (default: %(default)s)")
    add("--top-k", type=int, default=2, metavar="K", help="experts that a token chooses (default: %(default)s)")
    taken = "largest number of tokens per expert and sample, relative to the average (default: %(default)s)"
    add("--capacity", type=float, default=1.25, help=taken)
    balance = "weight in the loss of how unevenly the experts of a sample are chosen (default: %(default)s)"
    add("--balance", type=float, default=0.1, help=balance)
    add("--float64", action="store_true", help="compute in double precision")
    add(
        "--verify",
        action="store_true",
        help="compare the gradient norm of every step with that of the dense model, which computes all experts for all "
        "tokens; in float64, in which both choose the same experts",
    )
    parser.set_defaults(cuda_graph=False, micro_batches=None)  # no CUDA graph: the host reads token counts
    options = parser.read(processes, arguments)
    options.float64 = options.float64 or options.verify
    if options.float64 and options.precision != "fp32":
        raise ValueError(f"--float64 and --verify compute in float64: leave out --precision {options.precision}")
    if not 1 <= options.top_k <= options.num_experts:
        raise ValueError(f"--top-k {options.top_k} is not in 1..{options.num_experts}, the number of experts")
    set_roles(options)
    check_training(options)
    return options


def set_roles(options: argparse.Namespace) -> None:
    """Set ``experts`` to axes of the topology, and give each of them except tensor the role of a data axis."""
    topology: Topology = options.topology
    options.experts = topology.data_axes if options.experts is None else topology.expand_aliases(*options.experts)
    roles: dict[str, Role] = {axis: "data" for axis in options.experts if axis != "tensor"}
    sizes = {axis: topology.size(axis) for axis in topology.axes}
    options.topology = Topology(roles=roles, aliases=topology.aliases, **sizes)


if __name__ == "__main__":
    main(read_options, Trainer, run)
