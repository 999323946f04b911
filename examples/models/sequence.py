"""Sequences sharded over `cp`, and attention over full sequences (DeepSpeed-Ulysses, arXiv:2309.14509).

    between attention layers   all features, some tokens
    in attention               some heads, all tokens
    conversion                 an all-to-all

Parameters are replicated over `cp`. The loss of a rank covers its tokens, so gradients are averaged over `cp` as over
`data`.
"""

from __future__ import annotations

import torch
from meshstep.parallel import ProcessGroupRegistry, all_to_all, broadcast_from
from torch import Tensor


class SplitSequence:
    """Sharding of sequences over the axis `cp`. The first ranks may have one token more than the last ranks.

    Without the axis, every rank has all tokens.
    """

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        topology = registry.topology
        self.registry = registry
        self.axes = tuple(axis for axis in topology.data_axes if axis not in topology.sample_axes)
        self.ranks = topology.size(*self.axes)

    def sizes(self, tokens: int) -> list[int]:
        """Return the number of tokens that each rank holds of a sequence of ``tokens`` tokens."""
        return [tokens // self.ranks + (rank < tokens % self.ranks) for rank in range(self.ranks)]

    def own(self, full: Tensor, dim: int) -> Tensor:
        """Return this rank's tokens of a full sequence along ``dim``."""
        sizes, rank = self.sizes(full.size(dim)), self.registry.rank(*self.axes) if self.axes else 0
        return full.narrow(dim, sum(sizes[:rank]), sizes[rank])

    def whole(self, x: Tensor, tokens: int) -> Tensor:
        """Convert [..., head, own token, feature] to [..., own head, token, feature]."""
        if not self.axes:
            return x
        return all_to_all(x, self.registry, *self.axes, split_dim=-3, concat_dim=-2, concat_sizes=self.sizes(tokens))

    def parted(self, x: Tensor) -> Tensor:
        """Convert [..., own head, token, feature] to [..., head, own token, feature]."""
        if not self.axes:
            return x
        return all_to_all(x, self.registry, *self.axes, split_dim=-2, concat_dim=-3, split_sizes=self.sizes(x.size(-2)))

    def last(self, own: Tensor, tokens: int) -> Tensor:
        """Return the values at the last token of each sequence, [batch, ...], on every rank.

        ``own`` has the values at this rank's tokens, [batch, own token, ...]. ``tokens`` is the full sequence length.
        """
        if not self.axes:
            return own[:, -1]
        mine = own[:, -1] if own.size(1) else torch.zeros_like(own.sum(1))
        return broadcast_from(mine, self.registry, *self.axes, root=min(tokens, self.ranks) - 1)
