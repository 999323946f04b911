"""The choice of replicas that are compared: of the stepped tensors and, if these are shards or copies, of the model's."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ...parallel.interop.local_parameters import has_dtensors, local_parameter
from ...parallel.mesh.agreement import gather_objects
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from ..norm.measure import CheckReplicas, Fingerprints
from ..norm.param_table import ParamTable
from ..norm.plan import ReductionPlan
from ..norm.replicas import EqualShards, FingerprintMonitor, ReplicaCheck
from .chain import GivenParam, Placement, TransformChain
from .offloaded import Offloaded


def check_stepped_alike(
    plan: ReductionPlan, placements: Iterable[Placement], check_replicas: CheckReplicas, registry: ProcessGroupRegistry
) -> None:
    """Raise ValueError, on every rank, if `Offloaded` may step replicas that `Fingerprints` compare on different devices.

    This may happen if ranks with replicas of a parameter have different other parameters.

    Collectives: an object all-gather if both `Fingerprints` and a partial `Offloaded` are used, else none.
    """
    fraction = next((one.fraction for one in placements if isinstance(one, Offloaded)), 0.0)
    if not isinstance(check_replicas, Fingerprints) or fraction in (0, 1):
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
                    f"Fingerprints compares replicas of {copy[0]} bitwise, but ranks {other} and {rank} have different "
                    f"other parameters: Offloaded({fraction}) may step one replica on the CPU and one on the "
                    "device, which round differently; use states=Offloaded(1.0), or leave one of the two out"
                )


def checks_of(
    table: ParamTable, given: Sequence[GivenParam], check_replicas: CheckReplicas, device: torch.device
) -> list[ReplicaCheck]:
    """Return the replica comparisons for the first or for all measurements; the first comparison includes gradients.

    Args:
        table: One record per stepped tensor, with the plan that all ranks agreed on.
        given: The model parameters.
        measure: The settings; ``check_replicas`` is read.
        device: The device of the values that a step reduces.
    """
    topology = table.plan.topology
    if not check_replicas or topology.world_size == 1:
        return []
    checks = [ReplicaCheck(table.plan, [row.replica_tensor for row in table], device)]
    if table.plan.cut_over is not None:  # equal shards do not imply equal replicas of the full parameters
        checks.append(ReplicaCheck(table.model_plan, _local_tensors(given, topology), device))
    return checks


def _local_tensors(given: Sequence[GivenParam], topology: Topology) -> list[Tensor]:
    return [local_parameter(of.param, topology) for of in given]


def equal_shards_of(
    table: ParamTable, given: Sequence[GivenParam], check_replicas: CheckReplicas, device: torch.device
) -> EqualShards | None:
    """Return the comparison of shards in the first measurement; None: replicas are not compared.

    Args: as for `checks_of`.
    """
    topology = table.plan.topology
    if not check_replicas or topology.world_size == 1:
        return None
    axes: list[tuple[str, ...]] = []
    for row in table:
        spec = row.model_entry.spec.on(topology)
        is_declared = not (spec.owned or spec.tied or has_dtensors((given[row.index].param,)))
        axes.append(tuple(a for a in spec.sharded_axes if topology.size(a) > 1) if is_declared else ())
    return EqualShards(table.plan, axes, device)


def watch_of(
    table: ParamTable,
    chain: TransformChain,
    check_replicas: CheckReplicas,
    device: torch.device,
    masters: bool,
    placed: bool,
) -> FingerprintMonitor | None:
    """Return the comparison of replicas during the whole run; None: `Fingerprints` is not used.

    ``masters`` and ``placed`` decide which tensors are compared. They are equal on all ranks, including ranks without
    stepped tensors.

    Args: as for `checks_of`.
        masters: True if the precision mode has master weights.
        placed: True if there are state placements.
    """
    topology = table.plan.topology
    if not isinstance(check_replicas, Fingerprints) or topology.world_size == 1:
        return None
    what = "master" if masters else "stepped weight" if placed else "parameter"
    checks = [ReplicaCheck(table.plan, table.tensors, device, chain.states, exact=True, what=what)]
    if masters or placed:
        checks.append(ReplicaCheck(table.model_plan, _local_tensors(chain.given, topology), device, exact=True))
    if (
        not any(check.copied_over(index) for check in checks for index in range(len(check.plan.entries)))
        and table.model_plan.entries
    ):
        warnings.warn(
            f"no tensor of this rank has a replica on {topology!r}: Fingerprints compare nothing on this rank",
            stacklevel=2,
        )
    return FingerprintMonitor(checks, check_replicas.every, chain.registry)
