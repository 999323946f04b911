"""1-D tensor parallelism: linear layers sharded over one axis, and the layer norm between them.

    [batch, seq, in] --ColumnParallelLinear--> [batch, seq, out/t] --RowParallelLinear--> [batch, seq, in]

t is the size of the axis. Between such pairs of layers, activations are replicated over the axis.

With ``sequence_parallel=True`` the activations between the pairs are sharded along dim 1 instead, the sequence of
[batch, seq, feature]. The column layer all-gathers the sequence, and the row layer reduce-scatters it. All modules between
the pairs process seq/t tokens per sample, so the gradients of their replicated parameters are partial over the axis: they
must still be summed. `LayerNorm1D` and the row layer's bias declare this in their spec (``P(partial=axis)``), and the
optimizer sums the gradients. Any other parameter that the model uses between the pairs needs the same spec. Or the model
passes the parameter through `copy_to`, which sums the gradient in backward.

References: Shoeybi et al. 2019, arXiv:1909.08053; sequence parallelism: Korthikanti et al. 2022, arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..layout.annotation import annotate
from ..layout.shard import joined_in_order, shard
from ..layout.spec import P
from ..layout.spec import blocks as in_blocks
from ..mesh.collectives import all_gather_to, copy_to, gather_from, reduce_from, reduce_scatter_to, scatter_to
from ..mesh.registry import ProcessGroupRegistry
from .initialization import check_features, draw_linear

SEQUENCE_DIM = 1

Matmul = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _check_sequence(input: Tensor, layer: str) -> None:
    if input.dim() < 3:
        raise ValueError(
            f"{layer} with sequence_parallel=True got an input of shape {tuple(input.shape)}, but needs shape "
            "[batch, seq, feature]; add the missing dim"
        )


class _SplitLinear(nn.Module):
    """Base class of `ColumnParallelLinear` and `RowParallelLinear`: creates weight and bias, sharded and annotated."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        registry: ProcessGroupRegistry,
        axis: str,
        weight_spec: P,
        bias_spec: P | None,
        **drawn: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.registry, self.axis = registry, axis
        registry.create_groups(axis)
        self.matmul: Matmul = F.linear
        weight, bias = draw_linear(in_features, out_features, bias=bias_spec is not None, **drawn)
        self.weight = nn.Parameter(shard(weight, weight_spec, registry))
        annotate(self.weight, weight_spec)
        self.bias: nn.Parameter | None = None
        if bias is not None and bias_spec is not None:
            self.bias = nn.Parameter(shard(bias, bias_spec, registry))
            annotate(self.bias, bias_spec)

    def extra_repr(self) -> str:
        size = self.registry.size(self.axis)
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.axis}={size}"


class ColumnParallelLinear(_SplitLinear):
    """Linear layer ``input @ weight.T + bias`` whose output features are sharded over an axis of size t.

        up = ColumnParallelLinear(512, 2048, registry)

    Args:
        in_features, out_features: Sizes of the full layer; out_features must be divisible by t.
        registry: The process groups.
        bias: If True, the layer has a bias. Default: True.
        blocks: Number of equal layers that are fused in this layer, or the ratio of their output features. Each fused layer
            is sharded separately. Examples: 2 for gate and up; (4, 1, 1) for q, k and v with four query heads per key head.
            Split the output with ``layer(x).split(layer.block_features, -1)``. Default: 1.
        axis: The mesh axis that shards the layer. Default: "tensor".
        gather_output: If True, the output has all features on every rank. All ranks must then do the same computation with
            the output, because backward keeps only this rank's slice of the gradient. Default: False.
        sequence_parallel: If True, the input is sharded over the axis along dim 1, the sequence. Default: False.
        generator, device, dtype: Random generator, device and dtype of the initial weights, which equal the weights of
            `nn.Linear` with the same seed. Default None: torch's defaults.

    Shapes:
        input [..., in], replicated; or [batch, seq/t, ..., in] with sequence_parallel.
        output [..., out/t]; or [..., out] with gather_output.
        weight [out/t, in] P(axis, None); bias [out/t] P(axis). With several blocks, blocks(axis, ...) replaces axis.
    Raises:
        ValueError: out_features, or the size of a fused layer, is not divisible by t; ``blocks`` or the axis is not valid;
            or a sequence-parallel input has fewer than 3 dims.
    Collectives: none in forward, an all-reduce of the input gradient in backward. With sequence_parallel an all-gather
    in forward and a reduce-scatter in backward instead. gather_output adds an all-gather in forward.
    Host synchronization: none.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        registry: ProcessGroupRegistry,
        *,
        bias: bool = True,
        blocks: int | Sequence[int] = 1,
        axis: str = "tensor",
        gather_output: bool = False,
        sequence_parallel: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        drawn: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
        spec = P(in_blocks(axis, blocks))
        super().__init__(in_features, out_features, registry, axis, spec, spec if bias else None, **drawn)
        self.spec = spec
        self.gather_output, self.sequence_parallel = gather_output, sequence_parallel

    @property
    def block_features(self) -> tuple[int, ...]:
        """Return for each fused layer its number of output features on this rank."""
        sizes = self.spec.block_sizes(self.axis)
        return tuple(self.weight.size(0) // sum(sizes) * size for size in sizes)

    def forward(self, input: Tensor) -> Tensor:
        if self.sequence_parallel:
            _check_sequence(input, "ColumnParallelLinear")
            input = all_gather_to(input, self.registry, self.axis, dim=SEQUENCE_DIM)
        else:
            input = copy_to(input, self.registry, self.axis)
        output = self.matmul(input, self.weight, self.bias)
        if not self.gather_output:
            return output
        output = gather_from(output, self.registry, self.axis, dim=-1)
        return joined_in_order(output, self.spec, self.registry.topology)

    def extra_repr(self) -> str:
        sizes = self.spec.block_sizes(self.axis)
        return super().extra_repr() + (f", blocks={sizes}" if len(sizes) > 1 else "")


class RowParallelLinear(_SplitLinear):
    """Linear layer ``input @ weight.T + bias`` whose input features are sharded over an axis of size t.

        down = RowParallelLinear(2048, 512, registry)

    Args:
        in_features, out_features: Sizes of the full layer; in_features must be divisible by t.
        registry: The process groups.
        bias: If True, the layer has a bias. It is added after the products of all ranks are summed. Default: True.
        axis: The mesh axis that shards the layer. Default: "tensor".
        input_is_parallel: If True, the input has only this rank's features, as `ColumnParallelLinear` returns them. If
            False, the input has all features on every rank, and the layer takes this rank's slice. Default: True.
        sequence_parallel: If True, the output is sharded over the axis along dim 1, the sequence. Default: False.
        generator, device, dtype: Random generator, device and dtype of the initial weights, which equal the weights of
            `nn.Linear` with the same seed. Default None: torch's defaults.

    Shapes:
        input [..., in/t]; or [..., in] with input_is_parallel=False.
        output [..., out], replicated; or [batch, seq/t, ..., out] with sequence_parallel.
        weight [out, in/t] P(None, axis); bias [out] P(), or P(partial=axis) with sequence_parallel.
    Raises:
        ValueError: in_features or the sequence is not divisible by t; the axis is unknown; the last dim of the input is
            not in/t; or a sequence-parallel input has fewer than 3 dims.
    Collectives: an all-reduce in forward, none in backward. With sequence_parallel a reduce-scatter in forward and an
    all-gather in backward instead. input_is_parallel=False adds an all-gather in backward.
    Host synchronization: none.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        registry: ProcessGroupRegistry,
        *,
        bias: bool = True,
        axis: str = "tensor",
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        drawn: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
        bias_spec = None if not bias else P(partial=axis) if sequence_parallel else P()
        super().__init__(in_features, out_features, registry, axis, P(None, axis), bias_spec, **drawn)
        self.input_is_parallel, self.sequence_parallel = input_is_parallel, sequence_parallel

    def forward(self, input: Tensor) -> Tensor:
        if self.sequence_parallel:
            _check_sequence(input, "RowParallelLinear")
        if not self.input_is_parallel:
            input = scatter_to(input, self.registry, self.axis, dim=-1)
        else:
            advice = ", or give the layer input_is_parallel=False"
            check_features(self, input, self.in_features, self.weight.size(1), self.axis, self.registry, advice)
        output = self.matmul(input, self.weight, None)
        if self.sequence_parallel:
            output = reduce_scatter_to(output, self.registry, self.axis, dim=SEQUENCE_DIM)
        else:
            output = reduce_from(output, self.registry, self.axis)
        # The bias is cast, because under autocast the output has a lower precision than a float32 bias.
        return output if self.bias is None else output + self.bias.to(output.dtype)


class LayerNorm1D(nn.LayerNorm):
    """`nn.LayerNorm` whose weight and bias are declared replicated (``P()``), for use with sequence parallelism.

        norm = LayerNorm1D(512, sequence_parallel=True)

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: As in `nn.LayerNorm`, with the same defaults.
        sequence_parallel: If True, the input is sharded over ``axis`` along the sequence. The gradients of weight and bias
            are then partial over ``axis``, and their spec is P(partial=axis) instead of P(). Default: False.
        axis: The mesh axis of sequence parallelism. Default: "tensor".

    Collectives: none; the optimizer sums the partial gradients. Host synchronization: none.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        *,
        sequence_parallel: bool = False,
        axis: str = "tensor",
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        for param in self.parameters():
            annotate(param, P(partial=axis) if sequence_parallel else P())
