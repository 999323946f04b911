"""Which copies are compared: of what is stepped, and of the model's parameters where that is something else."""

from __future__ import annotations

import warnings

import torch

from ...parallel.interop.local import local_parameter
from ..norm.measure import Fingerprints, Measure
from ..norm.plan import ReductionPlan
from ..norm.replicas import ReplicaCheck
from ..norm.watch import Watch
from .chain import Chain


def checks_of(plan: ReductionPlan, chain: Chain, measure: Measure, device: torch.device) -> list[ReplicaCheck]:
    """Of the first measurement, or of all; the first one of what is measured.

    Args:
        plan: Of the model's parameters; agreed with names.
        device: Where a step's numbers are.
    """
    topology, derived = plan.topology, chain.derive(plan)
    if not measure.check_replicas or topology.world_size == 1:
        return []
    checks = [ReplicaCheck(derived, chain.compared(), device)]
    if derived.cut_over is not None:  # equal pieces say nothing of the copies that they were cut from
        whole = [local_parameter(param, topology) for _, param, _ in chain.given]
        checks.append(ReplicaCheck(plan, whole, device))
    return checks


def watch_of(
    plan: ReductionPlan, chain: Chain, measure: Measure, device: torch.device, masters: bool, placed: bool
) -> Watch | None:
    """Of the whole run, where that is wanted.

    Args: as for `checks_of`.
        masters: The mode has master weights; ``placed``: there are placements. What is compared goes by these, which are
            the same on all ranks, and not by what a rank steps, which may be nothing.
    """
    topology, stepped = plan.topology, chain.stepped
    if not isinstance(measure.check_replicas, Fingerprints) or topology.world_size == 1:
        return None
    what = "master" if masters else "stepped weight" if placed else "parameter"
    checks = [ReplicaCheck(chain.derive(plan), stepped, device, chain.states, exact=True, what=what)]
    if masters or placed:
        whole = [local_parameter(param, topology) for _, param, _ in chain.given]
        checks.append(ReplicaCheck(plan, whole, device, exact=True))
    if (
        not any(check.copied_over(index) for check in checks for index in range(len(check.plan.entries)))
        and plan.entries
    ):
        warnings.warn(
            f"nothing on this rank has a copy on {topology!r}, all is split: Fingerprints compare nothing here",
            stacklevel=2,
        )
    return Watch(checks, measure.check_replicas.every, chain.registry)
