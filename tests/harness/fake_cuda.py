"""Run whole steps on CUDA tensors without a GPU, with torch's fake tensors, which have a device and a shape but no
elements.

Every operator that a step would run on a GPU is logged. Operators on tensors of two devices raise an error, as on a
GPU; operators that would synchronize with the GPU or copy between host and GPU are recorded by name. Autograd cannot
run, so gradients are set by the test.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import torch
from fake_tensors import VIEWS, QuickFakeTensorMode, device_of, tensors_of, told_device
from kernels import kernels_of
from meshstep.optim.kernels.memory import is_non_overlapping_and_dense
from meshstep.parallel import ProcessGroupRegistry
from torch import Tensor
from torch._dynamo import trace_rules
from torch.utils._python_dispatch import TorchDispatchMode
from traffic import bytes_of

CUDA = torch.device("cuda", 0)
# Operators that need the elements on the host, or an amount of memory that depends on them.
_READS: tuple[str, ...] = tuple(
    f"aten.{name}" for name in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "unique", "masked_select")
)
_NO_LAUNCH: tuple[str, ...] = (
    *(
        f"aten.{name}."
        for name in f"{VIEWS} diagonal _unsafe_view empty new_empty empty_like empty_strided lift_fresh".split()
    ),
    "prim.",
    "c10d.",
)


@dataclass
class Log:
    """The operations that a block of code issued.

    Args:
        launches: Names of the operators that run on the GPU.
        kernels: The approximate number of kernels that they launch; see kernels.py.
        waits: Operators and synchronizations that block the host, with the place in meshstep that calls them.
        transfers: Copies between host and GPU, blocking or not.
        collectives: Collectives, with the device of the tensor that is sent.
        traffic: The bytes that the operators read and write on the GPU, if the log counts them; see traffic.py.
    """

    launches: list[str] = field(default_factory=list)
    kernels: int = 0
    waits: list[str] = field(default_factory=list)
    transfers: list[str] = field(default_factory=list)
    collectives: list[tuple[str, str]] = field(default_factory=list)
    traffic: int = 0


@cache
def _kind(func: Any) -> tuple[str, bool, bool, bool]:
    """Return the operator's name, and whether it reads a value, whether it copies, and whether it launches a kernel."""
    name = str(func)
    copies = name.startswith(("aten._to_copy", "aten.copy_", "aten.index_put", "aten.index."))
    return name, name.startswith(_READS), copies, not name.startswith(_NO_LAUNCH)


class _Logging(TorchDispatchMode):
    def __init__(self, log: Log, pinned: set[int], traffic: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log, self.pinned, self.traffic = log, pinned, traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # the most frequent call: any query of a fake tensor's device
            return told_device(args[0]) or func(*args)
        name, reads, copies, launches = _kind(func)
        before = {device_of(tensor).type for tensor in tensors_of((args, kwargs))}
        if reads and "cuda" in before:
            self.log.waits.append(f"{name} {innermost_calls()}")
        if name.startswith("c10d."):
            self.log.collectives += [(name, device) for device in before]
        # torch has no fake kernel for fused SGD and Adagrad, nor for updates with a tensor learning rate. These updates are
        # not run, because they would only change elements.
        update = name.startswith(("aten._fused_sgd", "aten._fused_adagrad")) or (
            name.startswith("aten._fused_") and name.endswith(".tensor_lr")
        )
        if name.startswith("aten._fused_") and "cuda" in before:
            check_fused(args)
        result = None if update else func(*args, **(kwargs or {}))
        after = {device_of(tensor).type for tensor in tensors_of(result)}
        if copies and len(before | after) == 2:
            self.log.transfers.append(f"{name} between devices {innermost_calls()}")
            if not self._without_waiting(args, kwargs or {}):
                self.log.waits.append(self.log.transfers[-1])
        if launches and "cuda" in before | after:
            self.log.launches.append(name)
            self.log.kernels += kernels_of(name, args)
            if self.traffic:
                self.log.traffic += bytes_of(func, args, kwargs or {}, result)
        return result

    def _without_waiting(self, args: Any, kwargs: Any) -> bool:
        """Return whether the operator is a non_blocking copy from or to pinned memory, so the host does not wait."""
        asked = bool(kwargs.get("non_blocking")) or (len(args) > 2 and args[2] is True)
        return asked and any(tensor.untyped_storage()._cdata in self.pinned for tensor in tensors_of(args))


def check_fused(args: Sequence[object]) -> None:
    """Raise the error of torch's fused CUDA optimizers unless each parameter, its gradient and its states are dense and
    have equal dtypes, shapes and strides. Step counts, which are 0-dim, are not checked."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg and arg[0].dim() + arg[0].numel() > 1]
    for first, *others in zip(*(tensors for tensors in lists if len(tensors) == len(lists[0])), strict=True):
        for tensor in (first, *others):
            strides = [
                (stride, expected)
                for size, stride, expected in zip(first.shape, tensor.stride(), first.stride(), strict=True)
                if size != 1
            ]
            equal = tensor.shape == first.shape and all(stride == expected for stride, expected in strides)
            if not equal or tensor.dtype != first.dtype or not is_non_overlapping_and_dense(tensor):
                raise RuntimeError(
                    "params, grads and states must have same dtype, device, and layout, but there are "
                    f"{first.dtype} {tuple(first.shape)} {first.stride()} and "
                    f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"
                )


def innermost_calls() -> str:
    """Return the two innermost stack frames within the library. (`traceback.extract_stack` would read each source
    file.)"""
    files = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None))
    inner = [f"{file.split('/meshstep/')[-1]}:{line}" for file, line in files if "/meshstep/" in file][:2]
    return "; ".join(reversed(inner))


class GeneratorOfAnyDevice(torch.Generator):
    """A generator for any device: random numbers of fake tensors are never drawn."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


class _Stream:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def wait_stream(self, other: _Stream) -> None:
        """Do nothing: operators are logged without their stream."""

    def synchronize(self) -> None:
        self.log.append(f"synchronize {innermost_calls()}")


class _Event(_Stream):
    def record(self, stream: _Stream | None = None) -> None:
        """Raise an error without a stream: torch would record on the current device, which may not be the tensor's."""
        if stream is None:
            raise AssertionError("Event.record() without a stream: give torch.cuda.current_stream(tensor.device)")


@cache
def _torchs_functions() -> dict[Any, Any]:
    """Build the table that torch's compiler builds on first use and after each new default group (25 ms).

    Built within `fake_cuda`, it would contain the replacements of some functions.
    """
    return trace_rules.get_torch_obj_rule_map()


@contextmanager
def fake_cuda(*, collectives_on: torch.device = CUDA) -> Iterator[Callable[..., Any]]:
    """Make all tensors that are created within the block fake. Yield a context manager that logs operations.

    The context manager's argument ``traffic`` says whether the log counts bytes. ``collectives_on`` is the value of
    `ProcessGroupRegistry.device` within the block.
    """
    pinned: set[int] = set()
    waits: list[str] = []

    def pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            if pin_memory:
                pinned.add(tensor.untyped_storage()._cdata)
                kept.append(tensor)  # kept alive, so that no other storage gets its address
            return tensor

        return made

    def equal(one: Tensor, other: Tensor) -> bool:
        """Return True, as fake tensors have no values to compare; record the host wait of torch.equal on CUDA tensors."""
        if "cuda" in (one.device.type, other.device.type):
            waits.append(f"aten.equal {innermost_calls()}")
        return True

    kept: list[Tensor] = []

    @contextmanager
    def logging(traffic: bool = False) -> Iterator[Log]:
        log = Log()
        waits.clear()
        with _Logging(log, pinned, traffic):
            yield log
        log.waits += waits

    _torchs_functions()
    with ExitStack() as stack:
        for owner, name, value in (
            (trace_rules, "get_torch_obj_rule_map", cache(_torchs_functions)),
            (torch.cuda, "Event", lambda: _Event(waits)),
            (torch.cuda, "Stream", lambda device: _Stream(waits)),
            (torch.cuda, "stream", lambda stream: nullcontext()),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
            # The device has no default here, because the library must not use the stream of the current device.
            (torch.cuda, "current_stream", lambda device: _Stream(waits)),
            (torch, "Generator", GeneratorOfAnyDevice),
            (torch, "equal", equal),
            *((torch, name, pinning(getattr(torch, name))) for name in ("zeros", "tensor", "empty", "empty_like")),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(mock.patch.object(ProcessGroupRegistry, "device", collectives_on))
        stack.enter_context(QuickFakeTensorMode(allow_non_fake_inputs=True))
        yield logging
