"""A mixture of experts, sharded over any axes of a mesh, instead of the feed-forward layers of a block.

    x [sample, token, feature]
      -> router       a score of every expert; each token chooses the k best
      -> capacity     an expert takes a limited number of tokens per sample, first choices first; other choices are dropped
      -> all-to-all   each choice to the rank that holds its expert
      -> experts      two linear layers each
      -> all-to-all   back, times the score, summed over a token's choices
      + shared        an expert of all tokens: a pair of dense layers

Capacities are counted per sample (the groups of GShard, arXiv:2006.16668), so results do not depend on how the batch is
sharded. Experts are sharded over `axes`. Along axes whose ranks see the same samples, such as `tensor`, each rank sends its
part of the tokens. If `tensor` is not among the axes, each expert is sharded over it.

    router.weight [expert, feature]       P()
    up [expert, feature, hidden]          P(axes, None, "tensor")
    up_bias [expert, hidden]              P(axes, "tensor")
    down [expert, hidden, feature]        P(axes, "tensor")
    down_bias [expert, feature]           P(axes)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from meshstep.parallel import (
    P,
    ProcessGroupRegistry,
    all_to_all,
    annotate,
    copy_to,
    gather_from,
    reduce_from,
    scatter_to,
    shard,
)
from torch import Tensor, nn

from .layers import DenseLayers
from .vit import Attention


@dataclass(frozen=True)
class MixtureShape:
    """Sizes of a mixture of experts.

    Attributes:
        experts: Number of experts.
        top_k: Number of experts that a token chooses.
        capacity: Largest number of tokens per expert and sample, relative to the average number.
    """

    experts: int = 8
    top_k: int = 2
    capacity: float = 1.25

    def tokens_taken(self, tokens: int) -> int:
        """Return the largest number of tokens of a sample that an expert takes."""
        return max(1, round(self.capacity * self.top_k * tokens / self.experts))


class Routing(NamedTuple):
    """Result of the router.

    Attributes:
        experts: The chosen experts [sample, token, choice].
        scores: Their scores; 0 for a dropped choice.
        taken: False for a dropped choice.
        imbalance: 0-dim; 1 if all experts are chosen equally often.
    """

    experts: Tensor
    scores: Tensor
    taken: Tensor
    imbalance: Tensor


class Router(nn.Module):
    """Replicated linear layer that chooses experts for each token. Ranks with the same tokens choose the same experts."""

    def __init__(self, width: int, shape: MixtureShape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.randn(shape.experts, width) * width**-0.5)
        annotate(self.weight, P())

    def forward(self, x: Tensor) -> Routing:
        probabilities = F.linear(x, self.weight.to(x.dtype)).softmax(-1)
        scores, experts = probabilities.topk(self.shape.top_k)
        # The first choices of all tokens come before the second choices.
        chosen = F.one_hot(rearrange(experts, "sample token choice -> sample (choice token)"), self.shape.experts)
        place = (chosen.cumsum(1) * chosen).sum(-1)
        taken = rearrange(place, "sample (choice token) -> sample token choice", token=x.size(1))
        taken = taken <= self.shape.tokens_taken(x.size(1))
        shares = chosen.to(x.dtype).mean(1), probabilities.mean(1)
        imbalance = self.shape.experts * (shares[0] * shares[1]).sum(-1).mean()
        return Routing(experts, scores * taken, taken, imbalance)


class Experts(nn.Module):
    """The experts of this rank.

    Raises:
        ValueError: The experts do not divide over the axes.
    """

    up: nn.Parameter
    up_bias: nn.Parameter
    down: nn.Parameter
    down_bias: nn.Parameter

    def __init__(
        self, width: int, hidden: int, experts: int, registry: ProcessGroupRegistry | None, axes: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.registry = registry
        self.inner = tuple(axis for axis in model_axes(registry) if axis == "tensor" and axis not in axes)
        full = {
            "up": (torch.randn(experts, width, hidden) * width**-0.5, P(axes, None, self.inner)),
            "up_bias": (torch.zeros(experts, hidden), P(axes, self.inner)),
            "down": (torch.randn(experts, hidden, width) * hidden**-0.5, P(axes, self.inner)),
            "down_bias": (torch.zeros(experts, width), P(axes)),
        }
        for name, (weight, spec) in full.items():
            piece = weight if registry is None else shard(weight, spec, registry)
            self.register_parameter(name, nn.Parameter(piece))
            annotate(self.get_parameter(name), spec)

    def forward(self, tokens: Tensor, counts: list[int]) -> Tensor:
        """Apply the experts to tokens [token, feature], which are ordered by expert.

        ``counts`` has the number of tokens per expert. An expert without tokens gets an empty tensor, so its gradient is
        zero and not None.
        """
        if self.registry is not None and self.inner:
            tokens = copy_to(tokens, self.registry, *self.inner)
        weights = self.up.unbind(), self.up_bias.unbind(), self.down.unbind()
        parts = [
            F.gelu(part @ up + bias) @ down for part, up, bias, down in zip(tokens.split(counts), *weights, strict=True)
        ]
        y = torch.cat(parts)
        if self.registry is not None and self.inner:
            y = reduce_from(y, self.registry, *self.inner)
        biases = [bias.expand(count, -1) for bias, count in zip(self.down_bias.unbind(), counts, strict=True)]
        return y + torch.cat(biases)


def model_axes(registry: ProcessGroupRegistry | None) -> tuple[str, ...]:
    """Return the model axes, along which ranks have the same tokens; () if ``registry`` is None."""
    return () if registry is None else registry.topology.model_axes


class Mixture(nn.Module):
    """Mixture of experts: maps x [sample, token, feature] to the sum of the outputs of experts, in the shape of x.

    The sum of a token contains the outputs of its chosen experts, times their scores, and the output of a shared expert.

    Args:
        layers: Family of layers for the shared expert.
        registry: The process groups. Default None: a single process.
        axes: The axes that shard the experts. Default (): every rank has all experts.
    """

    def __init__(
        self,
        width: int,
        layers: DenseLayers,
        shape: MixtureShape,
        registry: ProcessGroupRegistry | None = None,
        axes: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        # Sorted like the topology's axes, because the ranks of a process group, and so the experts, have this order.
        self.axes = axes = tuple(axis for axis in registry.topology.axes if axis in axes) if registry else ()
        self.registry, self.shape = registry, shape
        self.router = Router(width, shape)
        self.experts = Experts(width, 2 * width, shape.experts, registry, axes)
        self.shared_up = layers.first_linear(width, 2 * width)
        self.shared_down = layers.second_linear(2 * width, width)
        # Ranks along these axes have the same tokens, so each rank sends only a part of them to experts.
        self.alike = tuple(axis for axis in model_axes(registry) if axis in axes)
        self.imbalance = self.dropped = torch.zeros(())  # means over this rank's samples in the last forward

    def forward(self, x: Tensor) -> Tensor:
        routing = self.router(x)
        self.imbalance, self.dropped = routing.imbalance, 1 - routing.taken.double().mean()
        y: Tensor = self.shared_down(F.gelu(self.shared_up(x)))
        return y + self.routed(x.flatten(0, 1), routing).view_as(x)

    def routed(self, tokens: Tensor, routing: Routing) -> Tensor:
        """Return the outputs of the chosen experts for tokens [token, feature]."""
        experts, scores, taken = (part.flatten(0, 1) for part in (routing.experts, routing.scores, routing.taken))
        if self.registry is None or not self.alike:
            return self.dispatched(tokens, experts, scores, taken)
        registry, alike = self.registry, self.alike
        mine = (scatter_to(full, registry, *alike, dim=0) for full in (tokens, experts, scores, taken))
        return gather_from(self.dispatched(*mine), registry, *alike, dim=0)

    def dispatched(self, tokens: Tensor, experts: Tensor, scores: Tensor, taken: Tensor) -> Tensor:
        """Return the outputs of the chosen experts for this rank's part of the tokens."""
        choices = taken.flatten().nonzero().squeeze(1)
        choices = choices[experts.flatten()[choices].argsort(stable=True)]  # ordered by expert
        counts = experts.flatten()[choices].bincount(minlength=self.shape.experts)
        sources = choices // self.shape.top_k
        results = self.exchanged(tokens[sources], counts) * scores.flatten()[choices].unsqueeze(1)
        return torch.zeros_like(tokens, dtype=results.dtype).index_add(0, sources, results)

    def exchanged(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Send token features [row, feature] to their experts, and return the outputs of the experts.

        ``rows`` is ordered by expert. ``counts`` [expert] has the number of rows per expert.
        """
        if self.registry is None or not self.axes:
            outputs: Tensor = self.experts(rows, counts.tolist())
            return outputs
        ranks = self.registry.size(*self.axes)
        coming = all_to_all(counts, self.registry, *self.axes, split_dim=0).view(
            ranks, -1
        )  # [sending rank, own expert]
        sent, received = counts.view(ranks, -1).sum(1).tolist(), coming.sum(1).tolist()
        rows = all_to_all(rows, self.registry, *self.axes, split_dim=0, split_sizes=sent, concat_sizes=received)
        # Received rows are ordered by sending rank; `self.experts` needs them ordered by expert.
        own = torch.arange(coming.size(1), device=rows.device).repeat(ranks).repeat_interleave(coming.flatten())
        order = own.argsort(stable=True)
        rows = self.experts(rows[order], coming.sum(0).tolist())[order.argsort()]
        return all_to_all(rows, self.registry, *self.axes, split_dim=0, split_sizes=received, concat_sizes=sent)


class DenseMixture(Mixture):
    """Mixture in which every expert computes all tokens. A token's score is 0 for the experts that it did not choose."""

    def routed(self, tokens: Tensor, routing: Routing) -> Tensor:
        scores = torch.zeros_like(tokens[:, :1]).expand(-1, self.shape.experts)
        scores = scores.scatter(1, routing.experts.flatten(0, 1), routing.scores.flatten(0, 1))
        experts = self.experts
        hidden = F.gelu(torch.einsum("nd,edh->neh", tokens, experts.up) + experts.up_bias)
        results = torch.einsum("neh,ehd->ned", hidden, experts.down) + experts.down_bias
        return torch.einsum("ned,ne->nd", results, scores)


class MixtureBlock(nn.Module):
    """A transformer block with a mixture of experts instead of feed-forward layers."""

    def __init__(self, width: int, heads: int, layers: DenseLayers, mixture: Mixture) -> None:
        super().__init__()
        self.norm1, self.attention = layers.norm(width), Attention(width, heads, layers)
        self.norm2, self.mixture = layers.norm(width), mixture

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = self.mixture(self.norm2(x))
        return x + y
