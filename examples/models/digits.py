"""Vision transformers for scikit-learn's digits, and a dense reference model for the exact gradient norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from meshstep.parallel import Linear2D, Linear3D, ProcessGroupRegistry, join, spec_of
from torch import Tensor, nn

from .layers import DenseLayers
from .moe import Mixture, MixtureBlock
from .vit import PatchTransformer

TOKENS, PIXELS, CLASSES = 16, 4, 10  # a digit is 8 x 8 pixels: 16 patches of 2 x 2


class DigitsTransformer(PatchTransformer):
    """A vision transformer for scikit-learn's digits."""

    def __init__(self, layers: DenseLayers, width: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__(layers, PIXELS, TOKENS, CLASSES, width, heads, depth)


class MixtureTransformer(PatchTransformer):
    """A vision transformer for scikit-learn's digits with mixtures of experts.

    Args:
        mixture: Returns the mixture of experts of a block, given the width and the family of layers.
    """

    def __init__(
        self,
        layers: DenseLayers,
        mixture: Callable[[int, DenseLayers], Mixture],
        width: int = 64,
        heads: int = 4,
        depth: int = 2,
    ) -> None:
        def block(width: int, heads: int, layers: DenseLayers) -> MixtureBlock:
            return MixtureBlock(width, heads, layers, mixture(width, layers))

        super().__init__(layers, PIXELS, TOKENS, CLASSES, width, heads, depth, block)

    def routing(self) -> Tensor:
        """Return a tensor [2]: the router's imbalance, and the fraction of dropped choices, in the last forward.

        Both are averaged over mixtures and this rank's samples. The imbalance is 1 if the router chooses all experts
        equally often.
        """
        mixtures = [module for module in self.modules() if isinstance(module, Mixture)]
        return torch.stack([torch.stack([m.imbalance, m.dropped.to(m.imbalance)]) for m in mixtures]).mean(0)


def full_parameters(model: nn.Module, registry: ProcessGroupRegistry) -> dict[str, Tensor] | None:
    """Return the full parameters of the dense model by name, on the CPU of rank 0; None on other ranks.

    Call it on all ranks.
    """
    held = {name: (spec_of(param), param.detach().cpu()) for name, param in model.named_parameters()}
    everybody: list[Any] = [held] * registry.topology.world_size
    if len(everybody) > 1:
        dist.gather_object(held, everybody if registry.global_rank == 0 else None)
    if registry.global_rank != 0:
        return None
    # The specs come from all ranks, because a rank may lack some parameters.
    specs = {name: spec for of_rank in everybody for name, (spec, _) in of_rank.items()}
    full = {
        name: join([of_rank[name][1] if name in of_rank else None for of_rank in everybody], spec, registry.topology)
        for name, spec in specs.items()
    }
    for name, module in model.named_modules():
        if isinstance(module, Linear2D | Linear3D):  # their weights are [in, out]; `nn.Linear` needs [out, in]
            full[f"{name}.weight"] = full[f"{name}.weight"].t()
    return full


class DenseReference:
    """A dense model on one rank in float64, which computes the exact global gradient norm.

    Args:
        model: Model with the parameters of `full_parameters`.
        loss: Function of model, patches and labels.
    """

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        self.model, self.loss = model.double(), loss

    def gradient_norm(self, parameters: Mapping[str, Tensor], patches: Tensor, labels: Tensor) -> float:
        """Return the 2-norm of the gradient of the loss for full parameters and the full batch."""
        self.model.load_state_dict(parameters)
        loss = self.loss(self.model, patches.double(), labels)
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        return float(torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients])))
