"""The construction of a `ParallelOptimizer`: arguments are checked and compared over all ranks, and objects created."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from ..amp.capture import is_captured
from ..amp.casting import HALF_DTYPES
from ..amp.modes import Mode, Precision, precision_of
from ..amp.stochastic_rounding import check_named
from ..parallel.interop.local_parameters import divide_once, has_dtensors, local_parameter
from ..parallel.layout.annotation import annotation_of
from ..parallel.mesh.agreement import (
    check_all_say_the_same,
    described,
    on_all_ranks,
    on_all_ranks_with,
)
from ..parallel.mesh.registry import ProcessGroupRegistry, check_registry
from ..parallel.mesh.topology import Topology
from .clip.base import Clip
from .clip.clipper import (
    AgreedThresholds,
    GradientClipper,
    SkipVote,
    agreed_thresholds,
    check_thresholds,
)
from .clip.rules import ClipSpec, check_packed, clip_of, planned_for
from .gradients.buckets import BUCKET_BYTES, CommHook, gradient_buckets
from .gradients.fixed_order import FixedOrderSum, TreeRanks
from .gradients.reduce_in_backward import BackwardReducer, Early
from .kernels.choice import kernels_here, kernels_on_gpu
from .norm.exact_norm import check_exact
from .norm.measure import CheckReplicas, Commit, Fingerprints, Reduction, check_measurement
from .norm.param_table import ParamTable
from .norm.plan import ReductionPlan, count_as_copies, entries_of, frozen_without_spec
from .norm.plan_agreement import Summary, agree
from .norm.replicas import EqualShards, FingerprintMonitor, ReplicaCheck
from .states.chain import GivenParam, TransformChain
from .states.elementwise import check_in_buckets, check_whole
from .states.gradient_completion import GradientCompletion
from .states.local_tensors import LocalTensors
from .states.masters import check_main_grads, check_split, precision_transform
from .states.offloaded import Offloaded
from .states.param_transform import PlacementContext, Position, StatePlacement
from .states.sharded import Sharded
from .step.data_parallel import (
    FixedOrderSync,
    GradSyncController,
    OverlappedReduce,
    SumOrder,
    check_fixed_order,
    check_gradient_reduction,
    modules_in,
    switch_of,
)
from .step.first_window_checks import ModelParams, OnMissingParams, UnusedParameters
from .step.skips import OnNonfinite, checked_nonfinite
from .step.step_agreement import StepAgreement
from .step.update import check_steps_on_gpu, check_steps_without_closure, steps_on_device
from .step.window import Window
from .step.wrapped_optimizer import (
    CombinedOptimizer,
    asks_other_ranks,
    check_not_replaced,
    kind_of,
    params_of,
    parts_of,
)

NamedGroups = Sequence[Sequence[tuple[str | None, Tensor]]]


class _Declared(NamedTuple):
    """One rank's settings and parameter layouts; all ranks gather and compare these."""

    settings: dict[str, str]
    dtypes: set[torch.dtype]
    summary: Summary
    thresholds: list[Any]  # ``max_norm`` of each param group
    groups: frozenset[int]  # the indices of param groups with parameters


class AgreedSetup(NamedTuple):
    """The result of `Setup.agreed_plan`.

    Attributes:
        plan: The reduction plan of the gradient norm.
        thresholds: The ``max_norm`` of the param groups.
        agreement: Compares settings between ranks in each step. None: there is one rank.
    """

    plan: ReductionPlan
    thresholds: AgreedThresholds
    agreement: StepAgreement | None


@dataclass(frozen=True)
class Setup:
    """The arguments of one `ParallelOptimizer`, with methods that check them and create the objects that a step uses.

    ``wrong_call`` is an error of the call, such as an unknown argument; `agreed_plan` raises it on all ranks.
    """

    optimizer: torch.optim.Optimizer
    registry: ProcessGroupRegistry
    max_norm: ClipSpec
    norm_type: float
    reduction: Reduction
    per_parameter_norms: bool
    precision: Mode | Precision
    accumulation_steps: int | None
    data_parallel: nn.Module | Sequence[nn.Module] | None
    average_data: bool
    overlap: bool
    compression: CommHook | None
    bucket_bytes: int | None
    states: StatePlacement | Sequence[StatePlacement]
    check_replicas: CheckReplicas
    commit: Commit | None
    on_nonfinite: OnNonfinite
    on_missing_params: OnMissingParams = "raise"
    sum_order: SumOrder = "any"
    wrong_call: TypeError | None = None

    @property
    def options(self) -> dict[str, Any]:
        apart = {"optimizer", "registry", "wrong_call"}
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in apart}

    @property
    def mode(self) -> Precision:
        """Return the precision mode as an object."""
        return precision_of(self.precision)

    # Checking --------------------------------------------------------------------------------------------------------

    def with_spec(self, groups: NamedGroups) -> tuple[list[list[tuple[str | None, Tensor]]], list[tuple[str, Tensor]]]:
        """Return ``groups`` without frozen parameters that lack a supported spec, and a list of these parameters.

        The optimizer leaves such parameters out, so a frozen model needs no declarations.
        """
        left_out = frozen_without_spec(groups, self.registry.topology, compared=bool(self.check_replicas))
        kept = [[pair for pair in group if id(pair[1]) not in left_out] for group in groups]
        pairs = (pair for group in groups for pair in group if id(pair[1]) in left_out)
        return kept, [(name or f"a parameter of shape {tuple(param.shape)}", param) for name, param in pairs]

    def agreed_plan(self, groups: NamedGroups, left_out: Iterable[str]) -> AgreedSetup:
        """Check the arguments and parameters of all ranks. Errors are raised on every rank.

        Collectives: an object all-gather, and a second one if ranks have different declarations or uneven shards.
        """
        topology = self.registry.topology
        plan, by_rank = on_all_ranks_with(lambda: self._declare(groups), self.registry)
        check_all_say_the_same([declared.settings for declared in by_rank])
        self._check_prepared(set().union(*(declared.dtypes for declared in by_rank)))
        plan = agree(plan, [declared.summary for declared in by_rank], self.registry)
        plan.warn_of_experts()
        plan = self.plan_for_clip(plan)
        if topology.size(*topology.model_axes) > 1:
            count_as_copies(param for group in groups for _, param in group)
        thresholds = agreed_thresholds([declared.thresholds for declared in by_rank])
        if topology.world_size == 1:
            return AgreedSetup(plan, thresholds, None)
        filled = [declared.groups for declared in by_rank]
        rule, all_groups = clip_of(self.max_norm), thresholds.everywhere
        agreement = StepAgreement(plan, self.registry, self.optimizer, filled, rule, all_groups, [*left_out])
        return AgreedSetup(plan, thresholds, agreement)

    def _declare(self, groups: NamedGroups) -> tuple[ReductionPlan, _Declared]:
        """Check this rank's arguments and parameters. Return its reduction plan, and what all ranks compare."""
        self._check_arguments()
        check_not_meta(groups)
        if self.device_of(groups).type == "cuda" and Offloaded(1.0) not in self.placements:
            check_steps_on_gpu(self.optimizer)
        topology = self.registry.topology
        named_params = [pair for group in groups for pair in group]
        check_split(self.context(), named_params)
        if self.mode.stochastic_rounding and topology.world_size > 1:
            check_named(named_params)
        named = [[param if name is None else (name, param) for name, param in group] for group in groups]
        entries = entries_of(named, topology, compared=bool(self.check_replicas))
        plan = ReductionPlan.of(entries, topology, self.registry.global_rank)
        plan = replace(plan, num_groups=max(plan.num_groups, len(groups)))  # the last groups may have no entry
        params = list(plan.pair_entries(param for _, param in named_params))
        check_whole(self.optimizer, plan.entries, topology)
        if switch := switch_of(modules_in(self.data_parallel)):
            switch.check_groups(self.registry)
            switch.check_layouts(plan.entries, topology)
            if self.average_data:
                switch.check_members(params, topology)
        if self.sum_order == "fixed":
            check_fixed_order(params, topology)
        thresholds = [group.get("max_norm") for group in self.optimizer.param_groups]
        dtypes, names = {entry.dtype for entry in entries}, topology.world_size > 1 or self.per_parameter_norms
        filled = frozenset(index for index, group in enumerate(groups) if group)
        return plan, _Declared(described(self._settings()), dtypes, Summary.of(plan, names), thresholds, filled)

    def _check_prepared(self, found: set[torch.dtype]) -> None:
        """Raise ValueError if the precision mode needs half-precision parameters, and no rank has one."""
        precision = self.mode
        if not (precision.masters or precision.stochastic_rounding):
            return
        if found and not found & {*HALF_DTYPES}:
            is_scaled = precision.make_loss_scale("cpu") is not None
            without = "give precision='fp16', which only scales the loss" if is_scaled else "leave precision= out"
            raise ValueError(
                f"precision={precision.name!r} needs half-precision parameters, but all parameters of the optimizer are "
                f"{', '.join(sorted(map(str, found)))}: call meshstep.amp.precision_of({precision.name!r}).prepare(model) "
                "before you create the optimizer. If they should stay so, such as float32 adapters of a frozen "
                f"half-precision model, {without}"
            )

    def _settings(self) -> dict[str, object]:
        """Return the settings by name; settings with the same name must be equal on all ranks.

        Names of settings that may differ between pipeline stages contain the stage.
        """
        topology = self.registry.topology
        said: dict[str, object] = {
            "max_norm": clip_of(self.max_norm),
            "precision": self.mode,
            "accumulation_steps": self.accumulation_steps,
            "states": self.placements,
            "on_nonfinite": self.on_nonfinite,
            "on_missing_params": self.on_missing_params,
            "norm_type": float(self.norm_type),
            "reduction": self.reduction,
            "per_parameter_norms": self.per_parameter_norms,
            "check_replicas": self.check_replicas,
            "commit": None if self.commit is None else "given",
            "kernels (use_kernels or MESHSTEP_KERNELS)": kernels_here(),
        }
        params = params_of(self.optimizer)
        if gpu := next((param.device for param in params if param.is_cuda), None):
            said["kernels on GPUs (use_kernels or MESHSTEP_KERNELS)"] = kernels_on_gpu(gpu)
        whole = [type(part).__name__ for part in parts_of(self.optimizer) if asks_other_ranks(part)]
        said["optimizers that need full tensors"] = whole
        stage = [self.registry.coordinate[axis] for axis in topology.pipe_axes]
        where = f" of pipeline stage {stage}" if topology.size(*topology.pipe_axes) > 1 else ""
        said[f"the optimizer{where}"] = kind_of(self.optimizer)
        said[f"data_parallel{where}"] = [type(module).__name__ for module in modules_in(self.data_parallel)]
        for name in ("average_data", "overlap", "compression", "bucket_bytes", "sum_order"):
            said[f"{name}{where}"] = getattr(self, name)
        for index, group in enumerate(self.optimizer.param_groups):
            # Groups without parameters on this rank are not compared. Plans compare the param group of each parameter.
            for key in group.keys() - {"params", "param_names", "max_norm"} if group["params"] else ():
                said[f"{key} of param group {index}{where}"] = group[key]
        return said

    def plan_for_clip(self, plan: ReductionPlan) -> ReductionPlan:
        """Return ``plan``, with parameter names if the clipping rule needs them. Collectives: those of `planned_for`."""
        return planned_for(self._check_clip(), plan, self.registry)

    def _check_clip(self) -> Clip | None:
        clip = clip_of(self.max_norm)
        check_thresholds(clip, self.optimizer.param_groups)
        check_packed(clip, self.reduction)
        self.check_sum_order_of(clip)
        return clip

    def _check_arguments(self) -> None:
        if self.wrong_call is not None:
            raise self.wrong_call
        check_steps_without_closure(self.optimizer)
        if self.mode.stochastic_rounding:
            check_in_buckets(
                self.optimizer, "stochastic rounding updates parameters in several calls of the optimizer's step()"
            )
        check_measurement(self.norm_type, self.reduction, self.check_replicas, self.commit)
        checked_nonfinite(self.on_nonfinite)
        if self.on_missing_params not in get_args(OnMissingParams):
            raise ValueError(f"on_missing_params={self.on_missing_params!r}: give 'raise' or 'warn'")
        Window(self.accumulation_steps)
        self._check_clip()
        modules = modules_in(self.data_parallel)
        check_gradient_reduction(
            modules,
            self.average_data,
            self.overlap,
            self.compression,
            self.bucket_bytes,
            self.sum_order,
            self.accumulation_steps,
        )
        if self.sum_order == "fixed":
            self._check_sum_order()
        context = self.context()
        check_main_grads(context, self.accumulation_steps)
        for placement in self.placements:
            if not isinstance(placement, StatePlacement):
                raise TypeError(f"states={placement!r}: give placements, such as Sharded('data') or Offloaded(0.5)")
            placement.check(context)
        kinds = [type(placement).__name__ for placement in self.placements]
        if len(set(kinds)) < len(kinds):
            raise ValueError(
                f"states={self.states!r} has {max(kinds, key=kinds.count)} twice: give each kind of placement once"
            )

    def _check_sum_order(self) -> None:
        if self.reduction != "packed":
            raise ValueError(
                f"reduction={self.reduction!r} with sum_order='fixed', which needs reduction='packed': leave reduction= out"
            )
        for part in parts_of(self.optimizer):
            if getattr(part, "rounds_by_ranks", False):
                raise ValueError(
                    f"{type(part).__name__} with sum_order='fixed': its results depend on the number of ranks; use Muon or "
                    "an elementwise optimizer, or leave sum_order='fixed' out"
                )
        for placement in self.placements:
            if isinstance(placement, Sharded) and placement.compression is not None:
                raise ValueError(
                    f"Sharded(compression={placement.compression!r}) with sum_order='fixed', which does not support "
                    "compression: leave compression= out"
                )

    def check_sum_order_of(self, clip: Clip | None) -> None:
        """Raise ValueError if ``sum_order="fixed"`` is set, and does not support the rule ``clip`` (None: no rule)."""
        if self.sum_order != "fixed":
            return
        check_exact(self.norm_type if clip is None or clip.norm_type is None else clip.norm_type)
        if clip is not None and (clip.level == "units" or clip.weights):
            raise ValueError(
                f"{clip!r} needs norms of units (such as rows) or of weights, which sum_order='fixed' does not compute: "
                "give a number or another rule as max_norm, or leave sum_order='fixed' out"
            )

    def device_of(self, groups: NamedGroups) -> torch.device:
        """Return the device of the parameters; on a rank without parameters, the device of the rank's collectives."""
        devices = {param.device for group in groups for _, param in group}
        if len(devices) > 1:
            raise ValueError(
                f"the parameters are on {', '.join(sorted(map(str, devices)))}, but all parameters of a process must be on "
                "one device; move them before you pass them to the optimizer"
            )
        return devices.pop() if devices else self.registry.device

    # Objects that a step uses ----------------------------------------------------------------------------------------

    @property
    def placements(self) -> list[StatePlacement]:
        given = [self.states] if isinstance(self.states, StatePlacement) else list(self.states)
        return sorted(given, key=lambda placement: getattr(placement, "position", 0))

    @property
    def averages_data(self) -> bool:
        """Return True if the optimizer itself averages gradients over the data axes."""
        # With fully_shard (``is_ddp`` is False) the optimizer still averages the gradients of parameters outside of it.
        switch = switch_of(modules_in(self.data_parallel))
        return self.average_data and self.sum_order == "any" and (switch is None or not switch.is_ddp)

    def not_local(self, switch: GradSyncController | None, params: Iterable[Tensor]) -> list[str]:
        """Return the reasons why gradients of ``params`` after backward differ from those of this rank's samples alone."""
        reasons = []
        if switch is not None and not self.overlap and self.sum_order == "any":
            reasons.append(
                "the module in data_parallel= averages gradients: leave it out, don't wrap the model, and `step` averages "
                "them"
            )
        if not self.average_data:
            reasons.append(
                "other code averages gradients (average_data=False): remove that code and average_data=False, and `step` "
                "averages them"
            )
        if self.sum_order == "fixed":
            reasons.append("sum_order='fixed' moves gradients into partial sums after each backward: leave it out")
        if self.overlap:
            reasons.append("overlap=True averages gradients while backward runs: leave overlap out")
        if any(isinstance(placement, Sharded) and placement.gradients for placement in self.placements):
            reasons.append("Sharded(gradients=True) averages gradients while backward runs: leave gradients=True out")
        if has_dtensors(params):
            reasons.append("gradients of DTensors may be partial: use plain parameters and declare their layouts")
        return reasons

    def context(self) -> PlacementContext:
        """Return the arguments and objects that state placements read, to check themselves and to create transforms."""
        switch = switch_of(modules_in(self.data_parallel))
        return PlacementContext(
            self.optimizer,
            self.mode,
            self.registry,
            self.averages_data,
            switch,
            self.overlap,
            self.placements,
            self._tree_ranks() if self.sum_order == "fixed" else None,
        )

    def chain(self, plan: ReductionPlan) -> TransformChain:
        """Install the parameter transforms over the optimizer's param groups, in place, and return their chain."""
        context = self.context()
        precision_at = sum(placement.position < Position.DTYPE for placement in self.placements)
        transforms = [placement.transform(context) for placement in self.placements]
        transforms.insert(precision_at, precision_transform(context))
        transforms.insert(0, LocalTensors(self.registry.topology))
        return TransformChain(self.optimizer, transforms, self.registry, plan)

    def clipper(self, table: ParamTable, chain: TransformChain, thresholds: AgreedThresholds) -> GradientClipper:
        device = self.device_of([[(None, param) for param in chain.params]])
        compared = bool(self.check_replicas) and self.registry.topology.world_size > 1
        checks, equal_shards = replica_checks(table, chain.given, device) if compared else ([], None)
        watch = self._fingerprints(table, chain, device) if compared else None
        return GradientClipper(
            table.grad_tensors,
            [row.region for row in table],
            table.plan,
            self.registry,
            checks,
            SkipVote(self.commit, watch, device) if self.commit is not None or watch is not None else None,
            equal_shards,
            norm_type=self.norm_type,
            reduction=self.reduction,
            thresholds=thresholds,
            per_parameter_norms=self.per_parameter_norms,
            check_replicas=self.check_replicas,
            exact=self.sum_order == "fixed",
        )

    def _fingerprints(
        self, table: ParamTable, chain: TransformChain, device: torch.device
    ) -> FingerprintMonitor | None:
        """Return the monitor that compares replicas during the whole run; None if `Fingerprints` is not used."""
        if not isinstance(self.check_replicas, Fingerprints):
            return None
        # These are equal on all ranks, so all ranks compare the same tensors.
        masters, placed = self.mode.masters, bool(self.placements)
        topology = table.plan.topology
        what = "master" if masters else "stepped weight" if placed else "parameter"
        checks = [ReplicaCheck(table.plan, table.tensors, device, chain.states, exact=True, what=what)]
        if masters or placed:
            checks.append(ReplicaCheck(table.model_plan, _local_tensors(chain.given, topology), device, exact=True))
        if (
            not any(check.copied_over(index) for check in checks for index in range(len(check.plan.entries)))
            and table.model_plan.entries
        ):
            warnings.warn(
                f"check_replicas=Fingerprints(...) compares nothing on this rank: no other rank of {topology!r} has a "
                "replica of this rank's tensors",
                stacklevel=2,
            )
        return FingerprintMonitor(checks, self.check_replicas.every, chain.registry)

    def completion(
        self, table: ParamTable, chain: TransformChain, model: ModelParams, agreement: StepAgreement | None
    ) -> GradientCompletion:
        """Return the object that reduces the gradients of the stepped tensors in `step`.

        With ``overlap`` it also has the buckets that are reduced during backward; `grad_sync` returns their controller.
        Collectives: with ``overlap`` an object all-gather, else none.
        """
        plan, measured = table.model_plan, table.grad_tensors
        leaves = {id(row.leaf) for row in table}
        # Gradients may become views of a bucket only if no other tensor shares them. A master weight shares its gradient
        # with its parameter, and a local tensor with its DTensor.
        adopt = all(id(tensor) in leaves for tensor in measured)
        common: dict[str, Any] = {"average_data": self.averages_data, "hook": self.compression}
        early = only = None
        if self.overlap:
            can_be_early, bucket_bytes = Early.of(plan, self.registry), self.bucket_bytes or BUCKET_BYTES // 2
            # With master weights, gradients must stay the same tensor objects: `MasterWeights.collect` marks these
            # objects, to detect gradients that were not cleared.
            whole = not self.mode.masters
            options = {**common, "adopt": whole, "only": can_be_early, "bucket_bytes": bucket_bytes}
            early = gradient_buckets([row.param for row in table], plan, self.registry, **options)
            only = lambda entry: not can_be_early(entry)  # noqa: E731
        options = {**common, "adopt": adopt, "only": only, "bucket_bytes": self.bucket_bytes}
        buckets = lambda p: gradient_buckets(measured, p, self.registry, **options)  # noqa: E731
        in_backward = early is not None or bool(chain.around_backward) or self.sum_order == "fixed"
        unused = UnusedParameters(chain.params, plan, self.registry, in_backward)
        fingerprints = isinstance(self.check_replicas, Fingerprints)
        return GradientCompletion(chain, table, buckets, early, agreement, unused, model, fingerprints, in_backward)

    def grad_sync(self, completion: GradientCompletion, before: GradSyncController | None) -> GradSyncController | None:
        """Return the controller of gradient reduction in backward; None: `step` or a state placement reduces gradients.

        ``before``, the controller before param groups were added or refreshed, is updated and returned.
        """
        if self.sum_order == "fixed":
            total = self._fixed_order_sum(completion.chain, completion.table.model_plan)
            if not isinstance(before, FixedOrderSync):
                return FixedOrderSync(total)
            before.renew(total)
            return before
        if completion.early is None:
            for module in modules_in(self.data_parallel) if before is None else ():
                divide_once(module)
            return before or switch_of(modules_in(self.data_parallel))
        names = {id(row.param): row.entry.name for row in completion.table}
        reducer = BackwardReducer(lambda param: names[id(param)], completion.early, (), in_flight=None)
        if not isinstance(before, OverlappedReduce):
            return OverlappedReduce(reducer)
        before.renew(reducer)
        return before

    def _fixed_order_sum(self, chain: TransformChain, plan: ReductionPlan) -> FixedOrderSum:
        """Return the object that sums gradients over micro-batches and data ranks, except gradients summed in backward."""
        others = {id(param) for param in chain.summed_in_backward()}
        params = chain.params_by_entry(plan)
        trained = [param for entry, param in params if entry.trained and id(param) not in others]
        return FixedOrderSum(trained, self._tree_ranks(), chain.sliced(), self.bucket_bytes)

    def _tree_ranks(self) -> TreeRanks:
        topology, registry = self.registry.topology, self.registry
        axes = tuple(axis for axis in topology.data_axes if topology.size(axis) > 1)
        assert self.accumulation_steps is not None, "checked by `check_gradient_reduction`"
        if not axes:
            return TreeRanks((), None, 0, 1, self.accumulation_steps)
        return TreeRanks(
            axes, registry.group(*axes), registry.rank(*axes), registry.size(*axes), self.accumulation_steps
        )


# Replicas that are compared -------------------------------------------------------------------------------------------

# `Fingerprints` compare the stepped tensors, and other replica checks `SteppedTensor.replica_tensor`. A second check
# compares the model's parameters in two cases: `Sharded` is used; or `Fingerprints` is used together with master weights
# or any state placement.


def replica_checks(
    table: ParamTable, given: Sequence[GivenParam], device: torch.device
) -> tuple[list[ReplicaCheck], EqualShards]:
    """Return the checks for ``check_replicas``: comparisons of replicas, and a search for replicas declared as shards."""
    topology = table.plan.topology
    checks = [ReplicaCheck(table.plan, [row.replica_tensor for row in table], device)]
    if table.plan.sharded_over is not None:  # equal shards do not imply equal replicas of the full parameters
        checks.append(ReplicaCheck(table.model_plan, _local_tensors(given, topology), device))
    axes: list[tuple[str, ...]] = []
    for row in table:
        spec = row.model_entry.spec.resolve(topology)
        is_declared = not (spec.owned or spec.tied or has_dtensors((given[row.index].param,)))
        axes.append(tuple(a for a in spec.sharded_axes if topology.size(a) > 1) if is_declared else ())
    return checks, EqualShards(table.plan, axes, device)


def _local_tensors(given: Sequence[GivenParam], topology: Topology) -> list[Tensor]:
    return [local_parameter(of.param, topology) for of in given]


# Capture of a step in a CUDA graph ------------------------------------------------------------------------------------

# A replay runs the kernels of the captured step again, with the same Python numbers and the same memory. Python code of
# the step (counting, checking, choosing) runs only once, during the capture. So checks must be complete before the
# capture, and each value that changes from step to step must be in a tensor. Otherwise the capture raises before
# anything is changed.


def check_captured(call: str, not_captured: Callable[[], Sequence[str]]) -> bool:
    """Return True if a CUDA graph is being captured. Raise RuntimeError if ``not_captured()`` has reasons against it."""
    if not is_captured():
        return False
    if reasons := not_captured():
        raise RuntimeError(f"{call} can't be captured in a CUDA graph here: {'; '.join(reasons)}")
    return True


def registry_not_captured(registry: ProcessGroupRegistry, device: torch.device) -> str | None:
    """Return the reason why a CUDA graph can't capture collectives over gradients on ``device``; None if it can."""
    if registry.topology.world_size == 1 or registry.device.type == device.type:
        return None
    return (
        f"the gradients are on {device} and collectives on {registry.device}: initialize torch.distributed with the "
        "backend 'nccl', and give each rank its own GPU"
    )


def update_not_captured(optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[str]:
    """Yield the reasons why a CUDA graph can't capture the update of a torch optimizer on ``device``."""
    kind = kind_of(optimizer)
    if not steps_on_device(optimizer):
        yield (
            f"{kind} decides on the host whether to skip: create {kind} with fused=True, if it has this argument; SGD with "
            "dampening also needs a step with gradients of all parameters before the capture"
        )
    for part in parts_of(optimizer):
        if reason := getattr(part, "not_captured", None):
            yield f"{type(part).__name__} {reason}"
    for index, group in enumerate(optimizer.param_groups):
        lr = group.get("lr")
        if group["params"] and not (isinstance(lr, Tensor) and lr.device == device):
            yield (
                f"the lr of param group {index} is {lr}, so replays would ignore changes by a schedule: give "
                f"lr=torch.tensor({float(lr or 0)}, device={str(device)!r}), which schedules write to"
            )
            return


# Errors ---------------------------------------------------------------------------------------------------------------


def check_not_meta(groups: NamedGroups) -> None:
    """Raise ValueError if a parameter is on the meta device."""
    for index, group in enumerate(groups):
        for position, (name, param) in enumerate(group):
            if param.is_meta:
                annotation = annotation_of(param)
                known = name or (annotation.name if annotation else None) or f"parameter {position} of group {index}"
                raise ValueError(
                    f"{known} is on the meta device and has no elements; call model.to_empty(device=...), initialize or "
                    "load the weights, and then create the optimizer"
                )


def as_one(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], registry: ProcessGroupRegistry
) -> torch.optim.Optimizer:
    """Return a torch optimizer unchanged, and a list of optimizers as one `CombinedOptimizer`.

    A wrong ``registry`` raises on this rank only. An error about ``optimizer`` is raised on every rank, because this
    rank sends it in the first collective of the constructor.
    Collectives: an object all-gather if it raises for ``optimizer``; else none.
    """
    check_registry(registry)

    def made() -> torch.optim.Optimizer:
        for part in optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,):
            if isinstance(part, torch.optim.Optimizer):
                check_not_replaced(part)
        if isinstance(optimizer, (list, tuple)):
            return CombinedOptimizer(optimizer)
        if isinstance(optimizer, torch.optim.Optimizer):
            return optimizer
        kind = type(optimizer).__name__
        raise TypeError(
            f"the optimizer is a {kind}, not a torch optimizer: create a torch optimizer from the parameters first, "
            "ParallelOptimizer(torch.optim.AdamW(model.parameters(), lr=...), registry)"
        )

    try:
        return made()
    except Exception:  # of any type, because other ranks would wait for this rank in a collective
        return on_all_ranks(made, registry)


def check_is_parallel(optimizer: object) -> None:
    """Raise TypeError if ``optimizer`` has no attribute ``registry``, and so is not a `ParallelOptimizer`."""
    if not hasattr(optimizer, "registry"):
        raise TypeError(
            f"the optimizer is of type {type(optimizer).__name__}; give the ParallelOptimizer that wraps it, which has "
            "the master weights, the shards and the step counts"
        )


def check_loss(loss: object, call: str) -> None:
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"{call}(loss) was given a {type(loss).__name__}: give the loss itself, a 0-dim tensor that backward can start "
            "from; for several losses, give their sum"
        )
