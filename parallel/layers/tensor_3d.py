"""3-D tensor parallelism: a cube of ranks, on which activations and weights are sharded over all three mesh axes.

The mesh axes are `input`, `weight` and `output`. `Linear3D` computes Y = X W. Over each axis it gathers or reduces one
tensor, and the axis is named after this tensor:

    x = all-gather of this rank's shard of X over `input`     [batch/weight, in/output]
    w = all-gather of this rank's shard of W over `weight`    [in/output, out/input]
    y = reduce-scatter of x @ w over `output`                 [batch/(weight*output), out/input]

In shapes, the name of an axis means its size. X has its features sharded over `output`, and its batch over `weight` (the
slower axis) and `input`. Y has its features sharded over `input`, and its batch over `weight` and `output`. In the next
layer the axes `input` and `output` are exchanged. The output of two such layers therefore has the layout of their input, as
residual connections and labels require:

    up = Linear3D(64, 256, registry)
    down = Linear3D(256, 64, registry, input="output", output="input")
    local = shard(full, P(("weight", "input"), None, "output"), registry)   # the input of `up`, and the output of `down`

A parameter of your own that is combined with the features of X has shape [features/output]. Ranks along `weight` and
`input` have different parts of the batch, so the gradient of such a parameter must be summed over these axes.
`copy_to(param, registry, "weight", "input")` makes this sum in backward.

`Embedding3D` and `Classifier3D` shard their weights by features only, over `output`. A shard is stored on the ranks whose
coordinates on `input` and `output` are equal, and is broadcast over `input` in forward.

Reference: Bian et al. 2021, "Maximizing parallelism in distributed training for huge neural networks",
arXiv:2105.14450.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..layout.shard import local_shape
from ..layout.spec import P
from ..mesh.collectives import all_gather_to, broadcast_from, copy_to, reduce_from, reduce_scatter_to
from ..mesh.registry import ProcessGroupRegistry
from .initialization import (
    check_features,
    draw_embedding,
    draw_linear,
    held_or_placeholder,
    keep_owned_shard,
    keep_shard,
    sizes_of,
)
from .layer_norm import SplitLayerNorm
from .summa import autocast


class Linear3D(nn.Module):
    """Linear layer ``input @ weight + bias``, with input, weight and output sharded over three axes.

        up = Linear3D(64, 256, registry)
        down = Linear3D(256, 64, registry, input="output", output="input")

    Args:
        in_features, out_features: Sizes of the full layer. Sizes that are not multiples of the axes' sizes are sharded as
            `torch.chunk` does, but every rank must get at least one row and column of the weight.
        registry: The process groups.
        bias: If True, the layer has a bias. Default: True.
        input, weight, output: The mesh axes. Exchange ``input`` and ``output`` in every second layer, as in the example.
            Defaults: "input", "weight", "output".
        generator, device, dtype: Random generator, device and dtype of the initial weights, which equal the weights of
            `nn.Linear` with the same seed, with the weight matrix transposed. Default None: torch's defaults.

    Shapes, in which the name of a mesh axis means its size:
        input [batch/(weight*input), ..., in/output] -> output [batch/(weight*output), ..., out/input].
        weight [in/output/weight, out/input] P((output, weight), input); bias [out/input] P(input), replicated over
            weight and output. Backward sums the gradient of the bias over these axes.
        Under autocast the operands are cast to the autocast dtype before they are gathered. The gathered input
            [batch/weight, ..., in/output] and weight [in/output, out/input] are saved for backward.
    Raises:
        ValueError: A rank would get no elements of a parameter; an axis is unknown; the input has fewer than 2 dims, or not
            in/output features; or the gathered batch is not divisible by the size of output.
    Collectives: in forward an all-gather over input, an all-gather over weight, and a reduce-scatter over output. In
    backward a reduce-scatter over input, a reduce-scatter over weight, an all-gather over output, and for the bias an
    all-reduce over weight and output.
    Host synchronization: none.
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
        (self._local_features,) = local_shape((in_features,), P(output), registry.topology, registry.coordinate)
        full, full_bias = draw_linear(
            in_features, out_features, bias=bias, generator=generator, device=device, dtype=dtype
        )
        self.weight = keep_shard(full.t(), P((output, weight), input), registry)
        self.bias = None if full_bias is None else keep_shard(full_bias, P(input), registry)

    def forward(self, input: Tensor) -> Tensor:
        _check_input(self, input, self._local_features, self.output)
        gathered = all_gather_to(autocast(input), self.registry, self.input, dim=0)
        weight = all_gather_to(
            autocast(self.weight), self.registry, self.weight_axis, dim=0, length=self._local_features
        )
        output = reduce_scatter_to(gathered @ weight, self.registry, self.output, dim=0)
        if self.bias is None:
            return output
        return output + copy_to(self.bias, self.registry, self.weight_axis, self.output).to(output.dtype)

    def extra_repr(self) -> str:
        sizes = sizes_of(self.registry, self.input, self.weight_axis, self.output)
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {sizes}"


class LayerNorm3D(SplitLayerNorm):
    """`nn.LayerNorm` over features that are sharded over ``output``, for a batch sharded over ``weight`` and ``input``.

        norm = LayerNorm3D(64, registry)

    Args:
        features: Size of the full last dim. If it is not a multiple of the size of ``output``, it is sharded as
            `torch.chunk` does, but every rank must get at least one feature.
        registry: The process groups.
        eps: Added to the variance. Default: 1e-5.
        bias: If True, the layer has a bias. Default: True.
        input, weight, output: The mesh axes, as in the `Linear3D` that follows. Defaults: "input", "weight", "output".
        device, dtype: Device and dtype of weight and bias, whose initial values are one and zero. Default None: torch's
            defaults.

    Shapes, in which the name of a mesh axis means its size:
        input and output [batch/(weight*input), ..., features/output]. The output has the input's dtype; half precision
            is computed in float32. weight, bias [features/output] P(output).
    Raises:
        ValueError: A rank would get no features, an axis is unknown, or the last dim of the input is not features/output.
    Collectives: in forward an all-gather over output of the mean and variance of each rank's features; or two all-reduces,
    if the number of features is not divisible by the size of output. In backward an all-reduce over output of two means,
    and an all-reduce over weight and input of the gradients of weight and bias.
    Host synchronization: none.
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
    """Base class of `Embedding3D` and `Classifier3D`: a table [rows, features] whose features are sharded over ``output``.

    A shard is stored on the ranks whose coordinates on ``input`` and ``output`` are equal, and is replicated over the axis
    ``weight``. The attribute ``weight`` [rows, features/output] is None on other ranks. Its spec is
    P(None, output, owned={input: output}).

    Raises:
        ValueError: A rank would get no features, the axis ``output`` is larger than the axis ``input``, or an axis is
            unknown.
    """

    def __init__(self, full: Tensor, registry: ProcessGroupRegistry, input: str, weight: str, output: str) -> None:
        super().__init__()
        self.registry, self.input, self.weight_axis, self.output = registry, input, weight, output
        self.rows, self.features = full.shape
        registry.size(weight)  # raises if the axis is unknown; otherwise only ranks that store a shard would raise
        (self._local_features,) = local_shape((self.features,), P(output), registry.topology, registry.coordinate)
        self.weight = keep_owned_shard(full, P(None, output, owned={input: output}), registry)
        # The empty tensor is a buffer, because module.to() moves and casts buffers.
        self.register_buffer("_like", full.new_empty(0), persistent=False)

    def table(self) -> Tensor:
        """Return the shard [rows, features/output] for this rank's coordinate on ``output``, on every rank.

        Collectives: a broadcast over input in forward. In backward a reduce of the gradient over input to the rank that
        stores the shard, and an all-reduce over weight on ranks that store the shard.
        """
        held = held_or_placeholder(self.weight, self.rows, self._local_features, like=self.get_buffer("_like"))
        if self.weight is not None:
            held = copy_to(held, self.registry, self.weight_axis)
        return broadcast_from(held, self.registry, self.input, root=self.registry.coordinate[self.output])


class Embedding3D(DiagonalTable):
    """Embedding table whose features are sharded over ``output``.

        embedding = Embedding3D(32000, 64, registry)

    Args:
        num_embeddings, embedding_dim: Sizes of the full table. If ``embedding_dim`` is not a multiple of the size of
            ``output``, it is sharded as `torch.chunk` does, but every rank must get at least one feature.
        registry: The process groups.
        input, weight, output: The mesh axes, as in the `Linear3D` that follows. ``input`` must be at least as large as
            ``output``. Defaults: "input", "weight", "output".
        generator, device, dtype: Random generator, device and dtype of the initial weights, which equal the weights of
            `nn.Embedding` with the same seed. Default None: torch's defaults.

    Shapes, in which the name of a mesh axis means its size:
        ids [batch/(weight*input), ...], replicated over output -> [batch/(weight*input), ..., embedding_dim/output].
        weight [num_embeddings, embedding_dim/output] P(None, output, owned={input: output}). The attribute is None on
            ranks whose coordinates on ``input`` and ``output`` differ.
    Raises:
        ValueError: A rank would get no features, the axis ``output`` is larger than the axis ``input``, or an axis is
            unknown.
        IndexError: An id is out of range (on CPU; a device assertion on CUDA).
    Collectives: in forward a broadcast over input. In backward a reduce over input, and an all-reduce over weight on
    ranks that store the weight.
    Host synchronization: none.
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
    """Linear layer ``input @ weight.T + bias`` that returns all classes on every rank.

    Its weight has the layout of an `Embedding3D` weight, so the two weights can be tied.

        head = Classifier3D(64, 32000, registry)
        loss = cross_entropy_3d(head(hidden), target, registry)

    Args:
        in_features, classes: Sizes of the full layer. If ``in_features`` is not a multiple of the size of ``output``, it is
            sharded as `torch.chunk` does, but every rank must get at least one feature.
        registry: The process groups.
        bias: If True, the layer has a bias. Default: False.
        input, weight, output: The mesh axes, as in a `Linear3D` with the same input. ``input`` must be at least as large
            as ``output``. Defaults: "input", "weight", "output".
        generator, device, dtype: Random generator, device and dtype of the initial weights, which equal the weights of
            `nn.Linear` with the same seed. Default None: torch's defaults.

    Shapes, in which the name of a mesh axis means its size:
        input [batch/(weight*input), ..., in/output] -> [batch/(weight*input), ..., classes], replicated over output, as
            `cross_entropy_3d` expects.
        weight [classes, in/output] P(None, output, owned={input: output}). The attribute is None on ranks whose
            coordinates on ``input`` and ``output`` differ. bias [classes] P().
        Under autocast the operands are cast to the autocast dtype.
    Raises:
        ValueError: A rank would get no features; the axis ``output`` is larger than the axis ``input``; an axis is unknown;
            or the input has fewer than 2 dims, or not in/output features.
    Collectives: in forward a broadcast over input and an all-reduce over output. In backward a reduce over input, an
    all-reduce over weight on ranks that store the weight, and for the bias an all-reduce over weight and input.
    Host synchronization: none.
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
        self.bias = None if full_bias is None else keep_shard(full_bias, P(), registry)

    def forward(self, input: Tensor) -> Tensor:
        _check_input(self, input, self._local_features, self.output)
        logits = reduce_from(autocast(input) @ autocast(self.table()).t(), self.registry, self.output)
        if self.bias is None:
            return logits
        return logits + copy_to(self.bias, self.registry, self.weight_axis, self.input).to(logits.dtype)

    def extra_repr(self) -> str:
        sizes = sizes_of(self.registry, self.input, self.weight_axis, self.output)
        return f"{self.in_features}, {self.classes}, bias={self.bias is not None}, {sizes}"


def _check_input(layer: Linear3D | Classifier3D, input: Tensor, local_in: int, axis: str) -> None:
    if input.dim() < 2:
        raise ValueError(
            f"the input of {type(layer).__name__} has shape {tuple(input.shape)}, but needs a batch as its first dim; add "
            "the missing dim"
        )
    advice = ", and its batch over the two other axes"
    check_features(layer, input, layer.in_features, local_in, axis, layer.registry, advice)
