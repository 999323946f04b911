"""Simulate CUDA devices, streams, events and pinned memory on a CPU, and find accesses that no event orders.

A `DeviceTensor` has a CUDA device and real elements, which are in CPU memory. A dispatch mode runs each operator on the
elements at once, and notes its accesses to memory with the stream that would run it. The order of operations is that of
CUDA, and not the order in which the simulation runs them:

* An operation on a stream runs after earlier operations on the stream, after the events that the stream waited for, and
  after the host called it.
* An operation has finished, as the host sees it, only if the host waited for the stream, or for an event that was
  recorded after the operation.

A finding is a pair of accesses to the same memory without such an order, if at least one of them is a write.

C loops read memory without an operator. To detect their accesses, a copy to pinned memory runs as late as possible:
until the host waited for it, all bits of its target are ones (NaN, or -1). A copy from pinned memory compares its source
when the host has waited for it: the source must be unchanged.

Another finding is device memory that is freed while another stream may still use it, because the next operation on the
stream of its allocation may get this memory (`record_stream`).

Autograd cannot run, so gradients are set by the test; `set_gradients.run_backward` also runs the hooks of a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fake_cuda import GeneratorOfAnyDevice, innermost_calls
from meshstep.parallel import ProcessGroupRegistry
from meshstep.parallel.mesh.process_group_collectives import ALL_GATHER, REDUCE_SCATTER
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

Clock = dict["Stream", int]
"""Number of operations per stream that are known to be finished, or to come first."""

_SYNCHRONIZING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_unique2", "unique_dim", "masked_select")
# These operators use only shape, dtype and device of their argument.
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full")
_COLLECTIVES = ("all_reduce", "broadcast", "reduce", "all_to_all_single", ALL_GATHER, REDUCE_SCATTER)


class DeviceTensor(Tensor):
    """A tensor on a simulated CUDA device; ``elements`` are on the CPU."""

    elements: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, elements: Tensor, device: torch.device) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            elements.shape,
            strides=elements.stride(),
            storage_offset=elements.storage_offset(),
            dtype=elements.dtype,
            device=device,
        )
        made.elements = elements
        return made

    def __init__(self, elements: Tensor, device: torch.device) -> None:
        pass

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.elements}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} on a tensor of a simulated device, outside the simulation")


class Stream:
    """A stream of a simulated device. Operations on it run in order."""

    def __init__(self, simulation: Simulation, device: Any = None) -> None:
        self.simulation, self.device = simulation, simulation.device_of(device)
        self.cuda_stream = simulation.number()  # torch's name of the handle
        self.issued = 0
        self.clock: Clock = {}

    def issue(self) -> None:
        """Add an operation. It runs after all operations that the host has seen finish."""
        _merge(self.clock, self.simulation.host)
        self.issued += 1
        self.clock[self] = self.issued

    def wait_stream(self, other: Stream) -> None:
        _merge(self.clock, other.clock)

    def wait_event(self, event: Event) -> None:
        _merge(self.clock, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.simulation)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.simulation.wait(self.clock)

    def __repr__(self) -> str:
        return f"stream {self.cuda_stream} of {self.device}"


class Work:
    """A collective that runs on its own stream; ``event`` is recorded after it."""

    def __init__(self, event: Event, device: torch.device) -> None:
        self.event, self.device = event, device

    def wait(self) -> bool:
        """Let the current stream wait, as NCCL does. The host does not wait."""
        self.event.wait(self.event.simulation.current_stream(self.device))
        return True

    def is_completed(self) -> bool:
        return self.event.query()


class Event:
    """An event of a simulated stream. An event that was never recorded counts as completed, as in CUDA."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.clock = simulation, Clock()

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or self.simulation.current_stream()).clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.simulation.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        self.simulation.wait(self.clock)

    def query(self) -> bool:
        """Return whether the host has waited for the event, because an operation may run as late as that."""
        return all(self.simulation.host.get(stream, 0) >= count for stream, count in self.clock.items())


@dataclass(frozen=True)
class Access:
    """An access of an operation to a range of bytes.

    ``index`` is the operation's index on its stream, and ``end`` the offset after the last byte in the storage.
    ``call`` is the operator and the lines of the library that called it.
    """

    stream: Stream
    index: int
    start: int
    end: int
    writes: bool
    call: str

    def is_before(self, clock: Clock) -> bool:
        return clock.get(self.stream, 0) >= self.index

    def overlaps(self, start: int, end: int) -> bool:
        return self.start < end and start < self.end


@dataclass(eq=False)
class Memory:
    """The accesses to one storage.

    Args:
        storage: Keeps the address of the storage from being reused.
        allocated_on: The stream that was current when the memory was allocated; None for memory of the host. After the
            memory is freed, the next operation on this stream may get the memory.
        recorded: The streams of `record_stream`.
    """

    storage: StorageWeakRef
    is_pinned: bool = False
    allocated_on: Stream | None = None
    recorded: set[Stream] = field(default_factory=set)
    accesses: list[Access] = field(default_factory=list)


@dataclass(eq=False)
class Transfer:
    """A copy from or to pinned memory that the host has not waited for.

    ``access``, ``memory`` and ``view`` are the access, the memory and the tensor on the pinned side. ``elements`` are
    those that the copy reads or writes, at the time of the call.
    """

    access: Access
    memory: Memory
    view: Tensor
    elements: Tensor


class Simulation:
    """State of the simulated devices.

    Attributes:
        findings: One line per finding: unordered accesses, changed pinned memory, and memory that is freed too early.
        host: The operations that the host has seen finish.
        transfers: The number of copies from a device to pinned memory, and from it to a device.
    """

    def __init__(self, devices: int) -> None:
        self.findings: list[str] = []
        self.host: Clock = {}
        self.transfers = {"to the host": 0, "to a device": 0}
        self._numbers = 0
        self._memories: dict[int, Memory] = {}
        self._shared: list[Memory] = []  # device memory that several streams access
        self._running: list[Transfer] = []
        self._collective: Any = None  # the process group of the running collective
        self._collective_streams: dict[tuple[Any, torch.device], Stream] = {}
        self.current_device = 0
        self.default_streams = [Stream(self, index) for index in range(devices)]
        self._current_streams = list(self.default_streams)

    # Devices and streams -----------------------------------------------------------------------------------------------

    def number(self) -> int:
        """Return 0, 1, 2, ...: one number per stream."""
        self._numbers += 1
        return self._numbers - 1

    def device_of(self, device: Any = None) -> torch.device:
        """Return a CUDA device with an index; the current device for None or "cuda"."""
        if isinstance(device, int):
            return torch.device("cuda", device)
        device = torch.device("cuda" if device is None else device)
        return torch.device("cuda", self.current_device if device.index is None else device.index)

    def current_stream(self, device: Any = None) -> Stream:
        return self._current_streams[self.device_of(device).index]

    def exchange_device(self, index: int) -> int:
        """Set the current device unless ``index`` is negative, and return the previous one."""
        before = self.current_device
        self.current_device = before if index < 0 else index
        return before

    @contextmanager
    def in_stream(self, stream: Stream) -> Iterator[None]:
        """Make ``stream`` and its device current, as `torch.cuda.stream`."""
        index = stream.device.index
        device, before = self.exchange_device(index), self._current_streams[index]
        self._current_streams[index] = stream
        try:
            yield
        finally:
            self._current_streams[index] = before
            self.exchange_device(device)

    def synchronize(self, device: Any = None) -> None:
        device = self.device_of(device)
        accesses = (access for memory in self._memories.values() for access in memory.accesses)
        streams = {access.stream for access in accesses} | set(self._current_streams)
        for stream in streams:
            if stream.device == device:
                self.wait(stream.clock)

    def wait(self, clock: Clock) -> None:
        """Block the host until the operations of ``clock`` are finished, and finish their transfers."""
        _merge(self.host, clock)
        running, self._running = self._running, []
        for transfer in running:
            if not transfer.access.is_before(self.host):
                self._running.append(transfer)
            else:
                self._finish(transfer)

    def finish(self) -> None:
        for index in range(len(self.default_streams)):
            self.synchronize(index)

    # Memory --------------------------------------------------------------------------------------------------------------

    def memory_of(self, elements: Tensor) -> Memory:
        storage = elements.untyped_storage()
        found = self._memories.get(storage._cdata)
        if found is None:
            found = self._memories[storage._cdata] = Memory(StorageWeakRef(storage))
        return found

    def pin(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, whose memory is pinned from now on."""
        self.memory_of(tensor).is_pinned = True
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        if isinstance(tensor, DeviceTensor):
            return False
        found = self._memories.get(tensor.untyped_storage()._cdata)
        return found is not None and found.is_pinned

    def _access(self, elements: Tensor, stream: Stream, writes: bool, call: str) -> Access:
        """Note an access by the last operation of ``stream``, and find earlier accesses that may still run."""
        memory, (start, end) = self.memory_of(elements), _extent(elements)
        access = Access(stream, stream.issued, start, end, writes, call)
        self._compare(memory, access, stream.clock, str(stream))
        memory.accesses = [
            other
            for other in memory.accesses
            if not (
                other.is_before(stream.clock)
                and start <= other.start
                and other.end <= end
                and (writes or not other.writes)
            )
        ]
        memory.accesses.append(access)
        if memory.allocated_on not in (None, stream) and memory not in self._shared:
            self._shared.append(memory)
        return access

    def access_by_host(self, tensor: Tensor, writes: bool, call: str) -> None:
        """Find earlier accesses that may still run. Later operations run after this access, so it is not noted."""
        if self.is_pinned(tensor):
            memory, (start, end) = self.memory_of(tensor), _extent(tensor)
            access = Access(self.default_streams[0], 0, start, end, writes, call)
            self._compare(memory, access, self.host, "the host")

    def _compare(self, memory: Memory, access: Access, clock: Clock, actor: str) -> None:
        for other in memory.accesses:
            is_ordered = other.is_before(clock) or not (other.writes or access.writes)
            if not is_ordered and other.overlaps(access.start, access.end):
                verb, earlier = ("writes" if one.writes else "reads" for one in (access, other))
                kind = "pinned memory" if memory.is_pinned else "device memory"
                self.findings.append(
                    f"{actor} {verb} {kind} ({access.call}) before {other.stream} has finished the operation that "
                    f"{earlier} it ({other.call})"
                )

    def _issue(self, stream: Stream) -> None:
        """Add an operation to a stream. Find accesses of other streams to freed memory that the operation may get."""
        for memory in [one for one in self._shared if one.allocated_on is stream and one.storage.expired()]:
            self._shared.remove(memory)
            for access in memory.accesses:
                if access.stream not in memory.recorded and not access.is_before(stream.clock):
                    self.findings.append(
                        f"memory of {stream} was freed before {access.stream} has finished an operation ({access.call})"
                    )
        stream.issue()

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        self.memory_of(_elements(tensor)).recorded.add(stream)

    # Transfers -----------------------------------------------------------------------------------------------------------

    def _finish(self, transfer: Transfer) -> None:
        view, elements = transfer.view, transfer.elements
        if transfer.access.writes:
            view.copy_(elements)
        elif not torch.equal(_bits(view), _bits(elements)):
            self.findings.append(
                f"the host has written pinned memory while a copy may read it ({transfer.access.call})"
            )

    def _start(self, stream: Stream, pinned: Tensor, elements: Tensor | None, call: str) -> None:
        """Start a transfer as the last operation of a stream.

        ``elements`` are what the copy will write to ``pinned``; None: it reads ``pinned``.
        """
        memory, access = self.memory_of(pinned), self._access(pinned, stream, elements is not None, call)
        self._finish_in_order(memory, access)
        view = pinned.detach()
        self._running.append(Transfer(access, memory, view, view.clone() if elements is None else elements))
        self.transfers["to a device" if elements is None else "to the host"] += 1
        if elements is not None:
            _set_all_bits(view)

    def _finish_in_order(self, memory: Memory, access: Access) -> None:
        """Finish the transfers from and to the bytes of ``access`` that its stream runs before it."""
        before = [
            one
            for one in self._running
            if one.memory is memory
            and one.access.overlaps(access.start, access.end)
            and one.access.is_before(access.stream.clock)
        ]
        self._running = [one for one in self._running if one not in before]
        for one in before:
            self._finish(one)

    def copy(self, target: Tensor, source: Tensor, non_blocking: bool, call: str) -> None:
        """Copy between a device and the host, or between two devices."""
        if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
            stream, other = self.current_stream(source.device), self.current_stream(target.device)
            stream.wait_stream(other)  # torch orders the copy with the current streams of both devices
            self._issue(stream)
            self._access(source.elements, stream, False, call)
            self._access(target.elements, stream, True, call)
            target.elements.copy_(source.elements)
            other.wait_stream(stream)
        elif isinstance(target, DeviceTensor):
            stream = self.current_stream(target.device)
            self._issue(stream)
            if self.is_pinned(source):
                self._start(stream, source, None, call)
            self._access(target.elements, stream, True, call)
            target.elements.copy_(source)
            if not non_blocking:
                stream.synchronize()
        else:
            assert isinstance(source, DeviceTensor)
            stream = self.current_stream(source.device)
            self._issue(stream)
            self._access(source.elements, stream, False, call)
            pinned = self.is_pinned(target)
            if pinned:
                self._start(stream, target, source.elements.to(target.dtype, copy=True).expand_as(target), call)
            if not (pinned and non_blocking):
                stream.synchronize()
            if not pinned:
                target.copy_(source.elements)

    def collective(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of `torch.distributed` whose collective runs on a stream of its process group and device."""

        def run(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            device = next(one.device for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
            if device.type == "cpu":
                return call(*args, async_op=async_op, **kwargs)
            self._collective = kwargs.get("group")
            try:
                call(*args, async_op=True, **kwargs)
            finally:
                stream = self._collective_stream(device)
                self._collective = None
            for one in (*args, *kwargs.values()):
                if isinstance(one, DeviceTensor):
                    self.record_stream(one, stream)  # torch keeps the tensors until `wait`
            work = Work(stream.record_event(), device)
            if async_op:
                return work
            work.wait()
            return None

        return run

    def _collective_stream(self, device: torch.device) -> Stream:
        key = self._collective, device
        if key not in self._collective_streams:
            self._collective_streams[key] = Stream(self, device)
        return self._collective_streams[key]

    # Operators -----------------------------------------------------------------------------------------------------------

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator, and note its accesses."""
        name = func._schema.name.split("::")[1]
        if func is torch.ops.aten.is_pinned.default:
            return self.is_pinned(args[0])
        if func is torch.ops.aten._pin_memory.default:
            return self.pin(args[0].clone())
        if name in ("copy_", "_to_copy", "_foreach_copy_"):
            result = self._run_copy(func, name, args, kwargs)
            if result is not None:
                return result
        operands = list(_operands(func, args, kwargs))
        devices = {tensor.device for tensor, _ in operands if isinstance(tensor, DeviceTensor)}
        if len(devices) > 1 and not name.startswith("_foreach_"):
            raise RuntimeError(f"{func}: tensors on several devices: {sorted(map(str, devices))}")
        made_on = kwargs.get("device")
        if made_on is not None:
            made_on = torch.device(made_on)
            kwargs = {**kwargs, "device": "cpu"}
            if made_on.type == "cuda":
                devices.add(self.device_of(made_on))
        if kwargs.get("pin_memory"):
            raise NotImplementedError(f"{func} with pin_memory=True: call a patched function of torch")
        call = f"{name} {innermost_calls()}"
        streams: dict[torch.device, Stream] = {}
        if not _only_views(func):
            streams = {device: self.current_stream(device) for device in sorted(devices, key=str)}
            if func.namespace == "c10d":
                for device, stream in streams.items():
                    streams[device] = self._collective_stream(device)
                    streams[device].wait_stream(stream)
            for stream in streams.values():
                self._issue(stream)
            for tensor, writes in operands if name not in _LIKE else ():
                if isinstance(tensor, DeviceTensor):
                    self._access(tensor.elements, streams[tensor.device], writes, call)
                else:
                    self.access_by_host(tensor, writes, call)
            if name in _SYNCHRONIZING:
                for stream in streams.values():
                    stream.synchronize()
        wrappers = {id(t.elements): t for t, _ in operands if isinstance(t, DeviceTensor)}
        result = func(*_elements(args), **_elements(kwargs))

        if made_on is None and len(devices) > 1:
            pairs = zip(result or (), args[0], strict=False)
            return [self._wrap(one, like.device, wrappers, streams, call) for one, like in pairs]
        is_on_host = not devices or (made_on is not None and made_on.type == "cpu")
        if is_on_host:
            return result
        return self._wrap(result, self.device_of(made_on or next(iter(devices))), wrappers, streams, call)

    def _wrap(
        self,
        result: Any,
        device: torch.device,
        arguments: Mapping[int, DeviceTensor],
        streams: Mapping[torch.device, Stream],
        call: str,
    ) -> Any:
        """Return an operator's result with tensors on ``device``, and note the writes to new memory.

        Args:
            result: The result of the operator on the elements.
            arguments: The tensors among the operator's arguments, by the id of their elements.
            streams: The stream per device that runs the operator; empty: it returns views.
        """
        if isinstance(result, Tensor):
            if id(result) in arguments:
                return arguments[id(result)]
            if device in streams:
                self.memory_of(result).allocated_on = streams[device]
                if "empty" not in call.split()[0]:
                    self._access(result, streams[device], True, call)
            return DeviceTensor(result, device)
        if isinstance(result, (list, tuple)):
            return type(result)(self._wrap(one, device, arguments, streams, call) for one in result)
        return result

    def _run_copy(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a copy between devices and return its result. Return None for any other operator."""
        call = f"{name} {innermost_calls()}"
        if name == "_to_copy":
            source, device = args[0], kwargs.get("device")
            if device is None:
                return None
            device = torch.device(device) if torch.device(device).type == "cpu" else self.device_of(device)
            if device == source.device:
                return None
            non_blocking = bool(kwargs.get("non_blocking"))
            form = {"dtype": kwargs.get("dtype") or source.dtype, "device": "cpu"}
            elements = source.elements if isinstance(source, DeviceTensor) else source
            target: Tensor = torch.empty_like(elements, **form)
            if device.type == "cuda":
                self.memory_of(target).allocated_on = self.current_stream(device)
                target = DeviceTensor(target, device)
            elif non_blocking:  # torch allocates pinned memory for such a copy
                self.pin(target)
            self.copy(target, source, non_blocking, call)
            return target
        targets, sources = (args[0], args[1]) if name == "_foreach_copy_" else ([args[0]], [args[1]])
        if all(target.device == source.device for target, source in zip(targets, sources, strict=True)):
            return None
        non_blocking = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        for target, source in zip(targets, sources, strict=True):
            if target.device == source.device:
                target.copy_(source)
            else:
                self.copy(target, source, non_blocking, call)
        return args[0] if name == "copy_" else ()


class _Mode(TorchDispatchMode):
    """Runs the simulation. As a fake mode, it keeps torch from initializing CUDA."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE
        self.simulation = simulation

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.simulation.run(func, args, kwargs or {})


def _merge(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(count, clock.get(stream, 0))


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the offsets of the tensor's first byte, and after its last byte, in its storage."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + (int(last) + 1) * tensor.itemsize


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_WORDS[tensor.itemsize])


def _set_all_bits(tensor: Tensor) -> None:
    _bits(tensor.detach()).fill_(255 if tensor.itemsize == 1 else -1)


@cache
def _written_arguments(func: Any) -> tuple[tuple[str, bool], ...]:
    if func.namespace == "c10d":  # schemas of c10d do not mark the arguments that an operator writes
        return tuple((one.name, "input" not in one.name) for one in func._schema.arguments)
    return tuple((one.name, bool(one.alias_info and one.alias_info.is_write)) for one in func._schema.arguments)


@cache
def _only_views(func: Any) -> bool:
    """Return whether the operator returns views of its arguments and accesses no elements."""
    aliases = [one.alias_info for one in func._schema.returns if one.alias_info is not None]
    return bool(aliases) and not any(one.is_write for one in aliases)


def _operands(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """Yield each tensor among the arguments, and whether the operator writes it."""
    for index, (name, writes) in enumerate(_written_arguments(func)):
        value = args[index] if index < len(args) else kwargs.get(name)
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, Tensor):
                yield one, writes


def _elements(tree: Any) -> Any:
    if isinstance(tree, DeviceTensor):
        return tree.elements
    if isinstance(tree, Mapping):
        return {key: _elements(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_elements(one) for one in tree)
    return tree


@contextmanager
def simulated_cuda(devices: int = 2, collectives_on: torch.device | None = None) -> Iterator[Simulation]:
    """Simulate CUDA devices within the block, and wait for all operations at its end.

    ``collectives_on`` is the value of `ProcessGroupRegistry.device` within the block. None: cuda:0.
    """
    simulation = Simulation(devices)

    def pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            return simulation.pin(tensor) if pin_memory else tensor

        return made

    def data_ptr(tensor: Tensor) -> int:
        return address(tensor.elements if isinstance(tensor, DeviceTensor) else tensor)

    def reading(method: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Return a replacement of ``method``, which reads elements without an operator, that also notes this access."""

        def read(tensor: Tensor) -> Any:
            tensor = tensor.cpu()
            simulation.access_by_host(tensor, False, f"{method.__name__} {innermost_calls()}")
            return method(tensor)

        return read

    address = torch.Tensor.data_ptr
    before = torch._C._only_lift_cpu_tensors()
    cuda: dict[str, Any] = {
        "Event": lambda **_: Event(simulation),
        "Stream": lambda device=None, **_: Stream(simulation, device),
        "current_stream": simulation.current_stream,
        "default_stream": lambda device=None: simulation.default_streams[simulation.device_of(device).index],
        "stream": simulation.in_stream,
        "synchronize": simulation.synchronize,
        "current_device": lambda: simulation.current_device,
        "set_device": lambda device: simulation.exchange_device(simulation.device_of(device).index),
        "_exchange_device": simulation.exchange_device,
        "_maybe_exchange_device": simulation.exchange_device,
        "device_count": lambda: devices,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda *_: (9, 0),
    }
    with ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for name in _COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, simulation.collective(getattr(dist, name))))
        for name in ("zeros", "tensor", "empty", "empty_like"):
            stack.enter_context(mock.patch.object(torch, name, pinning(getattr(torch, name))))
        stack.enter_context(mock.patch.object(torch, "Generator", GeneratorOfAnyDevice))
        stack.enter_context(mock.patch.object(torch.Tensor, "data_ptr", data_ptr))
        stack.enter_context(
            mock.patch.object(
                torch.Tensor, "record_stream", lambda tensor, stream: simulation.record_stream(tensor, stream)
            )
        )
        for method in (torch.Tensor.tolist, torch.Tensor.numpy):
            stack.enter_context(mock.patch.object(torch.Tensor, method.__name__, reading(method)))
        device = collectives_on or torch.device("cuda", 0)
        stack.enter_context(mock.patch.object(ProcessGroupRegistry, "device", device))
        torch._C._set_only_lift_cpu_tensors(True)
        torch._C._ensureCUDADeviceGuardSet()
        stack.callback(torch._C._set_only_lift_cpu_tensors, before)
        with _Mode(simulation):
            yield simulation
        simulation.finish()
