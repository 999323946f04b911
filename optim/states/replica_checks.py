"""Which copies are compared: of what is stepped, and of the model's parameters where that is something else."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch

from ...parallel.interop.local_parameters import has_dtensors, local_parameter
from ...parallel.mesh.agreement import gather_objects
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..norm.measure import Fingerprints, Measure
from ..norm.plan import ReductionPlan
from ..norm.replicas import EqualShards, FingerprintMonitor, ReplicaCheck
from .chain import Placement, TransformChain
from .offloaded import Offloaded


def check_stepped_alike(
    plan: ReductionPlan, placements: Iterable[Placement], measure: Measure, registry: ProcessGroupRegistry
) -> None:
    """Raise ValueError, on every rank, where `Fingerprints` would compare copies that need not be stepped by the same bits:
    beside different other parameters `Offloaded` may step one of them on the CPU and one on the device.

    Collectives: an object all-gather, where both are asked for.
    """
    fraction = next((one.fraction for one in placements if isinstance(one, Offloaded)), 0.0)
    if not isinstance(measure.check_replicas, Fingerprints) or fraction in (0, 1):
        return
    trained = [entry for entry in plan.entries if entry.trained]
    copies = []
    for entry in trained:
        spec = entry.spec.on(plan.topology)
        copied = {*spec.replica_axes(plan.topology), *dict(spec.tied)}
        copies.append((entry.name, tuple(pair for pair in plan.coordinate.items() if pair[0] not in copied)))
    first: dict[object, tuple[int, list[int]]] = {}
    everybody = gather_objects((copies, [entry.numel for entry in trained]), registry)
    for rank, (held, sizes) in enumerate(everybody):
        for copy in held:
            other, other_sizes = first.setdefault(copy, (rank, sizes))
            if sizes != other_sizes:
                raise ValueError(
                    f"Fingerprints compares copies of {copy[0]} bit by bit, but ranks {other} and {rank} hold it beside "
                    f"different other parameters: Offloaded({fraction}) may step one of them on the CPU and one on the "
                    "device, which round differently; take states=Offloaded(1.0), or leave one of both out"
                )


def checks_of(plan: ReductionPlan, chain: TransformChain, measure: Measure, device: torch.device) -> list[ReplicaCheck]:
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


def equal_shards_of(
    plan: ReductionPlan, chain: TransformChain, measure: Measure, device: torch.device
) -> EqualShards | None:
    """Return the comparison of shards in the first measurement; None where replicas are not compared.

    Args: as for `checks_of`.
    """
    topology = plan.topology
    if not measure.check_replicas or topology.world_size == 1:
        return None
    axes: list[tuple[str, ...]] = []
    for entry, (_, param, _) in zip(plan.entries, chain.given, strict=True):
        spec = entry.spec.on(topology)
        is_declared = not (spec.owned or spec.tied or has_dtensors((param,)))
        axes.append(tuple(a for a in spec.sharded_axes if topology.size(a) > 1) if is_declared else ())
    return EqualShards(chain.derive(plan), [axes[h.index] for h in chain.held], device)


def watch_of(
    plan: ReductionPlan, chain: TransformChain, measure: Measure, device: torch.device, masters: bool, placed: bool
) -> FingerprintMonitor | None:
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
    return FingerprintMonitor(checks, measure.check_replicas.every, chain.registry)
