"""Single gradient buckets and the ranks over which they are summed, without an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshstep.optim.gradients.buckets import (
    Bf16Compression,
    CommHook,
    Finish,
    GradientBucket,
    Memory,
    NoCompression,
    flat_buckets,
    reduce_all,
    run_all,
    sync_ranks,
)
from meshstep.optim.gradients.in_place import is_complete
from meshstep.optim.gradients.reduce_in_backward import BackwardReducer
from meshstep.parallel import P, ProcessGroupRegistry, Topology
from torch import Tensor, nn
from world import World


class Seen(CommHook):
    """A communication hook that records its flat buffers and reduces nothing."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []

    def all_reduce(self, flat: Tensor, group: dist.ProcessGroup, memory: Memory) -> Finish:
        self.buffers.append(flat.clone())
        return lambda: None

    def reduce_scatter(self, own: Tensor, flat: Tensor, group: dist.ProcessGroup, memory: Memory) -> Finish:
        raise NotImplementedError


def bucket_of(params: list[nn.Parameter], hook: CommHook, slices: int = 1, **options: Any) -> GradientBucket:
    numels = {index: param.numel() for index, param in enumerate(params)}
    (layout,) = flat_buckets(numels, slices, 10**6)
    group: Any = None
    return GradientBucket(params, layout, group, hook, torch.float32, **options)


def with_gradients(*numels: int) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros(numel)) for numel in numels]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def filled_with_nan(size: int, dtype: torch.dtype = torch.float32, **_: object) -> Tensor:
    return torch.full((size,), torch.nan, dtype=dtype)


def test_flat_buffer_has_zeros_between_gradients_and_after_them() -> None:
    """A communication hook also gets these gaps, where uninitialized memory could contain NaNs."""
    params = with_gradients(3, 70, 5)
    params[0].new_empty = filled_with_nan  # type: ignore[assignment, method-assign]
    flat = bucket_of(params, Seen(), slices=4).pack()
    assert flat.numel() > 78
    assert flat.sum() == 78


def test_parameter_frozen_after_bucket_was_made_gets_no_gradient() -> None:
    params = with_gradients(4, 4)
    bucket = bucket_of(params, Seen())
    params[1].grad = None
    params[1].requires_grad_(False)
    bucket.all_reduce()()
    assert params[0].grad is not None
    assert params[1].grad is None


def test_trained_parameter_without_gradient_gets_reduced_gradient_of_bucket() -> None:
    """Negative control of `test_parameter_frozen_after_bucket_was_made_gets_no_gradient`."""
    params = with_gradients(4, 4)
    bucket = bucket_of(params, Seen())
    params[1].grad = None
    bucket.all_reduce()()
    assert params[1].grad is not None


def test_write_to_one_reduced_gradient_leaves_the_others_marked_as_reduced() -> None:
    params = with_gradients(4, 4)
    bucket_of(params, Seen(), adopt=True, pending=params).all_reduce()()
    assert all(map(is_complete, params))
    assert params[0].grad is not None
    params[0].grad.add_(1)
    assert not is_complete(params[0])
    assert is_complete(params[1])


def test_sync_ranks_of_tied_parameter_belong_to_its_tied_stages_only() -> None:
    topology = Topology(pipe=4, data=2)
    spec = P(tied={"pipe": (0, -1)})
    for rank in (0, 6):
        assert sync_ranks(spec, topology, rank, average_data=False) == (0, 6)
        assert sync_ranks(spec, topology, rank, average_data=True) == (0, 1, 6, 7)


class Counted:
    """A bucket that counts its reductions."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params, self.started = params, 0

    def start(self) -> Callable[[], None]:
        self.started += 1
        return lambda: None


def test_frozen_parameter_does_not_delay_its_bucket_to_the_end_of_backward() -> None:
    trained, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    bucket: Any = Counted([trained, frozen])
    reducer = BackwardReducer(str, [bucket], [])
    frozen.requires_grad_(False)
    with reducer.micro_batch():
        (trained + frozen).sum().backward()
        assert bucket.started == 1
    trained.grad = None
    frozen.requires_grad_(True)
    with reducer.micro_batch():
        trained.sum().backward()  # without a gradient of a trained parameter, the bucket waits
        assert bucket.started == 1
    assert bucket.started == 2


def summed(dtype: torch.dtype) -> list[float]:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        (param,) = with_gradients(3)
        assert param.grad is not None
        param.grad.mul_(1 + registry.global_rank)
        (layout,) = flat_buckets({0: 3}, 1, 100)
        GradientBucket([param], layout, registry.group("data"), NoCompression(), dtype, 0.5).all_reduce()()
        found: list[float] = param.grad.tolist()
        return found


def test_bucket_sums_scaled_gradients_over_group(world: World) -> None:
    assert world.run(2, summed, torch.float32) == [[1.5] * 3] * 2


def test_bfloat16_gradient_is_converted_to_float32_before_it_is_scaled() -> None:
    """A product in bfloat16 would be rounded to 8 bits."""
    param = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    param.grad = torch.arange(1, 65).bfloat16()
    flat = bucket_of([param], Seen(), scale=1 / 3).pack()
    assert torch.equal(flat[:64], param.grad.float() * (1 / 3))


class Recorded:
    """A bucket that records the start and the end of its reduction."""

    def __init__(self, name: int, events: list[str]) -> None:
        self.params, self.name, self.events = [nn.Parameter(torch.ones(2))], name, events

    def start(self) -> Callable[[], None]:
        self.events.append(f"start {self.name}")
        return lambda: self.events.append(f"wait {self.name}")


def test_backward_waits_for_a_bucket_only_after_two_more_have_started() -> None:
    """To limit memory, backward waits for a bucket after the second next bucket has started."""
    events: list[str] = []
    reduced: list[Any] = [Recorded(index, events) for index in range(4)]
    reducer = BackwardReducer(str, reduced, [])
    with reducer.micro_batch():
        torch.stack([bucket.params[0].sum() for bucket in reduced]).sum().backward()
    positions = [[events.index(f"{kind} {index}") for index in range(4)] for kind in ("start", "wait")]
    assert all(wait > start for wait, start in zip(positions[1], positions[0][2:], strict=False))
    assert positions[1][0] < positions[0][3]


def test_run_all_has_at_most_two_reductions_in_flight_by_default() -> None:
    running, most = 0, 0

    def start() -> Callable[[], None]:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        return finish

    def finish() -> None:
        nonlocal running
        running -= 1

    run_all([start] * 5)
    assert (running, most) == (0, 2)


class Doubled(Seen):
    """A communication hook that sums over two equal ranks, and counts the flat buffers between start and finish."""

    running = most = 0

    def all_reduce(self, flat: Tensor, group: dist.ProcessGroup, memory: Memory) -> Finish:
        self.running += 1
        self.most = max(self.most, self.running)

        def finish() -> None:
            self.running -= 1
            flat.mul_(2)

        return finish


def buckets_of_each(params: list[nn.Parameter], hook: CommHook, adopt: bool) -> list[GradientBucket]:
    buckets = [bucket_of([param], hook, adopt=adopt) for param in params]
    group: Any = object()
    for bucket in buckets:
        bucket.group = group
    return buckets


@pytest.mark.parametrize("adopt", [False, True])
def test_reduce_all_has_at_most_two_flat_copies(adopt: bool) -> None:
    hook, params = Doubled(), with_gradients(4, 4, 4, 4, 4)
    reduce_all(buckets_of_each(params, hook, adopt))
    assert (hook.running, hook.most) == (0, 2)
    assert all(param.grad is not None and (param.grad == 2).all() for param in params)


@pytest.mark.parametrize("adopt", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_reduce_all_sums_gradients_in_shared_memory_once(adopt: bool, in_place: bool) -> None:
    params = with_gradients(4, 4, 4, 4)
    if in_place:  # a bucket writes gradients of parameters that are not contiguous in place
        params[0] = nn.Parameter(torch.zeros(2, 2).t())
        params[0].grad = torch.ones(2, 2).t()
    first, last = params[0].grad, params[-1]
    assert first is not None
    last.grad = first.t().reshape(4) if in_place else first.view(4)
    assert last.grad.data_ptr() == first.data_ptr()
    reduce_all(buckets_of_each(params, Doubled(), adopt))
    assert all(param.grad is not None and (param.grad == 2).all() for param in params)


def test_rounding_error_of_nonfinite_gradient_is_not_fed_back() -> None:
    """A non-finite gradient skips the step, so the next step must send its own gradient only."""
    largest = torch.finfo(torch.float32).max  # rounds to inf in bfloat16
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf, largest, -largest])
    hook, memory, nothing = Bf16Compression(error_feedback=True), Memory(), torch.zeros(5)
    hook._rounded(bad, memory)
    assert torch.equal(hook._rounded(nothing, memory), nothing.bfloat16())
    hook._rounded(torch.full((5,), 1 + 2**-10), memory)  # the rounding error of a finite gradient is fed back
    assert torch.equal(hook._rounded(nothing, memory), torch.full((5,), 2**-10).bfloat16())
