"""3-D tensor parallelism: a cube of ranks, on which activations and weights are split over all three axes.

The axes are named by what is gathered or summed over them in `Linear3D`:

    X W = Y       x = all-gather of the input's pieces over `input`     [batch/weight, in/output]
                  w = all-gather of the weight's pieces over `weight`   [in/output, out/input]
                  reduce-scatter of x @ w over `output`                 [batch/(weight*output), out/input]

So the input has its features split over `output` and its batch over `weight` and `input` (the first is the slower), and
what comes out has its features over `input` and its batch over `weight` and `output`. The next layer takes the two the
other way round; after a pair of layers all is as it was, and what follows a residual or meets the labels is where it began:

    up = Linear3D(64, 256, registry)
    down = Linear3D(256, 64, registry, input="output", output="input")
    local = shard(full, P(("weight", "input"), None, "output"), registry)   # what `up` takes, and `down` gives back

Whatever else meets the features ([features/output]) sees another part of the batch on each rank of the two other axes: its
gradient is a sum over them, which `copy_to(param, registry, "weight", "input")` makes.

Embedding and classifier hold their tables by features only, each piece on the ranks whose `input` is the same as their
`output`: from there it is broadcast over `input`.

Reference: Bian et al. 2021, "Maximizing parallelism in distributed training for huge neural networks", arXiv:2105.14450.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..layout.shard import local_shape
from ..layout.spec import P
from ..mesh.collectives import all_gather_to, broadcast_from, copy_to, reduce_from, reduce_scatter_to
from ..mesh.registry import ProcessGroupRegistry
from .initialization import draw_embedding, draw_linear, held_or_placeholder, kept_piece, owned_piece, sizes_of
from .layer_norm import SplitLayerNorm
from .summa import autocast


class Linear3D(nn.Module):
    """``input @ weight + bias``, all three split over three axes.

    Args:
        in_features, out_features: Sizes of the full layer. What doesn't divide is cut as `torch.chunk` does, but every rank
            must have something.
        bias: Whether there is one.
        input, weight, output: The mesh axes; ``input`` and ``output`` change places from one layer to the next.
        generator, device, dtype: For the initial weights, which are those of `nn.Linear` for the same seed (the weight
            transposed).

    Shapes:
        input [batch/(weight*input), ..., in/output] -> output [batch/(weight*output), ..., out/input].
        weight [in/output/weight, out/input] P((output, weight), input); bias [out/input] P(input), a copy on every rank
        along weight and output, whose gradient backward completes.
        Under autocast the operands are cast to its dtype before they travel. Input and weight are kept for backward as
        gathered: [batch/weight, ..., in/output] and [in/output, out/input].
    Collectives: an all-gather over input and one over weight, and a reduce-scatter over output in forward; the same in
    backward the other way round, and an all-reduce of the bias. Host reads: none.
    Raises:
        ValueError: A dim leaves nothing for some rank; the input doesn't hold in/output features; its gathered batch
            doesn't divide over output.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        registry: ProcessGroupRegistry,
        *,
        bias: bool = True,
        input: str = "input",
        weight: str = "weight",
        output: str = "output",
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.registry = in_features, out_features, registry
        self.input, self.weight_axis, self.output = input, weight, output
        (self._takes,) = local_shape((in_features,), P(output), registry.topology, registry.coordinate)
        full, full_bias = draw_linear(
            in_features, out_features, bias=bias, generator=generator, device=device, dtype=dtype
        )
        self.weight = kept_piece(full.t(), P((output, weight), input), registry)
        self.bias = None if full_bias is None else kept_piece(full_bias, P(input), registry)

    def forward(self, input: Tensor) -> Tensor:
        _check_features(self, input, self._takes, self.output)
        gathered = all_gather_to(autocast(input), self.registry, self.input, dim=0)
        weight = all_gather_to(autocast(self.weight), self.registry, self.weight_axis, dim=0, length=self._takes)
        output = reduce_scatter_to(gathered @ weight, self.registry, self.output, dim=0)
        if self.bias is None:
            return output
        return output + copy_to(self.bias, self.registry, self.weight_axis, self.output).to(output.dtype)

    def extra_repr(self) -> str:
        sizes = sizes_of(self.registry, self.input, self.weight_axis, self.output)
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {sizes}"


class LayerNorm3D(SplitLayerNorm):
    """`nn.LayerNorm` over features that are split over ``output``, for a batch that is split over ``weight`` and ``input``.

    Args:
        features: Size of the full last dim; what doesn't divide is cut as `torch.chunk` does, but every rank must have
            something.
        eps: Added to the variance.
        bias: Whether there is one.
        input, weight, output: The mesh axes, as of the `Linear3D` that takes what comes out.
        device, dtype: Of the parameters, which start at one and zero.

    Shapes:
        input and output [batch/(weight*input), ..., features/output]; the output has the input's dtype, half types are
        computed in fp32. weight, bias [features/output] P(output).
    Collectives: as `LayerNorm2D` with ``output`` for col, and weight and input together for row. Host reads: none.
    Raises:
        ValueError: features leaves nothing for some rank, or the input doesn't hold this rank's.
    """

    def __init__(
        self,
        features: int,
        registry: ProcessGroupRegistry,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        input: str = "input",
        weight: str = "weight",
        output: str = "output",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(features, registry, output, (weight, input), eps, bias, device, dtype)


class DiagonalTable(nn.Module):
    """A table [rows, features] that `Embedding3D` and `Classifier3D` hold where ``input`` is the same as ``output``.

    Args:
        full: The table.
        input, weight, output: The mesh axes.

    Shapes:
        weight [rows, features/output] P(None, output, owned={input: output}), a copy at every coordinate of ``weight``;
        None on the other ranks.
    Raises:
        ValueError: features leaves nothing for some rank; ``output`` is larger than ``input``.
    """

    def __init__(self, full: Tensor, registry: ProcessGroupRegistry, input: str, weight: str, output: str) -> None:
        super().__init__()
        self.registry, self.input, self.weight_axis, self.output = registry, input, weight, output
        self.rows, self.features = full.shape
        (self._takes,) = local_shape((self.features,), P(output), registry.topology, registry.coordinate)
        self.weight = owned_piece(full, P(None, output, owned={input: output}), registry)
        self.register_buffer("_like", full.new_empty(0), persistent=False)  # of the table's dtype and device, always

    def table(self) -> Tensor:
        """[rows, features/output] on every rank; in backward the gradient is summed over ``input``, to the one that holds
        it, and over ``weight``."""
        held = held_or_placeholder(self.weight, self.rows, self._takes, like=self.get_buffer("_like"))
        if self.weight is not None:
            held = copy_to(held, self.registry, self.weight_axis)
        return broadcast_from(held, self.registry, self.input, root=self.registry.coordinate[self.output])


class Embedding3D(DiagonalTable):
    """An embedding table whose features are split over ``output``.

    Args:
        num_embeddings, embedding_dim: Sizes of the full table. Features that don't divide are cut as `torch.chunk` does,
            but every rank must have something.
        input, weight, output: The mesh axes, as of the `Linear3D` that takes what comes out. ``input`` must be as large as
            ``output`` at least.
        generator, device, dtype: For the initial weights, which are those of `nn.Embedding` for the same seed.

    Shapes:
        ids [batch/(weight*input), ...], equal along output -> [batch/(weight*input), ..., embedding_dim/output].
        weight [num_embeddings, embedding_dim/output] P(None, output, owned={input: output}); None where ``input`` is not
        the same as ``output``.
    Collectives: a broadcast over input in forward; in backward a reduce over it and, where the table is, an all-reduce over
    weight. Host reads: none.
    Raises:
        ValueError: embedding_dim leaves nothing for some rank; ``output`` is larger than ``input``.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        registry: ProcessGroupRegistry,
        *,
        input: str = "input",
        weight: str = "weight",
        output: str = "output",
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        full = draw_embedding(num_embeddings, embedding_dim, generator=generator, device=device, dtype=dtype)
        super().__init__(full, registry, input, weight, output)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.table())

    def extra_repr(self) -> str:
        return f"{self.rows}, {self.features}, {sizes_of(self.registry, self.input, self.weight_axis, self.output)}"


class Classifier3D(DiagonalTable):
    """``input @ weight.T + bias`` with all classes on every rank, to which an `Embedding3D` can be tied.

    Args:
        in_features, classes: Sizes of the full layer. Features that don't divide are cut as `torch.chunk` does, but every
            rank must have something.
        bias: Whether there is one.
        input, weight, output: The mesh axes, as of a `Linear3D` in its place. ``input`` must be as large as ``output`` at
            least.
        generator, device, dtype: For the initial weights, which are those of `nn.Linear` for the same seed.

    Shapes:
        input [batch/(weight*input), ..., in/output] -> [batch/(weight*input), ..., classes], equal along output, which
        `cross_entropy_3d` takes.
        weight [classes, in/output] P(None, output, owned={input: output}); None where ``input`` is not the same as
        ``output``. bias [classes] P().
        Under autocast the operands are cast to its dtype.
    Collectives: a broadcast over input and an all-reduce over output in forward; in backward a reduce over input, where the
    weight is an all-reduce over ``weight``, and of the bias one over both. Host reads: none.
    Raises:
        ValueError: in_features leaves nothing for some rank; ``output`` is larger than ``input``; the input doesn't hold
            in/output features.
    """

    def __init__(
        self,
        in_features: int,
        classes: int,
        registry: ProcessGroupRegistry,
        *,
        bias: bool = False,
        input: str = "input",
        weight: str = "weight",
        output: str = "output",
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        full, full_bias = draw_linear(in_features, classes, bias=bias, generator=generator, device=device, dtype=dtype)
        super().__init__(full, registry, input, weight, output)
        self.in_features, self.classes = in_features, classes
        self.bias = None if full_bias is None else kept_piece(full_bias, P(), registry)

    def forward(self, input: Tensor) -> Tensor:
        _check_features(self, input, self._takes, self.output)
        logits = reduce_from(autocast(input) @ autocast(self.table()).t(), self.registry, self.output)
        if self.bias is None:
            return logits
        return logits + copy_to(self.bias, self.registry, self.weight_axis, self.input).to(logits.dtype)

    def extra_repr(self) -> str:
        sizes = sizes_of(self.registry, self.input, self.weight_axis, self.output)
        return f"{self.in_features}, {self.classes}, bias={self.bias is not None}, {sizes}"


def _check_features(layer: Linear3D | Classifier3D, input: Tensor, takes: int, axis: str) -> None:
    if input.shape[-1:] != (takes,) or input.dim() < 2:
        raise ValueError(
            f"{type(layer).__name__} of {layer.in_features} features over {axis}={layer.registry.size(axis)} takes {takes} "
            f"of them in the last dim, and a batch in the first, got shape {tuple(input.shape)}; split a full input with "
            f"scatter_to(input, registry, {axis!r}, dim=-1), and its batch over the two other axes"
        )
