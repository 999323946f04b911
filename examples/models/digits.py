"""The vision transformer for scikit-learn's digits, and the dense one beside it that says what the norm must be."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from meshstep.parallel import Linear2D, Linear3D, P, ProcessGroupRegistry, gather_objects, spec_of, unshard
from torch import Tensor, nn

from .layers import DenseLayers
from .vit import PatchTransformer

TOKENS, PIXELS, CLASSES = 16, 4, 10  # a digit is 8 x 8 pixels: 16 patches of 2 x 2


class DigitsTransformer(PatchTransformer):
    """The one for scikit-learn's digits."""

    def __init__(self, layers: DenseLayers, width: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__(layers, PIXELS, TOKENS, CLASSES, width, heads, depth)


def full_parameters(model: nn.Module, registry: ProcessGroupRegistry) -> dict[str, Tensor]:
    """The full parameters on every rank, by name and as the dense model has them. All ranks must call."""
    held = dict(model.named_parameters())
    specs: dict[str, P] = {}
    for found in gather_objects({name: spec_of(param) for name, param in held.items()}, registry):
        specs |= found  # a rank may lack parameters that others own
    full = {name: unshard(held.get(name), spec, registry) for name, spec in specs.items()}
    for name, module in model.named_modules():
        if isinstance(module, Linear2D | Linear3D):  # their weight is [in, out], that of `nn.Linear` is [out, in]
            full[f"{name}.weight"] = full[f"{name}.weight"].t()
    return full


class DenseReference:
    """The same model on one rank, dense, in float64: says what the global gradient norm must be."""

    def __init__(self) -> None:
        self.model = DigitsTransformer(DenseLayers()).double()

    def gradient_norm(self, parameters: Mapping[str, Tensor], patches: Tensor, labels: Tensor) -> float:
        """The 2-norm of the loss' gradient at these full parameters, for the full batch."""
        self.model.load_state_dict(parameters)
        loss = F.cross_entropy(self.model(patches.double()), labels)
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        return float(torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients])))
