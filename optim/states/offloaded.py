"""Masters and optimizer states of some parameters in the CPU's memory, which is larger; their step runs there.

    device   parameters, gradients ----------+                           +--> parameters
    CPU                                      +--> step of the copies ----+

The parameters stay on the device, where gradients are completed, measured and clipped as always. A step copies the
gradients of the offloaded ones to the CPU, steps both sides, each by its own fused kernel, and copies the new weights back
in the parameters' dtype: 6 bytes an element go over the bus in modes with masters, 8 in float32. They travel in buckets of
32 MiB of gradients, one copy each way, and while one is stepped on the CPU the next ones come and the last one goes back:

    device      step of the rest
    down        1 | 2 | 3
    CPU             step 1 | step 2 | step 3
    up                       1      | 2      | 3
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...amp.casting import has_equal_values, is_half
from ...amp.master_weights import use_main_grad_
from ...parallel.layout.annotation import copy_annotation
from ...parallel.mesh.value_checks import check_scalar
from ..gradients.buckets import BUCKET_BYTES, flat_buckets
from ..gradients.in_place import clear_gradients, gradient_dtype
from ..norm.param_table import ParamPosition
from ..step.update import only, steps_in_parts
from ..step.update_request import Update, UpdateRequest
from ..step.window import Window
from .chain import Binding, Link, Placement, Position, Replacements

# Copies on the CPU, in buckets ----------------------------------------------------------------------------------------

# Parameters on a device and copies of them in the CPU's memory, between which one copy each way goes over the bus.
#
#     device   gradients --foreach--> flat ----------+        +--> flat --foreach--> parameters
#     CPU                                            +--> flat +--> flat
#                                               gradients      weights, as the copies are
#
# On a machine without a device there is no flat buffer between, and nobody waits.

ALIGNMENT = 64
"""Elements: each parameter begins where a GPU's kernels read several at a time."""


class HostBucket:
    """Some parameters of one dtype and device, and a copy on the CPU of each.

    Args:
        params: At least one.
        grad_dtype: Of their gradients.

    Attributes:
        copies: In the memory formats of the parameters, on which fused kernels rely; pinned where those are on a CUDA
            device.
    Memory on the CPU: that of the parameters and, from the first step on, of their gradients. On the device: a flat copy of
    the bucket's gradients or weights while they travel, none where it has one parameter.
    """

    def __init__(self, params: Sequence[Tensor], grad_dtype: torch.dtype) -> None:
        self.params, self.device, self._grad_dtype = list(params), params[0].device, grad_dtype
        self._pinned = self.device.type == "cuda"  # else copies to and from it wait
        self._strides = [torch.empty_like(param, device="meta").stride() for param in params]
        self._starts, self._numel = list[int](), 0
        for param in params:
            self._starts.append(self._numel)
            self._numel += -(-param.numel() // ALIGNMENT) * ALIGNMENT
        self._weights = self._flat(params[0].dtype)
        # With a version counter of their own each, by which masters see what was written to.
        self.copies: list[Tensor] = [nn.Parameter(view.data) for view in self._views(self._weights)]
        self._gradients: Tensor | None = None
        self._came: list[int] = []  # the parameters whose gradients are on their way
        self._arrived: torch.cuda.Event | None = None
        self.load(range(len(params)))

    def _flat(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self._numel, dtype=dtype, device="cpu", pin_memory=self._pinned)

    def _flat_there(self, host: Tensor) -> Tensor:
        """As large, on the device, for one copy: the only memory that the bucket takes there."""
        return torch.empty_like(host, device=self.device)

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Where each parameter lies in the flat buffer, with its shape and memory format."""
        places = zip(self.params, self._starts, self._strides, strict=True)
        return [flat[start:].as_strided(param.shape, stride) for param, start, stride in places]

    # To the CPU ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, written: Sequence[int]) -> None:
        """Set the copies to the parameters. Host reads: a wait for the device.

        Args:
            written: Those that differ, by which masters will know it.
        """
        self._down(self._weights, list(range(len(self.params))), self.params)
        self.wait()
        torch.autograd.graph.increment_version([self.copies[index] for index in written])

    @torch.no_grad()
    def start(self) -> None:
        """Start to copy the gradients that there are to the CPU. Host reads: none."""
        self._came = [index for index, param in enumerate(self.params) if param.grad is not None]
        if self._came:
            if self._gradients is None:
                self._gradients = self._flat(self._grad_dtype)
            gradients = [param.grad for param in self.params if param.grad is not None]
            self._down(self._gradients, self._came, gradients)

    def finish(self) -> None:
        """Give the copies these gradients. Host reads: a wait for them, and for nothing that the device was told later."""
        if self._gradients is not None and self._came:
            self.wait()
            views = self._views(self._gradients)
            for index in self._came:
                self.copies[index].grad = views[index]

    def _down(self, host: Tensor, which: list[int], tensors: list[Tensor]) -> None:
        """Start to copy tensors that are beside the parameters to their places in ``host``; it is overwritten elsewhere."""
        if self.device.type == "cpu" or len(self.params) == 1:
            self._copy([self._views(host)[index] for index in which], tensors)
        else:
            flat = self._flat_there(host)
            views = self._views(flat)
            torch._foreach_copy_([views[index] for index in which], tensors)
            host.copy_(flat, non_blocking=self._pinned)
        self._mark()

    def _copy(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        if self.device.type == "cpu":
            torch._foreach_copy_(targets, sources)
        else:
            targets[0].copy_(sources[0], non_blocking=self._pinned)

    def _mark(self) -> None:
        if self._pinned:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(self.device))

    def wait(self) -> None:
        """Wait for the last copy, either way."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None

    # To the device ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def send(self) -> None:
        """Start to copy the CPU's weights to the device; `wait` before those are written to again. Host reads: none."""
        if self.device.type == "cpu" or len(self.params) == 1:
            self._copy(self.params, self.copies)
        else:
            flat = self._flat_there(self._weights)
            flat.copy_(self._weights, non_blocking=self._pinned)
            torch._foreach_copy_(self.params, self._views(flat))
        self._mark()


# The placement and its transform --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Offloaded(Placement):
    """Keep and step the masters and optimizer states of some parameters on the CPU.

    Memory on the device for each offloaded element: that of the parameter and its gradient; 8 bytes of AdamW's state less,
    and 4 of master. On a machine without a device the copies lie beside the parameters and everything else is the same.
    Pinned memory on the CPU besides: a copy of parameters and gradients. What only a GPU shows: the memory it has left,
    less one flat bucket during a step; the time of the copies; and that the step waits for it: the CPU must have the
    gradients, and know whether to skip. So a step with offload can't be captured in a CUDA graph. And where two ranks hold
    copies of a parameter beside different others (pipeline stages with a tied embedding, owned parameters), one may step it
    on the CPU and one on the device, whose kernels may round differently; a fraction of 1.0 avoids that.

    Args:
        fraction: At least this fraction of the elements, counted over parameters that require gradients, is offloaded: as
            many whole parameters stay on the device, the largest first, as fit into the rest.
    torch's fused optimizers step bucket by bucket. Others, and `HalfStates` and stochastic rounding, whose draws count
    steps, step once, when all gradients have come; so does an optimizer with step hooks of its own.
    Collectives: none. Host reads, where the parameters are on a device: a step waits for what was decided, for each bucket
    of gradients, and when it ends for the last bucket of weights.
    """

    position: ClassVar[Position] = Position.DEVICE
    fraction: float = 1.0

    def check(self, binding: Binding) -> None:
        check_scalar(self.fraction, "fraction", "the fraction of the elements that goes to the CPU")
        if not 0 <= self.fraction <= 1:
            raise ValueError(
                f"Offloaded({self.fraction}): give the fraction of the elements that goes to the CPU, between 0 and 1"
            )
        precision, switch = binding.precision, binding.data_parallel
        if switch is not None and switch.is_ddp and precision.masters:
            raise ValueError(
                f"Offloaded with precision={precision.name!r} needs float32 gradients, which DistributedDataParallel does "
                "not make: leave data_parallel out, and the optimizer averages over the data axes itself"
            )

    def link(self, binding: Binding) -> Link:
        return OffloadTransform(self.fraction, binding.main_grads)


class OffloadTransform(Link):
    """Puts copies on the CPU in the place of some of an optimizer's parameters.

    Args:
        fraction: As for `Offloaded`.
        main_grads: Half-precision parameters have float32 gradients.
    """

    differs = True

    def __init__(self, fraction: float, main_grads: bool) -> None:
        self.fraction, self.main_grads = fraction, main_grads
        self._optimizer: torch.optim.Optimizer | None = None
        self.copies: dict[Tensor, Tensor] = {}  # on the CPU, of the parameters that are offloaded
        self.buckets: list[HostBucket] = []
        self._places: dict[Tensor, tuple[int, int]] = {}  # param group and position of each
        self._seen: dict[Tensor, tuple[int, int, tuple[int, ...]]] = {}
        self._copy_versions: dict[Tensor, int] = {}  # by parameter, after the last step

    def holds_back(self, tensor: Tensor) -> bool:
        return tensor in self.copies

    def not_captured(self) -> str | None:
        return "Offloaded waits for the GPU and steps on the CPU" if self.copies else None

    @torch.no_grad()
    def install(self, optimizer: torch.optim.Optimizer, positions: Sequence[ParamPosition]) -> Replacements:
        self._optimizer = optimizer
        trained = [at.tensor for at in positions if at.tensor.requires_grad]
        chosen = [trained[index] for index in offloaded([tensor.numel() for tensor in trained], self.fraction)]
        for tensor in chosen:
            if self.main_grads and is_half(tensor):
                use_main_grad_(tensor)
        new = list(_buckets(chosen))
        self.buckets += new
        made = {param: copy for bucket in new for param, copy in zip(bucket.params, bucket.copies, strict=True)}
        for param, copy in made.items():
            copy_annotation(param, copy)
        self.copies |= made
        for index, group in enumerate(optimizer.param_groups):
            self._places |= {param: (index, at) for at, param in enumerate(group["params"]) if param in made}
        # Weights of others may have been written since the last step.
        self._seen |= {param: _look(param) for param in made}
        self._copy_versions |= {param: copy._version for param, copy in made.items()}
        return {param: [(copy, 0)] for param, copy in made.items()}

    # The step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def bring(self, window: Window, averaged: bool) -> None:
        """Nothing for offloaded parameters, but to notice weights that somebody else has changed. Host reads: only then."""
        self._refresh()

    def _refresh(self) -> None:
        """See what was written to the parameters since the last step."""
        for bucket in self.buckets:
            written = [i for i, param in enumerate(bucket.params) if self._seen[param] != _look(param)]
            if written:
                bucket.load(written)  # in modes with masters they compare, and refuse other values
        self._note_versions()

    @torch.no_grad()
    def step(self, request: UpdateRequest, update: Update) -> None:
        """Copy the gradients to the CPU, step both sides, and copy the weights back, bucket by bucket where it may.

        Host reads: a wait for the gradients of each bucket, and for the last weights.
        """
        optimizer = self._optimizer
        assert optimizer is not None, "a link is installed before it is used"
        if self.in_parts and steps_in_parts(optimizer):
            self._step_in_parts(optimizer, request, update)
        else:
            for bucket in self.buckets:
                bucket.start()
            for bucket in self.buckets:
                bucket.finish()
            update(request)
            self._send(self.buckets)
        self._arrive()

    def _step_in_parts(self, optimizer: torch.optim.Optimizer, request: UpdateRequest, update: Update) -> None:
        """What stays on the device first, for nobody waits there."""
        for bucket in self.buckets[:1]:
            bucket.start()
        here = {self._places[param] for param in self.copies}
        groups = enumerate(optimizer.param_groups)
        rest = [(index, at) for index, group in groups for at in range(len(group["params"])) if (index, at) not in here]
        if rest or not self.buckets:
            with only(optimizer, rest):
                update(request)
        for bucket, following in zip_longest(self.buckets, self.buckets[1:]):
            if following is not None:
                following.start()
            bucket.finish()
            with only(optimizer, [self._places[param] for param in bucket.params]):
                update(request)
            self._send([bucket])

    def _send(self, buckets: Sequence[HostBucket]) -> None:
        for bucket in buckets:
            clear_gradients(bucket.copies, set_to_none=True)
            bucket.send()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the weights of the CPU to the device. Host reads: a wait for the last of them."""
        self._send(self.buckets)
        self._arrive()

    def reload(self) -> None:
        """Host synchronization: a wait for the weights."""
        for bucket in self.buckets:
            bucket.load(range(len(bucket.params)))
        self._note_versions()

    def _arrive(self) -> None:
        """Others may write to the CPU's weights between steps."""
        for bucket in self.buckets[-1:]:
            bucket.wait()  # the others were sent before it
        self._note_versions()

    def _note_versions(self) -> None:
        self._seen = {param: _look(param) for param in self.copies}
        self._copy_versions = {param: copy._version for param, copy in self.copies.items()}

    def has_copies(self) -> bool:
        return bool(self.copies)

    def find_overwritten(self) -> Tensor | None:
        """Return the first parameter that does not have its copy's values. Copies that were written to are left out."""
        for param, copy in self.copies.items():
            is_settled = self._seen[param] == _look(param) and self._copy_versions[param] == copy._version
            if is_settled and not has_equal_values(param, copy):
                return param
        return None

    def clear(self, set_to_none: bool) -> None:
        """Clear the gradients on both sides."""
        clear_gradients([*self.copies, *self.copies.values()], set_to_none)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The model may have been loaded before; masters, if there are any, then have the last word."""
        self._refresh()


def _look(param: Tensor) -> tuple[int, int, tuple[int, ...]]:
    return param.data_ptr(), param._version, param.stride()


def _buckets(params: Sequence[Tensor]) -> Iterator[HostBucket]:
    """Of parameters of one kind, in their order; at least one each, and no more gradients than a bucket's bytes."""
    kinds: dict[tuple[torch.device, torch.dtype, torch.dtype], list[Tensor]] = {}
    for param in params:
        kinds.setdefault((param.device, param.dtype, gradient_dtype(param)), []).append(param)
    for (_, _, dtype), members in kinds.items():
        numels = [param.numel() for param in members]
        for layout in flat_buckets(range(len(members)), numels, 1, BUCKET_BYTES // dtype.itemsize)[::-1]:
            yield HostBucket([members[index] for index in layout.indices], dtype)


def offloaded(numels: Sequence[int], fraction: float) -> list[int]:
    """Which of parameters with so many elements are offloaded: all but the largest that fit into the rest of the sum."""
    room = (1 - fraction) * sum(numels)
    chosen = []
    for index in sorted(range(len(numels)), key=lambda i: (-numels[i], i)):
        if numels[index] <= room:
            room -= numels[index]
        else:
            chosen.append(index)
    return sorted(chosen)


def reference_offloaded_step(
    params: Sequence[Tensor], gradients: Sequence[Tensor | None], optimizer: torch.optim.Optimizer
) -> None:
    """The same, plain: ``optimizer`` is over CPU copies of ``params``; whole tensors go there and back."""
    copies = [param for group in optimizer.param_groups for param in group["params"]]
    for copy, gradient in zip(copies, gradients, strict=True):
        copy.grad = None if gradient is None else gradient.to("cpu", copy.dtype)
    optimizer.step()
    for param, copy in zip(params, copies, strict=True):
        param.data.copy_(copy)
