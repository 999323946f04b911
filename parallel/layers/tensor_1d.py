"""1-D tensor parallelism: linear layers split over one axis, and the layer norm between them.

    [batch, seq, in] --ColumnParallelLinear--> [batch, seq, out/t] --RowParallelLinear--> [batch, seq, in]

Between such pairs activations are replicated over the axis. With ``sequence_parallel=True`` they are split along dim 1,
the sequence of [batch, seq, feature], instead: the column layer gathers it, the row layer scatters it, and whatever
stands between the pairs works on seq/t tokens. What is replicated there has a gradient that is still a sum over the
axis: `LayerNorm1D` and the row layer's bias say so in their spec (``P(partial=axis)``) and the optimizer completes it;
a model's own parameters there need the same spec, or go through `copy_to`.

Reference: Shoeybi et al. 2019, arXiv:1909.08053; sequence parallelism: Korthikanti et al. 2022, arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..layout.annotation import annotate
from ..layout.regions import joined_in_order
from ..layout.shard import shard, spans_of_pieces
from ..layout.spec import P
from ..layout.spec import blocks as in_blocks
from ..mesh.collectives import all_gather_to, copy_to, gather_from, reduce_from, reduce_scatter_to, scatter_to
from ..mesh.registry import ProcessGroupRegistry
from .initialization import draw_linear

SEQUENCE_DIM = 1

Matmul = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _check_sequence(input: Tensor, layer: str) -> None:
    if input.dim() < 3:
        raise ValueError(
            f"{layer} with sequence_parallel=True splits dim {SEQUENCE_DIM}, the sequence of [batch, seq, feature], "
            f"but was given shape {tuple(input.shape)}; add the missing dim"
        )


class _SplitLinear(nn.Module):
    """A linear layer whose weight and bias lie as the specs say; without bias where ``bias_spec`` is None."""

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
    """``input @ weight.T + bias`` with the output features split over one axis of size t.

    Args:
        in_features, out_features: Sizes of the full layer; out_features must divide by t.
        bias: Whether there is one.
        blocks: Several layers in one, each of which is split: a number of equal ones, or the ratio of their sizes, 2 for
            gate and up, (4, 1, 1) for q, k and v with four query heads for each key head. The output then has this rank's
            features of each, ``layer(x).split(layer.block_features, -1)``.
        axis: The mesh axis that splits the layer.
        gather_output: Return all features on every rank, not this rank's. The backward takes that what follows is
            computed alike on every rank.
        sequence_parallel: The input is split along dim 1.
        generator, device, dtype: For the initial weights, which are those of `nn.Linear` for the same seed.

    Shapes:
        input [..., in], replicated; or [batch, seq/t, ..., in] if sequence_parallel.
        output [..., out/t]; or [..., out] if gather_output.
        weight [out/t, in] P(axis, None); bias [out/t] P(axis); with several blocks P(blocks(axis, ...)).
    Collectives: forward none, backward one all-reduce of the input's gradient; if sequence_parallel instead an
    all-gather and a reduce-scatter. gather_output adds an all-gather to forward. Host reads: none.
    Raises:
        ValueError: out_features, or a block of it, doesn't divide by t; a sequence-parallel input has fewer than 3 dims.
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
        """How many of this rank's output features are of which block."""
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
        return joined_in_order(output, -1, spans_of_pieces(self.out_features, 0, self.spec, self.registry.topology))

    def extra_repr(self) -> str:
        sizes = self.spec.block_sizes(self.axis)
        return super().extra_repr() + (f", blocks={sizes}" if len(sizes) > 1 else "")


class RowParallelLinear(_SplitLinear):
    """``input @ weight.T + bias`` with the input features split over one axis of size t.

    Args:
        in_features, out_features: Sizes of the full layer; in_features must divide by t.
        bias: Whether there is one. It is added once, after the sum over the axis.
        axis: The mesh axis that splits the layer.
        input_is_parallel: The input holds this rank's features already, as a column layer returns them; False: it is
            replicated and gets split here.
        sequence_parallel: The output is split along dim 1.
        generator, device, dtype: For the initial weights, which are those of `nn.Linear` for the same seed.

    Shapes:
        input [..., in/t]; or [..., in] if not input_is_parallel.
        output [..., out], replicated; or [batch, seq/t, ..., out] if sequence_parallel.
        weight [out, in/t] P(None, axis); bias [out] P(), or P(partial=axis) if sequence_parallel.
    Collectives: forward one all-reduce, backward none; if sequence_parallel a reduce-scatter and an all-gather.
    Splitting the input adds an all-gather to backward. Host reads: none.
    Raises:
        ValueError: in_features or the sequence doesn't divide by t; a sequence-parallel input has fewer than 3 dims.
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
        output = self.matmul(input, self.weight, None)
        if self.sequence_parallel:
            output = reduce_scatter_to(output, self.registry, self.axis, dim=SEQUENCE_DIM)
        else:
            output = reduce_from(output, self.registry, self.axis)
        # The cast is for autocast, where the output has a lower dtype than the bias.
        return output if self.bias is None else output + self.bias.to(output.dtype)


class LayerNorm1D(nn.LayerNorm):
    """`nn.LayerNorm` that says how its parameters are laid out: replicated over every axis.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: As in `nn.LayerNorm`.
        sequence_parallel: The input is split along the sequence, so that the gradients of weight and bias on each rank
            are terms of a sum over ``axis``: their spec is P(partial=axis), else P().
        axis: The mesh axis of sequence parallelism.

    Collectives: none; the optimizer sums the partial gradients. Host reads: none.
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
