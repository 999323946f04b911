"""torchvision's ResNet-34 on a mesh: residual blocks sharded over `tensor`, batch norm over the full batch.

    block:  x -> conv1 -> bn1 -> relu -> conv2 -> bn2 -> + x

    conv1.weight [out, in, 3, 3]   P("tensor")        each rank computes some of the channels,
    bn1.* [out]                    P("tensor")        normalises them,
    conv2.weight [out, in, 3, 3]   P(None, "tensor")  and computes its partial sums of all output channels
    others                         P()

With the same seed, every topology draws the same full weights.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from meshstep.parallel import P, ProcessGroupRegistry, annotate, copy_to, declare, reduce_from, shard
from torch import Tensor, nn
from torchvision.models import resnet34
from torchvision.models.resnet import BasicBlock


class WholeBatchNorm2d(nn.BatchNorm2d):
    """Batch norm over the samples of all data ranks, so that results do not depend on how the batch is sharded.

    Unlike torch's SyncBatchNorm, it also runs on a CPU. Statistics are summed in float64.
    """

    def __init__(self, features: int, registry: ProcessGroupRegistry) -> None:
        super().__init__(features)
        self.registry = registry

    def forward(self, input: Tensor) -> Tensor:
        axes = self.registry.topology.data_axes
        if not self.training or not axes or self.registry.size(*axes) == 1:
            return super().forward(input)
        assert self.weight is not None
        assert self.bias is not None
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        mean, variance = self._moments(wide, axes)
        scale = self.weight * (variance + self.eps).rsqrt()
        shift = self.bias - mean * scale
        return torch.addcmul(shift.view(-1, 1, 1), wide, scale.view(-1, 1, 1)).to(input.dtype)

    def _moments(self, input: Tensor, axes: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Return mean and (biased) variance [features] of the full batch, and update the running statistics."""
        variance, mean = torch.var_mean(input, (0, 2, 3), correction=0)
        count = input.numel() / input.size(1)
        sums = torch.cat([mean, variance + mean.square(), mean.new_ones(1)]).double() * count
        # `copy_to` sums their gradients in backward, because the losses of all data ranks depend on these statistics.
        sums = copy_to(reduce_from(sums, self.registry, *axes), self.registry, *axes)
        total = sums[-1]
        mean, square = (sums[:-1] / total).chunk(2)
        variance = square - mean.square()
        with torch.no_grad():
            for running, now in ((self.running_mean, mean), (self.running_var, variance * (total / (total - 1)))):
                assert running is not None
                assert self.momentum is not None
                running.lerp_(now.to(running.dtype), self.momentum)
        return mean.to(input.dtype), variance.to(input.dtype)


def make_resnet34(classes: int, registry: ProcessGroupRegistry, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a ResNet-34, which maps images [batch, 3, height, width] of a data rank to logits [batch, classes].

    Raises:
        ValueError: The topology has an axis other than tensor and the data axes.
    """
    strange = [axis for axis in registry.topology.axes if axis not in ("tensor", *registry.topology.data_axes)]
    if strange:
        raise ValueError(f"ResNet-34 can't be sharded over {strange[0]!r}: give axes named data, replica or tensor")
    # Initially residual blocks add zero (Goyal et al. 2017, arXiv:1706.02677).
    norm_layer = partial(WholeBatchNorm2d, registry=registry)
    model: nn.Module = resnet34(num_classes=classes, norm_layer=norm_layer, zero_init_residual=True).to(dtype)
    if "tensor" in registry.topology.axes:
        for module in model.modules():
            if isinstance(module, BasicBlock):
                split_block(module, registry)
    declare(model, {"*": P()})
    return model


def split_block(block: BasicBlock, registry: ProcessGroupRegistry) -> None:
    """Shard a residual block over `tensor`, with the collectives for its input and output."""
    keep_shard(block.conv1, P("tensor"), registry)
    keep_shard(block.bn1, P("tensor"), registry)
    keep_shard(block.conv2, P(None, "tensor"), registry)

    def copy_input(module: nn.Module, args: tuple[Any, ...]) -> Tensor:
        return copy_to(args[0], registry, "tensor")

    def add_up_output(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return reduce_from(output, registry, "tensor")

    block.conv1.register_forward_pre_hook(copy_input)
    block.conv2.register_forward_hook(add_up_output)


def keep_shard(module: nn.Module, spec: P, registry: ProcessGroupRegistry) -> None:
    """Replace the parameters and vector buffers of ``module`` by this rank's shards, and declare their specs."""
    for name, param in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(shard(param.detach(), spec, registry)))
        annotate(module.get_parameter(name), spec)
    for name, buffer in list(module.named_buffers()):
        if buffer.dim():
            setattr(module, name, shard(buffer, spec, registry))
            annotate(module.get_buffer(name), spec)
