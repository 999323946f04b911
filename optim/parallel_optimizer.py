"""`ParallelOptimizer` wraps a torch optimizer and clips by the exact global gradient norm of a parallel model."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, cast, overload

import torch
from torch import Tensor, nn

from ..amp.modes import Mode, Precision
from ..parallel.interop.inferred_registry import averaging_modules, registry_for
from ..parallel.interop.local_parameters import local_parameter
from ..parallel.mesh.agreement import on_all_ranks
from ..parallel.mesh.call_tracker import calling_module, public_call, public_constructor, track_call
from ..parallel.mesh.deprecation import renamed_arguments, renamed_members
from ..parallel.mesh.registry import ProcessGroupRegistry
from .arguments import AllOptions, Stats_co, replace_deprecated, wrong_arguments
from .build import (
    AgreedSetup,
    Setup,
    as_one,
    check_captured,
    check_loss,
    registry_not_captured,
    update_not_captured,
)
from .clip.base import Clip, ClipState
from .clip.clipper import AgreedThresholds, GradientClipper, GradScaleInfo, StepDecision
from .clip.rules import ByNorm, ByValue, ClipSpec, in_use
from .gradients.buckets import CommHook
from .gradients.in_place import nonfinite_names
from .norm.measure import CheckReplicas, Commit, GradStats, Reduction
from .norm.param_table import ParamTable, SteppedTensor
from .norm.plan import ReductionPlan
from .states.chain import StepObserver, TransformChain
from .states.gradient_completion import GradientCompletion
from .states.optimizer_state import Coordinates, PicklableOptimizer, Saved, check_caller
from .states.param_transform import StatePlacement
from .states.state_hash import hash_of_state
from .step.data_parallel import GradSyncController, SumOrder, modules_in
from .step.first_window_checks import ModelParams, OnMissingParams, check_window_is_used
from .step.missing_shards import MissingShards
from .step.skips import DISAGREED, REPLICAS_DIVERGED, OnNonfinite, SkipMonitor
from .step.step_agreement import StepAgreement
from .step.torch_engine import lay_out_states
from .step.update import UpdateEngine
from .step.update_request import UpdateRequest
from .step.window import Window
from .step.wrapped_optimizer import (
    OPTIMIZER_INDEX,
    asks_other_ranks,
    checked_group,
    guard_calls,
    leave_out,
    match_names,
    named_params_of,
    own_calls,
    parts_of,
    record_remains,
    unchanged,
)

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Unpack


def _leave_uncompiled(kind: Any) -> None:
    """Exclude `backward`, `step` and `zero_grad` of ``kind`` from ``torch.compile``, which would omit hooks and counts."""
    for name in ("backward", "step", "zero_grad"):
        method = getattr(kind, name)
        if not getattr(method, "untraced", False):
            uncompiled: Any = torch.compiler.disable(method)
            uncompiled.untraced = True
            setattr(kind, name, uncompiled)


class _StepCall(track_call):
    """A `track_call` of a method. An error in the block gets an explanation if model parameters were converted.

    They were converted to another dtype or device after the optimizer was made.
    """

    __slots__ = ("_chain",)

    def __init__(self, name: str, registry: ProcessGroupRegistry, chain: TransformChain) -> None:
        super().__init__(name, registry)
        self._chain = chain

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            try:
                self._chain.explain(error)
            except RuntimeError as explained:
                super().__exit__(RuntimeError, explained, trace)
                raise
        super().__exit__(kind, error, trace)


@renamed_members(pieces="stepped_tensors", vetoed_steps="rejected_steps", window_ends="mark_last_micro_batch")
class ParallelOptimizer(PicklableOptimizer, torch.optim.Optimizer, Generic[Stats_co]):
    """A wrapper of a torch optimizer that clips by the exact global gradient norm of a model sharded over a mesh.

        optimizer = ParallelOptimizer(torch.optim.AdamW(model.parameters(), fused=True), registry, max_norm=1.0)
        optimizer.backward(loss)
        stats = optimizer.step()
        optimizer.zero_grad()

    `step` first reduces the gradients: it averages them over the data axes, and sums partial gradients and the
    gradients of tied parameters. Then it measures the global norm, clips, and steps the wrapped optimizer. All ranks
    step, or all ranks skip the step. A non-finite norm skips the step.

    An accumulation window ("window") is the sequence of micro-batches between two steps. With ``accumulation_steps``
    its length is fixed ("managed accumulation"); otherwise you decide when to step.

    Every rank must construct the `ParallelOptimizer` at the same point with its own part of the model, and call the
    same methods in the same order. A rank without parameters passes ``[{"params": []}]`` to the torch optimizer.

    A frozen parameter (``requires_grad=False``) is not stepped, and takes no memory in optimizer states, master weights
    and gradient buckets. It needs a declaration only to be trained. If its layout over a model axis is not declared, it
    is left out of the param groups. You may freeze parameters between steps, on all ranks. After you unfreeze
    parameters, call `refresh`.

    Args:
        optimizer: A torch optimizer over declared parameters, or a list of optimizers without common parameters. `Lion`,
            the optimizers of `meshstep.optim.whole` (such as `Muon`) and, with ``fused=True``, Adam, AdamW, SGD and
            Adagrad read the clip coefficient and the skip flag on the device. Exceptions: SGD with dampening before a
            parameter's first step, SGD of half-precision parameters on a CPU in torch 2.11 to 2.13, and Adagrad in
            torch 2.11. These and other optimizers cost one more pass over the gradients and one host synchronization
            per step. `meshstep.optim.whole.whole` also reads the skip flag on the host. The constructor raises ValueError
            for fused Adagrad that steps parameters on a GPU in torch 2.11.
            The optimizers of a list have a common norm, step decision and state dict; ``"optimizer"`` in a param group
            is the index of its optimizer in the list.
            The param groups are changed: in modes with master weights they hold the master weights afterwards, and for
            DTensor parameters (`fully_shard`, `parallelize_module`) the local tensors; see
            `meshstep.parallel.interop.dtensor`. While the `ParallelOptimizer` lives, ``optimizer.step()`` raises
            RuntimeError. The wrapped optimizer's ``zero_grad``, ``load_state_dict``, ``add_param_group``, ``train`` and
            ``eval`` call the methods of the `ParallelOptimizer`; on an optimizer of a list, ``load_state_dict`` and
            ``add_param_group`` raise RuntimeError.
        registry: The process groups of the mesh axes that the specs name.
        max_norm: The threshold for the global norm of the gradients without the loss scale; finite, > 0. Or a function
            of the number of steps (`WarmUp`), a clipping rule (`Clip`), or a dict of rules by name pattern (`ByName`).
            None (default): the norm is measured and nothing is clipped. A param group with its own ``"max_norm"`` is
            clipped by its own norm (``math.inf``: not clipped). The other groups are clipped by their common norm. The
            constructor compares the thresholds of param groups over all ranks. You may change them later if every rank
            has every param group.
        norm_type: The p of the norms, >= 1 or ``math.inf``. A clipping rule's own ``norm_type`` takes precedence.
            Default: 2.
        reduction: How the norm is summed over ranks: ``"packed"`` (default) with one collective over all ranks,
            ``"per_group"`` with one collective per kind of layout over the mesh and one over all ranks. They are
            all-reduces, or all-gathers of norms for ``norm_type`` >= 12. See `GlobalNorm`. With ``sum_order="fixed"``
            the norm takes up to two collectives.
        per_parameter_norms: True: report the norm of every logical parameter in ``GradStats.parameter_norms``. Default:
            False.
        precision: Name or object of a precision mode (`meshstep.amp`). It decides whether there are master weights and
            a loss scale; ``precision.prepare(model)`` makes the model run in the mode. Default: "fp32", which has
            neither.
        accumulation_steps: Number K of micro-batches per accumulation window; a micro-batch is one call of `backward`.
            Without ``final=True``, `step` does nothing before the K-th micro-batch; `zero_grad` clears nothing from the
            first micro-batch until `step`. The gradient is the mean over the window. None (default): gradients are summed
            until you call `step`.
        data_parallel: The `DistributedDataParallel` (torch's or Megatron's) or `fully_shard` module that averages
            gradients in the last micro-batch of a window. A list of modules on a rank with several pipeline stages.
            None (default): `step` averages the gradients. `step` also averages the gradients of parameters that
            `fully_shard` left out. A parameter that torch's `DistributedDataParallel` does not have is an error.
        average_data: True (default): the optimizer or ``data_parallel`` averages gradients over the data axes. False:
            other code averages them. In both cases the optimizer sums partial gradients and the gradients of tied
            parameters.
        overlap: True: reduce each gradient bucket over the data axes as soon as backward has filled it and the buckets
            before it, in the last micro-batch of a window. If you decide when to step, run the other micro-batches
            under `no_sync`. Gradients of DTensors, of owned parameters and of uneven shards are reduced after backward,
            and so are gradients that are also summed over other axes (partial and tied gradients). If the model may
            issue collectives over a data axis (experts, context parallelism; see `Sharded`), all gradients are reduced
            after backward, because ranks could otherwise wait for each other. False (default): `step` reduces gradients.
        compression: How the optimizer reduces gradient buckets, such as `Bf16Compression`. None (default): in the
            gradients' own dtype. It has no effect on `Sharded`, which has its own ``compression`` argument, or on a
            ``data_parallel`` module.
        bucket_bytes: Maximum size of a gradient bucket in bytes; a larger gradient has a bucket of its own. None
            (default): 32 MiB; 16 MiB for buckets that are reduced during backward with ``overlap=True``; 8 MiB with
            ``sum_order="fixed"``. Smaller buckets need more collectives. It has no effect on `Sharded`, whose buckets
            have 32 MiB.
        states: One state placement, or several of different classes: `Sharded`, `Offloaded`, `HalfStates`, `Replayable`,
            or a `StatePlacement` of your own. With `Sharded` and `Offloaded`, the param groups hold other tensors than
            the model, such as shards (`stepped_tensors`). Default: none.
        check_replicas: When to compare replicas of parameters and of their reduced gradients bit by bit; only
            `Fingerprints` distinguishes NaNs, and 0 from -0. If they differ, every rank raises `ReplicaMismatchError`
            before anything is stepped.
            ``"first"`` (default): in the first step with a finite norm, and again after `add_param_group` and `refresh`.
            This finds different seeds on replicas, a missing all-reduce, a sharded weight declared ``P()``, different
            batches on tensor-parallel ranks, and a replica declared sharded (ValueError). If gradients of replicas are
            zero in that step, such as those of LoRA's factor A while B is zero, the next step compares once more.
            True: before every step, for debugging. This reads all parameters and gradients once more and costs one host
            synchronization per step.
            False: never, for replicas that may differ by rounding (see `align_replicas`).
            `Fingerprints`: as ``"first"``, and then every ``Fingerprints.every`` steps, including optimizer states,
            without host synchronization.
        commit: A function without arguments that each rank calls once before each update, after the gradients are
            reduced. It returns a bool, or a 0-dim bool tensor, which the host does not read from a GPU. If it returns
            False on any rank, all ranks skip the step; the loss scale does not count this as an overflow. If the
            function raises on a rank, all ranks skip the step, and this rank raises the exception at the end of `step`.
            None (default): no rank can reject a step.
        on_nonfinite: The effect of a non-finite norm. ``"skip"`` (default): every rank skips the step, and 50
            consecutive skips are an error (`Skip` sets another number). ``"raise"``: every rank raises FloatingPointError
            with the parameters' names (one or more host synchronizations per step).
        on_missing_params: The effect of trainable parameters of the model that no `ParallelOptimizer` has, such as the
            parameters of a module that was replaced after the optimizer was made. In the first step every rank raises
            RuntimeError with their names (``"raise"``, default) or warns (``"warn"``). The step can find parameters of
            the modules in ``data_parallel`` and of the models that `for_model` and `Booster` get, not of other models.
        sum_order: The order in which gradients are summed over micro-batches and data ranks. ``"any"`` (default): the
            fastest order, whose rounding depends on the number of data ranks. ``"fixed"``: a binary tree over all
            micro-batches of a window. Weights are then bitwise equal on any number of data ranks D that run the same
            D * K micro-batches; see the page "How to train bitwise equally on any number of data ranks". Needs
            ``accumulation_steps``.

    Raises:
        ValueError, TypeError: On every rank, if an argument is out of range on any rank, if a parameter is undeclared,
            complex or sparse or does not fit its declared layout, if ranks declare different layouts, or if torch can't
            step the optimizer on a GPU. The torch optimizer is then unchanged. If ``registry`` is not a
            `ProcessGroupRegistry`, only this rank raises TypeError.
        RuntimeError: On every rank: ranks are in different calls of this library.
    Collectives: object all-gathers in the constructor, in the first and the 16th step and, with master weights or other
        copies of weights, in the second step. `add_param_group` and `refresh` also have object all-gathers, and steps
        are then counted again from 1. With default arguments, a step has one all-reduce per gradient bucket and one for
        the norm.
    Host synchronization: in a step none, except for options above that need it, in steps with an object all-gather, and in
        steps that compare replicas for ``check_replicas="first"``.
    """

    steps_windows = True  # with ``accumulation_steps``, `step` does nothing before the last micro-batch of a window
    _step_supports_amp_scaling = True  # a GradScaler then calls `step` on every rank, overflow or not
    last_stats: GradStats | None

    _setup: Setup
    _device: torch.device
    _clip: ClipState | None  # the rule of ``max_norm`` and its state
    _chain: TransformChain
    # The following objects are replaced or updated when param groups are added or refreshed:
    _table: ParamTable
    _completion: GradientCompletion
    _clipper: GradientClipper
    _agreement: StepAgreement | None  # None if there is only one rank
    _grad_sync: GradSyncController | None  # the controller that the property `grad_sync` returns
    _micro_batch: Callable[..., AbstractContextManager[None]]
    _model_params: Sequence[Tensor]  # the parameters whose gradients backward writes

    def __init_subclass__(cls) -> None:
        """Track the constructor of a subclass, and `step`, `backward` and clipping methods that it overrides.

        Reports of hangs then name these calls.
        """
        super().__init_subclass__()  # `Generic` sets the type parameters of the subclass
        methods = {"step", "backward", "clip_grads", "clip_grad_by_norm", "clip_grad_by_value"}
        for name in cls.__dict__.keys() & methods:
            setattr(cls, name, public_call(cls.__dict__[name]))
        cls.__init__ = public_constructor(cls.__init__)  # type: ignore[method-assign]

    @overload
    def __init__(
        self: ParallelOptimizer[GradStats],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        registry: ProcessGroupRegistry,
        *,
        accumulation_steps: None = None,
        **options: Unpack[AllOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: ParallelOptimizer[GradStats | None],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        registry: ProcessGroupRegistry,
        *,
        accumulation_steps: int | None,
        **options: Unpack[AllOptions],
    ) -> None: ...
    @public_constructor
    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        registry: ProcessGroupRegistry,
        *,
        max_norm: ClipSpec = None,
        norm_type: float = 2.0,
        reduction: Reduction = "packed",
        per_parameter_norms: bool = False,
        precision: Mode | Precision = "fp32",
        accumulation_steps: int | None = None,
        data_parallel: nn.Module | Sequence[nn.Module] | None = None,
        average_data: bool = True,
        overlap: bool = False,
        compression: CommHook | None = None,
        bucket_bytes: int | None = None,
        states: StatePlacement | Sequence[StatePlacement] = (),
        check_replicas: CheckReplicas = "first",
        commit: Commit | None = None,
        on_nonfinite: OnNonfinite = "skip",
        on_missing_params: OnMissingParams = "raise",
        sum_order: SumOrder = "any",
        **other: object,
    ) -> None:
        # torch's own __init__ is not called, because the wrapped optimizer has the parameters and the state.
        self.optimizer = optimizer = as_one(optimizer, registry)
        self._optimizer_step_pre_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._patch_step_function()
        _leave_uncompiled(type(self))
        self._engine = UpdateEngine(optimizer)
        self.registry, self.on_nonfinite = registry, on_nonfinite
        options: dict[str, Any] = {
            "max_norm": max_norm,
            "norm_type": norm_type,
            "reduction": reduction,
            "per_parameter_norms": per_parameter_norms,
            "precision": precision,
            "accumulation_steps": accumulation_steps,
            "data_parallel": data_parallel,
            "average_data": average_data,
            "overlap": overlap,
            "compression": compression,
            "bucket_bytes": bucket_bytes,
            "states": states,
            "check_replicas": check_replicas,
            "commit": commit,
            "on_nonfinite": on_nonfinite,
            "on_missing_params": on_missing_params,
            "sum_order": sum_order,
        }
        wrong = replace_deprecated(options, other, "ParallelOptimizer")
        wrong = wrong or wrong_arguments(other, optimizer, ParallelOptimizer)
        self._setup = Setup(optimizer, registry, **options, wrong_call=wrong)
        self._given = [named_params_of([group]) for group in self.param_groups]
        self._groups, left_out = self._setup.with_spec(self._given)
        with unchanged(optimizer):
            plan, thresholds, self._agreement = self._setup.agreed_plan(self._groups, [name for name, _ in left_out])
            leave_out(optimizer, [param for _, param in left_out])
            self._clip, self.precision = in_use(max_norm), self._setup.mode
            self._device = self._setup.device_of(self._groups)
            self.loss_scale = self.precision.make_loss_scale(self._device)
            scaled, alone = self.loss_scale is not None, self._agreement is None
            self._window: Window = Window(accumulation_steps, scaled, alone)
            self._scale = None if self.loss_scale is None else self.loss_scale.scale
            self._scaled_loss: weakref.ref[Tensor] | None = None  # the last result of scale_loss
            self._chain = self._setup.chain(plan)
            self._chain.left_out = left_out
            self._model = ModelParams(modules_in(self._setup.data_parallel), on_missing_params)
            self._bind(plan, thresholds)
            self._skips = SkipMonitor(self._device)
            self.last_stats: GradStats | None = None
            guard_calls(optimizer, self)
        record_remains(optimizer, self._model_params, left_out)

    @classmethod
    def for_model(cls, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> ParallelOptimizer[Any]:
        """Wrap a model's optimizer, with layouts and process groups inferred from the model's parameters.

            optimizer = ParallelOptimizer.for_model(model, torch.optim.AdamW(model.parameters(), fused=True), max_norm=1.0)

        It needs no registry and no declarations. The layouts are inferred from the device meshes of DTensors
        (`fully_shard`, `parallelize_module`, experts on another mesh), or from the meshes of a Transformers model that
        `from_pretrained` has sharded. Other undeclared parameters count as replicated; the first step compares the
        replicas, unless ``check_replicas=False``. `DistributedDataParallel` and `fully_shard` modules within the model
        become ``data_parallel``.

        Args:
            model: The model, or a wrapper around it (``torch.compile``, PEFT, a module of your own).
            optimizer: As in the constructor.
            options: As in the constructor.
        Raises: As the constructor and `meshstep.parallel.registry_of`; and ValueError on every rank, if no common axes,
            each with one role, fit all device meshes.
        Collectives: as the constructor, and one more object all-gather, except for a model that `from_pretrained` sharded.
        """
        registry, modules = registry_for(model), averaging_modules(model)
        data_parallel = {"data_parallel": modules[0] if len(modules) == 1 else modules} if modules else {}
        made = cls(optimizer, registry, **data_parallel | options)
        made._compare_with(model)
        return made

    def _compare_with(self, *modules: nn.Module) -> None:
        """Make the first step search ``modules`` instead of ``data_parallel`` for parameters that no optimizer has."""
        self._model.modules[:] = modules

    # torch's optimizer interface -------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the wrapped optimizer's param groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Return the wrapped optimizer's state."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the wrapped optimizer's defaults."""
        return self.optimizer.defaults

    # The accumulation window -----------------------------------------------------------------------------------------

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale, for code within `window` that calls backward itself.

        Within ``window(weight=0)``, the result is also multiplied by 0.

        Args:
            loss: 0-dim. In modes with a loss scale, a half-precision loss is cast to float32, because it could overflow
                when it is scaled. In other modes a loss without a weight is returned unchanged.
        Raises:
            TypeError: ``loss`` is not a tensor.
        """
        check_loss(loss, "scale_loss")
        self._window.calls += 1
        if self.loss_scale is None:
            return self._window.mask_loss(loss)
        self._window.scaled_losses += 1
        scaled = (loss if loss.dtype == torch.float64 else loss.float()) * self.loss_scale.scale
        scaled = self._window.mask_loss(scaled)
        self._scaled_loss = weakref.ref(scaled)
        return scaled

    def backward(self, loss: Tensor | None, *, weight: float | Tensor | None = None, **kwargs: Any) -> None:
        """Run the backward of one micro-batch: scale the loss, and call ``loss.backward(**kwargs)``. Gradients add up.

        Every rank of a pipeline stage must make the same number of calls before `step`. With weights, the number must
        be equal only on ranks that see the same samples, such as tensor-parallel ranks. If the numbers differ, the step
        is skipped; see `step`.

        Args:
            loss: 0-dim; None on a rank without a batch in this micro-batch. None is a loss of 0 and counts as a
                micro-batch: without weights the mean is over all data ranks and micro-batches, including this one. To
                leave such a rank out of the mean, pass weights on all ranks, and ``weight=0`` with None. If the backward of
                the model communicates, as with `DistributedDataParallel` and `fully_shard`, pass the loss of any samples
                with ``weight=0``.
            weight: The number of items, such as tokens, whose losses are summed in ``loss``. The gradient is divided by
                the sum of the weights over the window and all data ranks. A number, or a 0-dim tensor. It must be equal
                on ranks that see the same samples. 0: the loss is multiplied by 0, so the micro-batch adds nothing to the
                gradients, even if the loss is NaN. Its backward runs, so gradients are NaN if a derivative of the loss
                is not finite, such as that of a sum divided by 0. None (default): the loss is a mean. With
                ``accumulation_steps`` the gradient is then the mean over the window.
            kwargs: Keyword arguments of `torch.Tensor.backward`.

        Raises:
            TypeError: The loss is not a tensor, or the weight is neither a number nor a 0-dim tensor.
            ValueError: The window is full; only some micro-batches of a window have a weight; or a weight, given as a
                number, is negative or not finite.
            RuntimeError: One of these cases:

                * Other code cleared gradients within the window or, with ``accumulation_steps``, called
                  ``loss.backward()`` within it.
                * The gradients of the window are already clipped, or an earlier backward of the window has reduced them
                  (``overlap=True``).
                * With ``Sharded(gradients=True)``, `zero_grad` of this optimizer was not called after the previous step.
                * With ``sum_order="fixed"``, a parameter has a gradient before the micro-batch, even a gradient of zeros.
                * With ``overlap=True`` or ``Sharded(gradients=True)``, a parameter got a second gradient in one backward
                  after the first had been reduced, as with re-entrant activation checkpointing.
                * An earlier backward of the window raised: call `zero_grad`, which then abandons the window. Or any
                  earlier backward raised within a `fully_shard` module in ``data_parallel``, and its ``reset_iter_state``
                  (torch 2.14 or later) was not called.
                * The loss is a result of `scale_loss`, or the call is within `window`.
                * A CUDA graph captures the call and could not add ``weight``.
        Collectives: those in the backward of the model and of ``data_parallel``, those of ``Sharded(gradients=True)``, and
            those of ``overlap=True``.
        Host synchronization: none by this method.
        """
        if loss is not None:
            check_loss(loss, "backward")
        if loss is not None and self._scaled_loss is not None and self._scaled_loss() is loss:
            raise RuntimeError(
                "optimizer.backward was given the result of optimizer.scale_loss(loss), and would multiply it by the loss "
                "scale again: write optimizer.backward(loss). scale_loss is for code that calls loss.backward() within "
                "`with optimizer.window():`"
            )
        with _StepCall("backward", self.registry, self._chain), self._micro_batch(weight):
            if loss is not None:
                loss = self._window.mask_loss(loss) if self.loss_scale is None else self.scale_loss(loss)
                loss.backward(**kwargs)

    @contextmanager
    def window(self, *, weight: float | Tensor | None = None) -> Iterator[None]:
        """Treat the backward calls of other code as one micro-batch. `Pipeline` does this for a pipeline schedule.

            with optimizer.window():
                engine.train_batch(inputs)  # its loss function ends with optimizer.scale_loss(loss)
            optimizer.step()

        Every rank must enter the context, with or without a batch.

        Args:
            weight: The number of items, such as tokens, whose losses are summed in the loss. None (default): the loss
                is a mean. As in `backward`, but with 0 only losses from `scale_loss` are multiplied by 0.
        Raises, collectives, host synchronization: as in `backward`.
        """
        with track_call("window", self.registry), self._micro_batch(weight, several=True):
            yield

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context manager in which ``data_parallel`` or ``overlap`` reduces no gradients during backward.

        Within it, run forward and backward of all micro-batches of a window except the last one. It is only needed
        without ``accumulation_steps``.
        """
        return nullcontext() if self._grad_sync is None else self._grad_sync.off()

    def mark_last_micro_batch(self) -> None:
        """Make the next backward reduce gradients, although ``accumulation_steps`` micro-batches have not been run.

        Call it before the forward of the last micro-batch of a short window, and ``step(final=True)`` after the
        backward. It is needed with `fully_shard`, and with Megatron's ``overlap_grad_reduce``, because these can't
        reduce gradients after the backward.
        """
        if self._grad_sync is not None:
            self._grad_sync.set(True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the stepped tensors and of the model parameters.

        With ``accumulation_steps`` it clears nothing after the first micro-batch of a window, with two exceptions. If a
        backward of the window raised, or if the call is in an ``except`` block for an error that was raised after the
        last micro-batch began, it clears all gradients and abandons the window.

        Args:
            set_to_none: True (default): set gradients to None. False: fill them with zeros.
        Raises:
            RuntimeError: `fully_shard` has gradients that it has not reduced.
        """
        if self._window.may_clear():
            self.check_zero_grad()
            self._chain.clear(set_to_none)
            self._completion.forget_arrived()
            self._window.clear()
            if self._grad_sync is not None:
                self._grad_sync.clear()
                self._grad_sync.expect(self._window)

    def check_zero_grad(self) -> None:
        """Raise RuntimeError if `fully_shard` has gradients that it has not reduced, which `zero_grad` can't clear.

        Collectives: none. Host synchronization: none.
        """
        if self._grad_sync is not None:
            self._grad_sync.check_clearing(self._window.sync_skipped)

    # The step --------------------------------------------------------------------------------------------------------

    @renamed_arguments(last="final")
    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None, *, final: bool = False) -> Stats_co:  # type: ignore[override]
        """Reduce, measure and clip the gradients, step on every rank or on none, and update the loss scale.

        Args:
            closure: Must be None (default); torch's interface has this argument.
            final: True: step now, although fewer than ``accumulation_steps`` micro-batches were run, as at the end of
                an epoch. The gradient is the mean over these micro-batches. Default: False.
        Returns:
            GradStats, with tensors on the device. None if the window has fewer than ``accumulation_steps``
            micro-batches or, with ``final=True``, no micro-batch; `step` then changes nothing.
        Raises:
            FloatingPointError: On every rank: the norm is non-finite and ``on_nonfinite="raise"``, or too many
                consecutive steps were skipped for a non-finite norm; this error comes at most 16 steps late.
            ReplicaMismatchError: On every rank: replicas differ. After the first comparison, `Fingerprints` raises it 16
                steps late, but at once with ``on_nonfinite="raise"``.
            TypeError: A gradient is complex or sparse: in the first step every rank raises; later only the rank with the
                gradient raises, and all ranks skip the step. Or on this rank: a ``"max_norm"`` of a param group is not a
                number; all ranks skip the step.
            ValueError: A closure is given, or, on every rank, shards of a parameter are replicas (see
                ``check_replicas``), or a check of the first step finds a wrong set-up, such as a
                `DistributedDataParallel` around sharded parameters. Or on this rank: the gradient of a DTensor has
                unsupported placements or is no DTensor, or a ``"max_norm"`` of a param group is invalid, or changed
                without `refresh` although some ranks have fewer param groups; all ranks skip the step.
            Exception: On this rank: the exception of ``commit``, or of a `StepObserver` before the update; all ranks
                skip the step. Or the exception of a `StepObserver` around the update; the step is taken.
            RuntimeError: One of these cases:

                * On this rank, and all ranks skip the step: a backward of the window raised, without ``data_parallel``
                  and with ``sum_order="any"``; master weights can't be updated, usually because other code wrote the
                  model's weights; or a parameter was unfrozen without `refresh`.
                * On this rank: a GradScaler calls `step`, and is torch's own or does not work with ``precision`` or
                  ``states``; `fully_shard` or Megatron's ``overlap_grad_reduce`` has not reduced the window's gradients
                  (see `mark_last_micro_batch`); a backward of the window raised in other cases, or bypassed the
                  optimizer after gradients were reduced; with ``Sharded(gradients=True)``, the gradients of the previous
                  step were not cleared; a CUDA graph can't capture the step (see `not_captured`); or a parameter was
                  converted to another dtype or device.
                * On every rank, in the first step: there are no gradients; a pipeline schedule divided gradients twice;
                  or the model has trainable parameters that no optimizer has (see ``on_missing_params``).
                * On every rank, in the second or 16th step: other code has written weights that the step would overwrite
                  (see `reload_from_model`).
                * On every rank, with ``accumulation_steps``: there are non-zero gradients, but the window has no
                  micro-batch.
                * On every rank, with a loss scale: the gradients are not from `backward` or `window`. Such a step is
                  skipped. The error comes 16 steps late, but at once in the first step and with
                  ``on_nonfinite="raise"``.
                * On every rank: ranks ran different numbers of micro-batches, only some ranks passed weights, or ranks
                  differ in weights, clipping, hyper-parameters or frozen parameters; a parameter that is replicated over
                  a model axis has a gradient on only some of its ranks; any rank had an error for which all ranks
                  skip the step; or an earlier step raised another error on some ranks only, after which all steps are
                  skipped. Such a step is skipped. The error comes 16 steps late, but at once with
                  ``on_nonfinite="raise"``, and in the first step unless only a gradient is missing. With
                  ``check_replicas="first"`` a missing gradient is a `ReplicaMismatchError` in the first step.
        Collectives, host synchronization: as in the class docstring.
        """
        if closure is not None:
            raise ValueError(
                "step takes no closure: it uses the gradients of earlier backward calls; call backward, then step"
            )
        # The stages and their collectives: docs/explanation/STAGES.md
        with _StepCall("step", self.registry, self._chain):
            window = self._window
            window.captured = torch.cuda.is_initialized() and check_captured("step", self.not_captured)
            window.scale = self._scale if not hasattr(self, "found_inf") else self._scale_of_scaler()
            if not window.ends(final, self._may_step_after_failed_backward):
                if window.is_unused:
                    check_window_is_used(window, self._model_params, self.registry)
                return cast("Stats_co", None)
            problem = None
            try:
                if window.pending_clip is not None and window.decision is None:
                    _, problem = self._clip_now(window.pending_clip)
                problem = self._completion(window, self._grad_sync) or problem  # reduces the gradients
                # Measure and decide (by default in one collective), unless an explicit clip did both in this window.
                decision = window.decision or self._decide(self._clip)
                reason = self._count_step(decision)
                if reason is None:
                    self._update(decision)
                if self.loss_scale is not None:
                    self.loss_scale.update(decision.stats.found_inf)  # after the update, which reads the old scale
                # Take both errors, so that none stays for the next step. Table of error routes: step/window.py, `defer`
                window_error, observer_error = window.take_error(), self._chain.take_error()
                problem = window_error or problem or decision.problem or observer_error
                self._finish_window(decision)
            except Exception as error:
                self._count_failure(error)
                raise
            if reason is not None:
                # Raised after the update of the loss scale, so that a caller may catch the error and go on.
                raise self._ended(reason) from problem
            if problem is not None:
                raise problem
            return cast("Stats_co", decision.stats)

    def _update(self, decision: StepDecision) -> None:
        """Run the update. With several ranks, an error in a step that all ranks skip is raised at the end of the step."""
        try:
            with self._missing_shards.filled(decision.shard_counts, decision.skipped) as skip_of:
                request = UpdateRequest(decision.skipped, decision.factor, skip_of=skip_of)
                self._engine.run(request, self._chain.around_update)
        except Exception as error:
            if self._window.alone or not bool(decision.skipped):
                raise
            self._window.defer(error)

    def _count_failure(self, error: Exception) -> None:
        """Count an error of a step or an explicit clip, after which ranks may differ (`Window.count_failure`)."""
        self._window.take_error()
        self._chain.take_error()
        self._window.count_failure(error)

    def _decide(self, clip: ClipState | None, in_place: bool = False) -> StepDecision:
        """Measure the gradients, and return the step decision. An error of this rank's thresholds is deferred."""
        window = self._window
        rule, error = self._clipper.add_thresholds(clip, self.optimizer.param_groups)
        if error is not None:
            window.defer(error)
        info = self._scale_info()
        return self._clipper(
            clip, info, in_place=in_place, earlier=window.decision, captured=window.captured, rule=rule
        )

    def _count_step(self, decision: StepDecision) -> str | None:
        """Count the step. Return the reason for an error that ends training, equal on every rank; None: no error."""
        facts = None if self._agreement is None else self._agreement.sent
        return self._skips.count(decision, self.on_nonfinite, self._window.captured, facts)

    def _finish_window(self, decision: StepDecision) -> None:
        self.last_stats = decision.stats
        self._window.close_after_step(self._model_params)
        if self._grad_sync is not None:
            self._grad_sync.discard_old_weights()
            self._grad_sync.expect(self._window)

    def _ended(self, reason: str) -> FloatingPointError | RuntimeError:
        """Return the error for ``reason``, a result of `SkipMonitor.count` or `SkipMonitor.poll`. Every rank must call it.

        The error names the parameters with non-finite gradients, the replicas that differ, or the settings that differ.
        It uses collectives and host synchronizations to collect the names.
        """
        if reason == DISAGREED and self._agreement is not None:
            return self._agreement.error(self._skips.facts)
        vote = self._clipper.vote
        if reason == REPLICAS_DIVERGED and vote is not None and vote.watch is not None:
            return vote.watch.error()
        names = nonfinite_names(self._table, self.registry)
        none = "none (the norm itself overflowed, or only gradients of an earlier step were not finite)"
        found = ", ".join(names) or none
        return FloatingPointError(
            f"{reason}; gradients that are not finite now: {found}. "
            "Nothing was stepped: look for a too large learning rate, a division by zero or a too large loss scale"
        )

    def _scale_of_scaler(self) -> Tensor | None:
        """Return the scale of a `GradScaler` that calls `step` and has not unscaled the gradients.

        None: the scaler has unscaled the gradients.

        It raises RuntimeError if the scaler is torch's own or cannot access the stepped gradients, or if the precision
        mode has a loss scale too.
        """
        self._window.forget_gradients()  # the scaler may have unscaled the gradients in place
        if not hasattr(self, "overflow_is_agreed"):
            raise RuntimeError(
                "torch's GradScaler decides on each rank separately whether to step: use "
                "meshstep.amp.GradScaler(registry), or leave the scaler out and give precision='fp16', with which the "
                "optimizer scales the loss"
            )
        if self.loss_scale is not None:
            raise RuntimeError(
                f"precision={self.precision.name!r} has a loss scale of its own: leave the GradScaler out, and call "
                "optimizer.backward(loss)"
            )
        if self._chain.pulling_grads:
            raise RuntimeError(
                "a GradScaler can't unscale the gradients that this optimizer applies: the optimizer updates shards or "
                "copies of the model's parameters (local tensors of DTensors, "
                f"precision={self.precision.name!r} or states={self._setup.states!r}). Leave the scaler out; if the loss "
                "must be scaled, give precision='fp16' or 'fp16_naive'"
            )
        scale: Tensor | None = getattr(self, "grad_scale", None)
        return scale

    def _scale_info(self) -> GradScaleInfo:
        """Return the numbers that divide this window's gradients, and the fields that are summed together with the norm.

        The fields are the window's weight and, with a loss scale, a vote that is negative if this rank's gradients are of
        an unscaled loss. With several ranks there are up to two more fields: a hash of the settings that ranks compare,
        and, if a parameter is sharded or there are several pipeline stages, for each parameter this rank's number of shards
        with a gradient.
        """
        window, agreement, is_summed = self._window, self._agreement, self._setup.sum_order == "fixed"
        if agreement is None:
            return window.scale_info(self.registry, window.scale, self._device, is_summed)
        facts = window.number_of_facts(agreement, self._completion.param_facts, self._device)
        info = window.scale_info(self.registry, window.scale, self._device, is_summed, *facts)
        return info._replace(pack=info.pack.with_fields(self._missing_shards.field()))

    # Explicit clipping -----------------------------------------------------------------------------------------------

    @public_call
    @torch.no_grad()
    def clip_grads(self) -> Stats_co:
        """Reduce, measure, unscale and clip the gradients now, in place, by the rule of ``max_norm=``.

        `step` then does not clip again. Use it to read the norm, or the clipped gradients, before the step. If the
        window has fewer than ``accumulation_steps`` micro-batches, the call changes no gradients, and `step` clips at
        the end of the window.

        Returns:
            GradStats with the norm before clipping; None if the window has fewer than ``accumulation_steps``
            micro-batches.
        Raises: As `step`, for errors of gradients and of their measurement.
        Collectives: those by which a step reduces and measures gradients. Host synchronization: as in a step.
        """
        return self._clip_or_ask("clip_grads", self.clip)

    @public_call
    @torch.no_grad()
    def clip_grad_by_norm(self, max_norm: float, norm_type: float | None = None) -> Stats_co:
        """Reduce, measure, unscale and clip the gradients now, in place, by the threshold ``max_norm``.

        The threshold replaces the constructor's rule for this step, and `step` does not clip again. If the window has
        fewer than ``accumulation_steps`` micro-batches, the call changes no gradients, and `step` clips by the
        threshold at the end of the window.

        Args:
            max_norm: The threshold for the global norm of the gradients without the loss scale; finite, > 0.
            norm_type: p >= 1, or inf. None (default): the ``norm_type`` of the optimizer.
        Returns:
            GradStats with the norm before clipping; None if the window has fewer than ``accumulation_steps``
            micro-batches.
        Raises: As `step`, for errors of gradients and of their measurement. Also:
            ValueError, TypeError: An argument is out of range or has a wrong type. Nothing is changed.
        Collectives: those by which a step reduces and measures gradients. Host synchronization: as in a step.
        """
        return self._clip_or_ask("clip_grad_by_norm", ByNorm(max_norm, norm_type))

    @public_call
    @torch.no_grad()
    def clip_grad_by_value(self, clip_value: float) -> Stats_co:
        """Reduce, measure and unscale the gradients now, and clamp each element to [-clip_value, clip_value] in place.

        `step` does not clip again. If the window has fewer than ``accumulation_steps`` micro-batches, `step` clamps at
        the end of the window.

        Args:
            clip_value: The bound of an element of a gradient without the loss scale; finite, > 0.
        Returns, raises, collectives, host synchronization: as in `clip_grad_by_norm`.
        """
        return self._clip_or_ask("clip_grad_by_value", ByValue(clip_value))

    def _clip_or_ask(self, call: str, clip: Clip | None) -> Stats_co:
        """Clip by ``clip`` and return the `GradStats` if the window is full. Otherwise return None; `step` clips later.

        An error about this rank's gradients alone is raised after clipping; the other ranks get a non-finite norm.

        ``call`` is the name of the public method, for errors. Without a rule (None), gradients are not clipped.
        """
        window = self._window
        window.captured = check_captured(call, self.not_captured)
        in_use(clip)  # checks the arguments of the rule
        self._setup.check_sum_order_of(clip)
        if not window.is_full:
            window.pending_clip = clip
            return cast("Stats_co", None)
        window.scale = self._scale
        try:
            decision, problem = self._clip_now(clip)
        except Exception as error:
            self._count_failure(error)
            raise
        if problem := window.take_error() or problem:
            raise problem
        return cast("Stats_co", decision.stats)

    def _clip_now(self, clip: Clip | None) -> tuple[StepDecision, Exception | None]:
        """Reduce, measure, unscale and clip the gradients in place. Collectives: those of a step.

        The error, or None, is about this rank's gradients alone. `step` raises it at its end, after all collectives
        that the other ranks expect.
        """
        window = self._window
        before = window.explicit
        window.explicit = (*before, clip)
        try:
            problem = self._completion(window, self._grad_sync)
            decision = self._decide(self._clip if clip is self.clip else in_use(clip), in_place=True)
        except BaseException:
            window.explicit = before
            raise
        window.clipped(decision)
        return decision, problem

    # Param groups, and objects that depend on them -------------------------------------------------------------------

    def _bind(self, plan: ReductionPlan, thresholds: AgreedThresholds) -> None:
        """Create the objects that depend on the plan: the table of stepped tensors, gradient reduction and clipping."""
        self._model_params = self._chain.params
        self._table = self._chain.table(plan)
        full: list[Any] = [part for part in parts_of(self.optimizer) if asks_other_ranks(part)]
        if full:
            full[0].bind_all(full, self._table, self.registry, self._setup.sum_order == "fixed")
        lay_out_states(self.optimizer)
        if self._clip is not None:
            self._clip.bind(plan.parameter_names)
        self._completion = self._setup.completion(self._table, self._chain, self._model, self._agreement)
        self._clipper = self._setup.clipper(self._table, self._chain, thresholds)
        self._missing_shards = MissingShards(self._table, self._device, with_empty=bool(full))
        self._grad_sync = self._setup.grad_sync(self._completion, getattr(self, "_grad_sync", None))
        registry = self.registry
        around = [self._completion.separate.micro_batch, *self._chain.around_backward]  # it ends last
        if self._grad_sync is not None:
            around.append(self._grad_sync.micro_batch)
            self._grad_sync.expect(self._window)
        self._micro_batch = partial(self._window.micro_batch, params=self._model_params, around=around)
        self._may_step_after_failed_backward = self._chain.completes_failed_backward and (
            self._grad_sync is None or self._grad_sync.completes_failed_backward
        )
        if registry.device.type == "cuda":  # else NCCL connects ranks in the first step, when memory is nearly full
            registry.connect(*self._clipper.plan.groups(self._setup.reduction))

    @public_call
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, and compare its declarations over all ranks. Every rank must call it at the same point.

            optimizer.add_param_group({"params": adapter.named_parameters(), "lr": 1e-4})

        The call also has the effect of `refresh` on parameters of other groups that you froze or unfroze.

        Args:
            param_group: As in torch's `add_param_group`. If a list of optimizers was wrapped, ``"optimizer"`` must be the
                index of the optimizer that gets the group.
        Raises: As the constructor; and RuntimeError, as `refresh`, for an unfrozen parameter in a
            `DistributedDataParallel`. Nothing is changed if it raises, with one exception: if a full-tensor optimizer, such
            as `Muon`, can't step a parameter, create the torch optimizer and the `ParallelOptimizer` again.
        Collectives: as the constructor, and one more object all-gather.
        """
        before = len(self.param_groups)

        def add_for_a_moment() -> tuple[dict[str, Any], list[tuple[str | None, Tensor]]]:
            # Runs before any tensor is replaced, so that after an error only the list of param groups must be restored.
            group = checked_group(param_group)
            own_index = group.get(OPTIMIZER_INDEX)
            match_names(group, [own for own in self.param_groups if own.get(OPTIMIZER_INDEX) == own_index])
            with own_calls:
                self.optimizer.add_param_group({**group, "params": group["params"][:]})
            added = named_params_of([group])
            known = {id(param) for params in self._given for _, param in params}
            if twice := sum(id(param) in known for _, param in added):
                raise ValueError(
                    f"{twice} of the new group's parameters are in another group already: leave them out of the new group. "
                    "If they were frozen before, call refresh(), and they train in their own group"
                )
            where = {str(param.device) for _, param in added}
            if not any(self._groups) and where - {str(self._device)}:
                raise ValueError(
                    f"the new group's parameters are on {', '.join(sorted(where))}, but this rank's loss scale and "
                    f"counters are on {self._device}, because this rank had no parameters when the optimizer was created: "
                    "call torch.cuda.set_device and initialize torch.distributed with the backend 'nccl', or create the "
                    "optimizer with a parameter on the GPU of each rank"
                )
            self._check_unfrozen()
            return group, added

        try:
            group, added = on_all_ranks(add_for_a_moment, self.registry)
            groups, left_out = self._setup.with_spec([*self._given, added])
            agreed = self._setup.agreed_plan(groups, [name for name, _ in left_out])
        finally:
            del self.param_groups[before:]
        self._chain.add_param_group(group, groups, agreed.plan)
        self._given.append(added)
        self._bind_again(groups, left_out, agreed)

    @public_call
    def refresh(self) -> None:
        """Train the parameters that you unfroze, and stop reducing the gradients of those that you froze.

            for param in model.head.parameters():
                param.requires_grad_(True)
            optimizer.refresh()

        Call it between two steps, on every rank at the same point. It is needed after you unfroze a parameter that was
        frozen when the optimizer was made or last refreshed. The parameter gets a gradient bucket and, in modes and state
        placements that use them, a master weight and shards. It trains in the param group that you put it in, as in a
        torch optimizer. So learning-rate schedules continue.

        Freezing needs no call: a frozen parameter is not stepped. After the call its gradient is no longer reduced, except
        by `Sharded`. Its optimizer state is kept, and is used again if you unfreeze the parameter and call `refresh`.

        Raises:
            ValueError, TypeError: On every rank, as the constructor; for example if ranks froze different parameters, or
                if an unfrozen parameter has no spec. Nothing is changed, except as in `add_param_group` for full-tensor
                optimizers.
            RuntimeError: On every rank: micro-batches were accumulated since the last step. Or ``data_parallel`` has a
                `DistributedDataParallel` with an unfrozen parameter: it does not reduce gradients of parameters that were
                frozen when it was made.
        Collectives: as the constructor, and one more object all-gather.
        """
        on_all_ranks(self._check_refresh, self.registry)
        groups, left_out = self._setup.with_spec(self._given)
        agreed = self._setup.agreed_plan(groups, [name for name, _ in left_out])
        self._chain.refresh(groups, agreed.plan)
        self._bind_again(groups, left_out, agreed)

    def _check_refresh(self) -> None:
        if self.micro_batches:
            raise RuntimeError(
                "refresh() was called with accumulated gradients. Call it after the step() that ends the accumulation, "
                "before the next backward"
            )
        self._check_unfrozen()

    def _check_unfrozen(self) -> None:
        modules = modules_in(self._setup.data_parallel) if getattr(self._grad_sync, "is_ddp", False) else []
        inside = {id(param) for module in modules for param in module.parameters()}
        for name, param in self._chain.unfrozen():
            if id(param) in inside:
                raise RuntimeError(
                    f"{name} was unfrozen, but the DistributedDataParallel in data_parallel= was created while {name} was "
                    "frozen, and does not reduce its gradient: create the DistributedDataParallel, the torch optimizer and "
                    "the ParallelOptimizer again, or use neither DistributedDataParallel nor data_parallel=, so that "
                    "step() averages the gradients"
                )

    def _bind_again(
        self, groups: list[list[tuple[str | None, Tensor]]], left_out: list[tuple[str, Tensor]], agreed: AgreedSetup
    ) -> None:
        plan, thresholds, self._agreement = agreed
        self._groups, self._chain.left_out = groups, left_out
        self._bind(plan, thresholds)
        record_remains(self.optimizer, self._model_params, left_out)

    @property
    def observers(self) -> tuple[StepObserver, ...]:
        """Return the observers (`StepObserver`) whose methods each step calls, in the order of their addition."""
        return tuple(self._chain.observers)

    def add_observer(self, observer: StepObserver) -> None:
        """Add an observer, whose methods are called in every step from now on.

        Earlier observers are called first in `local_grads` and `reduced_grads`; `update` encloses the `update` of earlier
        observers.

        Raises:
            TypeError: ``observer`` is not a `StepObserver`.
            ValueError: ``observer`` was added before.
        Collectives, host synchronization: none.
        """
        if not isinstance(observer, StepObserver):
            raise TypeError(f"add_observer({observer!r}): give an instance of a subclass of StepObserver")
        if any(other is observer for other in self.observers):
            raise ValueError(f"{type(observer).__name__} is an observer of this optimizer already: add it once")
        self._chain.set_observers([*self.observers, observer])

    def remove_observer(self, observer: StepObserver) -> None:
        """Stop calling an observer. Do nothing if it was not added."""
        self._chain.set_observers([other for other in self.observers if other is not observer])

    @torch.no_grad()
    def reload_from_model(self) -> None:
        """Copy the model's weights into the stepped tensors. Call it after your code wrote weights.

        It sets master weights, shards of ZeRO and offloaded copies to the model's weights, and drops the remainders of
        split master weights. Moments and step counts are unchanged. It is needed after a write through ``.data``: a
        step cannot always detect such a write, and then overwrites it. It is also needed if the error of a step tells
        you to call it. Call it between two windows on every rank that wrote weights; replicas must have equal weights.

            with torch.no_grad():
                for param in critic.parameters():
                    param.clamp_(-0.01, 0.01)
            optimizer.reload_from_model()

        Collectives: none. Host synchronization: with `Offloaded`, one per bucket.
        """
        for transform in self._chain.transforms:
            transform.reload()

    # Modes of the wrapped optimizer ----------------------------------------------------------------------------------

    @public_call
    def train(self) -> None:
        """Call ``train()`` of the wrapped optimizer, if it has this method, and write its weights into the model.

        Schedule-free optimizers have other weights in training than in evaluation. Other optimizers are unchanged.
        Every rank must call it.

        Collectives: those that write weights into the model, see `Sharded`.
        """
        self._change_mode("train")

    @public_call
    def eval(self) -> None:
        """Call ``eval()`` of the wrapped optimizer, as `train` does. Call it before an evaluation or a checkpoint."""
        self._change_mode("eval")

    def _change_mode(self, name: str) -> None:
        change = getattr(self.optimizer, name, None)
        if callable(change):
            with own_calls:
                change()
            self._chain.write_back()

    # Reports and state -----------------------------------------------------------------------------------------------

    @property
    def max_norm(self) -> float | Clip | None:
        """Return the threshold if gradients are clipped by a number, else the clipping rule; None: they are not clipped.

        You may set it between steps, on all ranks together. A rule that differs from the former rule starts from its
        initial state. An invalid value raises the error that the constructor would raise, and changes nothing. If the new
        rule needs other norms, such as norms per parameter, the next step on several ranks measures twice, with one host
        synchronization.

        Collectives: none.
        """
        clip = self.clip
        if isinstance(clip, ByNorm) and clip.norm_type is None and not callable(clip.max_norm):
            return clip.max_norm
        return clip

    @max_norm.setter
    def max_norm(self, value: ClipSpec) -> None:
        setup = replace(self._setup, max_norm=value)
        plan = setup.plan_for_clip(self.model_plan)
        if plan is not self.model_plan:
            self._table = self._chain.table(plan)
            self._clipper.replan(self._table.plan)
        self._setup, new = setup, in_use(value)
        if new is None or new.rule != self.clip:
            self._clip = new
        if self._agreement is not None:
            self._agreement.used_clip.set_rule(self.clip)
        if self._clip is not None:
            self._clip.bind(plan.parameter_names)

    @property
    def clip(self) -> Clip | None:
        """Return the clipping rule that ``max_norm`` describes; None: gradients are not clipped."""
        return None if self._clip is None else self._clip.rule

    @property
    def clip_state(self) -> Mapping[str, Tensor]:
        """Return the state tensors of the clipping rule by name.

        Empty if the rule has no state, and until a step or `state_hash` creates the tensors: before the first step, and
        after a load, a new rule or a change of the parameters. The tensors are on the device, and bitwise identical on all
        ranks. A tensor with one value per parameter is in the order of ``plan.parameter_names``. Host synchronization:
        none.
        """
        return {} if self._clip is None else dict(self._clip.tensors)

    @property
    def grad_norm(self) -> Tensor | None:
        """Return the last step's gradient norm, without loss scale and before clipping; None before the first step."""
        return None if self.last_stats is None else self.last_stats.total_norm

    @property
    def skipped_steps(self) -> int:
        """Return the number of steps that were skipped for any reason. Host synchronization: one."""
        return self._skips.total()

    @property
    def rejected_steps(self) -> int:
        """Return the number of steps that the ``commit`` function of any rank rejected. Host synchronization: one."""
        return self._skips.rejected()

    @public_call
    def poll(self) -> None:
        """Raise the errors of earlier steps that were not raised yet. Every rank must call it after the same step.

        Some errors of `step` come 16 steps late. Call `poll` before a checkpoint to raise them at once. A replay of a CUDA
        graph runs no Python code, so a replayed `step` cannot raise. Call `poll` every few dozen replays.

        Raises:
            FloatingPointError, RuntimeError: On every rank, as `step`: too many consecutive steps were skipped,
                gradients were not from `backward` or `window`, or settings differ between ranks.
            ReplicaMismatchError: On every rank: replicas differ.
        Collectives: only if it raises. Host synchronization: one; more if it raises.
        """
        if reason := self._skips.poll(self.on_nonfinite):
            raise self._ended(reason)

    @property
    def device(self) -> torch.device:
        """Return the device of the parameters; on a rank without parameters, the device of the rank's collectives."""
        return self._device

    @property
    def accumulation_steps(self) -> int | None:
        """Return the number of micro-batches per step; None: gradients are summed until you call `step`."""
        return self._window.steps

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches since the last step."""
        return self._window.micro_batches

    @property
    def model_param_groups(self) -> list[list[Tensor]]:
        """Return one list of model parameters per param group; backward writes the gradients of these parameters.

        In contrast, `param_groups` holds the stepped tensors, such as master weights and shards.
        """
        return [[param for _, param in group] for group in self._groups]

    @property
    def plan(self) -> ReductionPlan:
        """Return the reduction plan, which says how the norm is summed over ranks. ``print(optimizer.plan)`` shows it."""
        return self._clipper.plan

    @property
    def model_plan(self) -> ReductionPlan:
        """Return the reduction plan of the parameters in `model_param_groups`, in their order.

        `add_param_group` and `refresh` replace it. So does a new ``max_norm`` that needs parameter names, if it has none.
        """
        return self._table.model_plan

    @property
    def transforms(self) -> TransformChain:
        """Return the chain of transforms that replace model parameters by stepped tensors, such as master weights.

        The following expression finds the transform of one class:
        ``next(transform for transform in optimizer.transforms.transforms if isinstance(transform, MyTransform))``.
        """
        return self._chain

    @property
    def grad_sync(self) -> GradSyncController | None:
        """Return the controller of gradient reduction (``data_parallel``, ``overlap``, ``sum_order="fixed"``), or None.

        Without a controller, `step` reduces the gradients, or `Sharded` with ``gradients=True`` during backward.
        """
        return self._grad_sync

    def not_captured(self) -> list[str]:
        """Return the reasons why a CUDA graph can't capture `step` now; empty: a CUDA graph can capture it.

        A capture in spite of a reason raises RuntimeError with all reasons. Collectives, host synchronization: none.
        """
        scaler = (
            "a GradScaler calls step(): leave the scaler out, and give a precision with its own loss scale, such as "
            "'fp16'"
        )
        reads_norm = "on_nonfinite='raise' reads the norm on the host: leave it out, and call poll() between replays"
        reasons = [
            self._completion.not_captured(),
            registry_not_captured(self.registry, self._device),
            None if self._grad_sync is None else self._grad_sync.not_captured(),
            scaler if hasattr(self, "found_inf") else None,
            reads_norm if self.on_nonfinite == "raise" else None,
            *self._clipper.not_captured(),
            *(transform.not_captured() for transform in self._chain.transforms),
            *(observer.not_captured() for observer in self.observers),
            *self._window.not_captured(self._device),
            *update_not_captured(self.optimizer, self._device),
        ]
        return [reason for reason in reasons if reason is not None]

    def not_local(self) -> list[str]:
        """Return the reasons why gradients after backward differ from the gradients of this data rank's own samples.

        Empty: gradients are local to the data rank until `step`. With a reason, `StepObserver.local_grads` gets gradients
        that are already averaged, or partial. Each reason says what to change.

        Collectives, host synchronization: none.
        """
        return self._setup.not_local(self._grad_sync, self._model_params)

    def stepped_tensors(self) -> list[SteppedTensor]:
        """Return one record per tensor that the optimizer steps on this rank, in the order of the param groups.

        Each record has the tensor, the name of its model parameter, and the part of the full tensor that it holds.
        """
        return list(self._table)

    @public_call
    @torch.no_grad()
    def state_hash(self) -> Tensor:
        """Return a hash of the training state, 0-dim int64 in [0, 2^63), equal on all ranks. Every rank must call it.

            print(f"{optimizer.state_hash():016x}")

        Two runs have the same hash if their model parameters, stepped tensors, optimizer states, loss scale and state of
        the clipping rule are bitwise equal, even if the runs have different topologies and state placements with the same
        precision mode. Two different states have equal hashes with a probability of 2^-63. Parameters need names that
        are equal in both runs, and shards need a known place in the full tensor. States that the optimizer
        factors or packs per shard make the hash depend on the topology.

        Collectives: one all-reduce; none with one rank. Host synchronization: none until the result is read, unless
        tensors are copied between CPU and GPU, for example with `Offloaded` or step counts on the CPU.
        """
        clip = {} if self._clip is None else self._clip.tensors_on(self._device)
        others = {f"clip {name}": value for name, value in clip.items()}
        if self._scale is not None:
            others["loss scale"] = self._scale
        params = [local_parameter(given.param, self.registry.topology) for given in self._chain.given]
        return hash_of_state(self._table, params, self._chain.states(), others, self.registry, self._device)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: the wrapped optimizer's ``state_dict()``, and one more entry ``"meshstep"``.

        ``"meshstep"`` holds further state that a new process needs: precision mode, loss scale, master weights, the
        state of a clipping rule, counts of skipped steps, and the rank's coordinates on the mesh.

        Raises:
            ValueError: torch's functions of `torch.distributed.checkpoint.state_dict` call it, and would save wrong
                states or none.
        Collectives: none.
        Host synchronization: yes.
        """
        saved = self._saved()
        makes_states = bool(self.state) or self._setup.accumulation_steps is None
        check_caller(
            calling_module(), saved.coordinates, self._chain.stepped, self._model_params, makes_states=makes_states
        )
        return saved.state_dict(self._skips.state_dict())

    @public_call
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the `state_dict` of this rank, so that training continues bitwise identically. Every rank must call it.

        A plain state dict of the wrapped optimizer is also accepted, in a mode without master weights and loss scale, and
        without `Sharded`. If ``state_dict`` does not have the state that the clipping rule needs, the rule starts from its
        initial state, with a warning.

        The current accumulation window is abandoned. With ``accumulation_steps`` or ``weight=``, the gradients of its
        micro-batches are cleared, because the next window would divide them by a wrong number. Otherwise the gradients
        stay unchanged.

        Raises:
            ValueError: On every rank, if the state on any rank has another precision mode or does not fit the stepped
                tensors. Nothing is changed.
            RuntimeError: Gradients must be cleared, but `fully_shard` has not reduced them. Nothing is changed.
        Collectives: two object all-gathers; with `Sharded` also all-gathers of weights. Host synchronization: yes.
        """
        is_counted = self._window.micro_batches and (self._window.steps is not None or self._window.is_weighted)
        if is_counted:
            self.check_zero_grad()
        self._skips.load_state_dict(self._saved().load(state_dict))
        self._clipper.start_over()
        self._window.close()
        self._window.failed, self._window.last_failure = 0, ""
        if self._grad_sync is not None:
            self._grad_sync.expect(self._window)
        if is_counted:
            self.zero_grad()

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ValueError if `load_state_dict` would raise it because of this rank. Change nothing. Collectives: none."""
        self._saved().check(state_dict)

    def _saved(self) -> Saved:
        params = self._model_params
        where = Coordinates.of(self.plan, self.registry)
        return Saved(
            self.optimizer, self._chain, self.precision, self.loss_scale, params, self.registry, where, self._clip
        )

    def __repr__(self) -> str:
        how = f"max_norm={self.max_norm}, norm_type={self._setup.norm_type}, precision={self.precision.name!r}"
        return f"ParallelOptimizer({how}, {self.registry.topology!r}, {self.optimizer!r})"
