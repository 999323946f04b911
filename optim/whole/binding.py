"""Tell the optimizers that ask other ranks what they step."""

from __future__ import annotations

from collections import Counter

import torch

from ...parallel.mesh.registry import ProcessGroupRegistry
from ..norm.agreement import with_names
from ..norm.plan import ReductionPlan
from ..states.chain import Chain
from ..states.pieces import params_of
from ..step.several import parts_of
from .optimizer import Bound, WholeOptimizer


def bind_whole(
    optimizer: torch.optim.Optimizer, plan: ReductionPlan, chain: Chain, registry: ProcessGroupRegistry
) -> None:
    """Bind those that it is made of to what the chain has put into their param groups.

    Args:
        plan: Of the model's parameters, agreed.
    Raises:
        ValueError: On every rank, as `WholeOptimizer.bind`.
    Collectives: object all-gathers, where there is one.
    """
    whole = [part for part in parts_of(optimizer) if isinstance(part, WholeOptimizer)]
    if not whole:
        return
    plan = plan if plan.parameter_names else with_names(plan, registry)
    bound, times = {}, Counter(entry.name for entry in plan.entries)
    for held, piece in zip(chain.held, chain.pieces(plan.entries), strict=True):
        entry = plan.entries[held.index]
        # One name twice: two layers' own, or one tensor that is tied on this rank. Nobody knows; `bind` says so.
        name = plan.parameter_names[plan.parameter_slots[held.index]] if times[entry.name] == 1 else entry.name
        bound[id(piece.piece)] = Bound(name, held.name, piece.piece, piece.region, entry.spec, entry.trained)
    for part in whole:
        part.bind([bound[id(tensor)] for tensor in params_of(part.param_groups)], registry)
