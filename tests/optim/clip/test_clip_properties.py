"""Clipping on random layouts: torch's clip coefficient, the norm after clipping, and idempotence."""

from __future__ import annotations

import pytest
import torch
from cases import NORM_TYPES, Case, cases, parameters_on
from hypothesis import strategies as st
from meshstep.optim import clip_grad_norm_, global_norm
from meshstep.parallel import ProcessGroupRegistry
from properties import random_cases
from world import World


def clipped_twice(case: Case, max_norm: float, factor: float, p: float) -> list[float]:
    with ProcessGroupRegistry(case.topology) as registry:
        params = parameters_on(case, registry)
        plain = global_norm(params, registry, p).total_norm
        for _, q in params:
            if q.grad is not None:
                q.grad.mul_(factor)
        from meshstep.optim.gradients.in_place import mark_complete

        for _, q in params:
            mark_complete(q)
        before = clip_grad_norm_(params, max_norm, registry, p)
        once = [q.grad.clone() for _, q in params if q.grad is not None]
        after = clip_grad_norm_(params, max_norm, registry, p)
        twice = [q.grad for _, q in params if q.grad is not None]
        moved = max((float((a - b).abs().max()) for a, b in zip(once, twice, strict=True) if a.numel()), default=0.0)
        return [float(plain), float(before.total_norm), float(before.clip_coef), float(after.total_norm), moved]


@random_cases(
    st.tuples(
        cases(dtypes=(torch.float32,)),
        st.sampled_from([0.37, 5.0, 1e4]),
        st.sampled_from([4.0, 0.3]),
        st.sampled_from(NORM_TYPES),
    ),
    100,
)
def test_clipping_on_random_layouts_matches_torch_formula_and_is_idempotent(
    world: World, drawn: list[tuple[Case, float, float, float]]
) -> None:
    results = world.run_each(clipped_twice, [(args[0].topology.world_size, args) for args in drawn])
    for (_, max_norm, factor, _), by_rank in zip(drawn, results, strict=True):
        for plain, before, coef, after, moved in by_rank:
            assert before == pytest.approx(factor * plain, rel=1e-6)
            assert coef == pytest.approx(min(1.0, max_norm / (before + 1e-6)), rel=1e-12)
            assert after == pytest.approx(before * coef, rel=1e-6, abs=1e-12)
            # A second clip can scale by max_norm / (max_norm + 1e-6): at most 1e-6 difference, plus rounding.
            assert moved <= 1e-6 + 2e-7 * max_norm
