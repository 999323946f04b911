"""Steps with offloaded states, compared with steps without offload.

Results are bitwise equal if the model is on the CPU too, as in most tests, and equal within rounding on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from arguments import arguments, link_of
from hypothesis import given
from hypothesis import strategies as st
from meshstep.amp import Bf16, Precision, precision_of
from meshstep.optim import HalfStates, Offloaded, ParallelOptimizer, StatePlacement
from meshstep.optim.gradients.buckets import BUCKET_BYTES
from meshstep.optim.states import offloaded as states_offloaded
from meshstep.optim.states.offloaded import HostBucket, OffloadTransform, offloaded
from meshstep.optim.states.param_transform import PlacementContext
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from precision_modes import MODES
from torch import Tensor, nn

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@given(numels=st.lists(st.integers(1, 10**6), max_size=40), percent=st.integers(0, 100))
def test_offloaded_parameters_contain_at_least_given_fraction_of_elements(numels: list[int], percent: int) -> None:
    fraction = percent / 100
    chosen = offloaded(numels, fraction)
    on_cpu = sum(numels[index] for index in chosen)
    assert on_cpu >= fraction * sum(numels) - 1e-6
    # No offloaded parameter could stay on the device: each has more elements than the device may still keep.
    room = (1 - fraction) * sum(numels) - (sum(numels) - on_cpu)
    assert all(numels[index] > room - 1e-6 for index in chosen)


def test_offloaded_returns_indices_of_parameters_with_the_given_fraction() -> None:
    assert offloaded([3, 1, 2], 0.0) == []
    assert offloaded([3, 1, 2], 1.0) == [0, 1, 2]
    assert offloaded([3, 1, 2], 0.5) == [1, 2]  # the largest parameter stays on the device
    assert offloaded([10], 0.5) == [0]


class Small(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv = nn.Conv2d(2, 6, 3).to(memory_format=torch.channels_last)
        self.norm = nn.GroupNorm(2, 6)
        self.head = nn.Linear(54, 7)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.to(device, dtype)
        declare(self, {"*": P()})

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.conv(x)).flatten(1)).square() + self.frozen.sum()
        return y.mean()


def data(step: int) -> Tensor:
    return torch.randn(4, 2, 5, 5, generator=torch.Generator().manual_seed(step))


def make(kind: str, params: Any) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=True)
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4, fused=kind == "adamw")


def build(mode: str, kind: str = "adamw", device: str = "cpu", **options: Any) -> tuple[nn.Module, ParallelOptimizer]:
    model = MODES[mode].prepare(Small(device=device))
    optimizer = make(kind, model.parameters())
    registry = ProcessGroupRegistry(Topology())
    return model, ParallelOptimizer(optimizer, registry, **arguments(precision=MODES[mode], **options))


def steps(model: nn.Module, optimizer: ParallelOptimizer, which: range) -> list[float]:
    device = next(model.parameters()).device
    norms = []
    for step in which:
        optimizer.zero_grad()
        for part in data(step).to(device).chunk(2):
            optimizer.backward(model(part))
        stats = optimizer.step()
        assert stats is not None
        norms.append(float(stats.total_norm))
    return norms


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone().cpu() for param in model.parameters()]


def assert_same(first: list[Tensor], second: list[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["adamw", "adamw, not fused", "sgd"])
@pytest.mark.parametrize("mode", MODES)
def test_offloaded_steps_are_bitwise_identical_to_steps_without_offload(mode: str, kind: str) -> None:
    plain, optimizer = build(mode, kind, max_norm=0.5)
    norms = steps(plain, optimizer, range(6))
    for fraction, bucket_bytes in ((0.3, None), (1.0, None), (0.3, 64), (1.0, 64)):
        with small_buckets(bucket_bytes):
            model, offloading = build(mode, kind, max_norm=0.5, offload=fraction)
        assert steps(model, offloading, range(6)) == pytest.approx(norms, rel=0, nan_ok=True)
        assert_same(weights(model), weights(plain))


@contextmanager
def small_buckets(nbytes: int | None) -> Iterator[None]:
    with mock.patch.object(states_offloaded, "BUCKET_BYTES", nbytes or BUCKET_BYTES):
        yield


def order_of_a_step(kind: str, states: tuple[StatePlacement, ...] = ()) -> list[str]:
    """Return the order of operations of a step with four offloaded buckets and one bias on the device."""
    with small_buckets(64):
        model = Small()
        optimizer = ParallelOptimizer(
            make(kind, model.parameters()), ProcessGroupRegistry(Topology()), states=(Offloaded(0.98), *states)
        )
    buckets = link_of(optimizer, OffloadTransform).buckets
    steps(model, optimizer, range(1))
    done: list[str] = []
    optimizer.optimizer.step = lambda: done.append("step")  # type: ignore[method-assign, assignment]
    for name in ("start", "finish", "send"):

        def noted(bucket: HostBucket, name: str = name) -> None:
            done.append(f"{name} {buckets.index(bucket)}")

        for bucket in buckets:
            setattr(bucket, name, partial(noted, bucket))
    steps(model, optimizer, range(1, 2))
    return done


def test_offloaded_bucket_is_stepped_while_next_bucket_is_copied() -> None:
    rest = ["start 0", "step"]  # parameters on the device are stepped without a synchronization
    first = ["start 1", "finish 0", "step", "send 0"]
    assert order_of_a_step("adamw") == [
        *(*rest, *first, "start 2", "finish 1", "step", "send 1"),
        *("start 3", "finish 2", "step", "send 2", "finish 3", "step", "send 3"),
    ]


@pytest.mark.parametrize(("kind", "states"), [("adamw, not fused", ()), ("adamw", (HalfStates(),))])
def test_unfused_or_half_state_optimizer_is_called_once_for_all_offload_buckets(
    kind: str, states: tuple[StatePlacement, ...]
) -> None:
    done = order_of_a_step(kind, states)
    assert done == [
        *(f"{how} {index}" for how in ("start", "finish") for index in range(4)),
        *("step", "send 0", "send 1", "send 2", "send 3"),
    ]


def test_offload_waits_for_the_last_upload_to_each_device() -> None:
    """Uploads to different devices use different streams, so the last upload may complete before earlier ones."""
    registry = ProcessGroupRegistry(Topology(data=1))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    transform = OffloadTransform(1.0, PlacementContext(optimizer, precision_of("fp32"), registry))
    waited: list[int] = []
    devices = ["cuda:0", "cuda:0", "cuda:1", "cpu"]
    transform.buckets = [
        SimpleNamespace(device=torch.device(device), wait=partial(waited.append, index))  # type: ignore[misc]
        for index, device in enumerate(devices)
    ]
    transform._arrive()
    assert waited == [1, 2, 3]


@pytest.mark.parametrize("how", ["groups", "value", "explicit"])
def test_clipping_with_offload_is_bitwise_identical_to_without_offload(how: str) -> None:
    found = []
    for offload in (None, 1.0):
        model = precision_of("bf16").prepare(Small())
        params = [
            {"params": [*model.conv.parameters(), *model.norm.parameters()], "max_norm": 0.2},  # type: ignore[union-attr]
            {"params": model.head.parameters()},  # type: ignore[union-attr]
        ]
        inner = torch.optim.AdamW(params if how == "groups" else list(model.parameters()), lr=1e-2, fused=True)
        options: dict[str, Any] = {"clip_value": 0.01} if how == "value" else {}
        optimizer = ParallelOptimizer(
            inner, ProcessGroupRegistry(Topology()), **arguments(precision="bf16", offload=offload, **options)
        )
        for step in range(3):
            optimizer.backward(model(data(step)))
            if how == "explicit":
                optimizer.clip_grad_by_norm(0.1)
            optimizer.step()
            optimizer.zero_grad()
            assert all(param.grad is None for param in model.parameters())
        found.append(weights(model))
    assert_same(*found)


def test_offload_fraction_half_keeps_at_most_half_of_elements_on_device() -> None:
    model, optimizer = build("bf16", offload=0.5)
    steps(model, optimizer, range(1))
    trained = [param for param in model.parameters() if param.requires_grad]
    measured = [piece.grad_tensor for piece in optimizer.stepped_tensors()]
    on_device = [param for param in trained if all(param is not other for other in measured)]
    # `grad_tensor` of an offloaded parameter is the parameter itself; of other parameters it is the master weight.
    held = sum(param.numel() for param in on_device)
    total = sum(param.numel() for param in trained)
    assert 0 < held <= 0.5 * total
    for piece in optimizer.stepped_tensors():
        if piece.param.requires_grad:
            assert piece.tensor.dtype == torch.float32
            assert optimizer.state[piece.tensor]["exp_avg"].device == piece.tensor.device


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16_naive"])
@pytest.mark.parametrize(("before", "after"), [(0.5, 0.5), (0.5, None), (None, 1.0)])
def test_offloaded_state_loads_with_same_or_other_offload_fraction(
    mode: str, before: float | None, after: float | None
) -> None:
    model, optimizer = build(mode, offload=before)
    steps(model, optimizer, range(3))
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.utils._pytree.tree_map(
        lambda value: value.clone() if isinstance(value, Tensor) else value, optimizer.state_dict()
    )
    steps(model, optimizer, range(3, 6))
    other, again = build(mode, offload=after)
    steps(other, again, range(1))
    other.load_state_dict(saved)
    again.load_state_dict(state)
    steps(other, again, range(3, 6))
    assert_same(weights(other), weights(model))


def test_overflow_with_offload_keeps_weights_masters_and_states() -> None:
    model, optimizer = build("bf16", offload=1.0)
    steps(model, optimizer, range(2))
    before, held = weights(model), [piece.tensor.detach().clone() for piece in optimizer.stepped_tensors()]
    states = [value.clone() for state in optimizer.state.values() for value in state.values()]
    assert len(states) == 18  # the step count and two moments of each of six trained parameters
    optimizer.zero_grad()
    optimizer.backward(model(data(5) * torch.inf))
    stats = optimizer.step()
    assert stats is not None
    assert float(stats.found_inf) == 1
    assert_same(weights(model), before)
    assert_same([piece.tensor.detach() for piece in optimizer.stepped_tensors()], held)
    assert_same([value for state in optimizer.state.values() for value in state.values()], states)


def test_offloaded_step_uses_weights_of_other_code_in_fp32_and_raises_in_bf16() -> None:
    found = []
    for offload in (None, 1.0):
        model, optimizer = build("fp32", offload=offload)
        steps(model, optimizer, range(2))
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.1)
        steps(model, optimizer, range(2, 4))
        found.append(weights(model))
    assert_same(*found)
    model, optimizer = build("bf16", offload=1.0)
    with torch.no_grad():
        list(model.parameters())[-1].add_(1)
    with pytest.raises(RuntimeError, match="was changed since the last step"):
        steps(model, optimizer, range(1))


class WithMainGrads(nn.Module):
    """A module that accumulates gradients in ``param.main_grad``, as Megatron's `DistributedDataParallel` does."""

    def __init__(self, module: nn.Module, float32: bool) -> None:
        super().__init__()
        self.module = module
        self.ddp_config = SimpleNamespace(
            overlap_grad_reduce=False, grad_reduce_in_fp32=float32, use_distributed_optimizer=False
        )
        self.config = SimpleNamespace(calculate_per_token_loss=False)
        self.bucket_groups: list[Any] = []
        self.expert_parallel_bucket_groups: list[Any] = []
        self.main_grads: list[Tensor] = []
        for param in (param for param in module.parameters() if param.requires_grad):
            main_grad = torch.zeros_like(param, dtype=torch.float32 if float32 else param.dtype)
            param.main_grad = main_grad  # type: ignore[attr-defined]
            self.main_grads.append(main_grad)
            param.register_post_accumulate_grad_hook(self._accumulate)

    @staticmethod
    def _accumulate(param: Tensor) -> None:
        assert param.grad is not None
        param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
        param.grad = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.module(x)
        return y

    def finish_grad_sync(self) -> None:
        """Do nothing, because there is one rank."""

    def zero_grad_buffer(self) -> None:
        for main_grad in self.main_grads:
            main_grad.zero_()


def build_in_megatron_ddp(
    mode: str | Precision, float32: bool = True, **options: Any
) -> tuple[nn.Module, ParallelOptimizer]:
    precision = MODES[mode] if isinstance(mode, str) else mode
    model = WithMainGrads(precision.prepare(Small()), float32)
    optimizer, registry = make("adamw", model.parameters()), ProcessGroupRegistry(Topology())
    return model, ParallelOptimizer(optimizer, registry, precision=precision, data_parallel=model, **options)


@pytest.mark.parametrize("fraction", [0.3, 1.0])
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_offload_with_float32_gradients_of_megatron_matches_plain_steps(mode: str, fraction: float) -> None:
    plain, optimizer = build_in_megatron_ddp(mode, max_norm=0.5)
    model, offloading = build_in_megatron_ddp(mode, max_norm=0.5, states=Offloaded(fraction))
    assert steps(model, offloading, range(4)) == steps(plain, optimizer, range(4))
    assert_same(weights(model), weights(plain))


@pytest.mark.parametrize(
    ("precision", "options"),
    [(Bf16(), {"states": Offloaded()}), (Bf16(split_masters=True), {})],
    ids=["offloaded masters", "split masters"],
)
def test_offloaded_or_split_masters_reject_half_precision_gradients_of_megatron_ddp(
    precision: Precision, options: dict[str, Any]
) -> None:
    build_in_megatron_ddp(precision, **options)
    message = (
        "needs float32 gradients, which Megatron's DistributedDataParallel only makes with grad_reduce_in_fp32=True"
    )
    with pytest.raises(ValueError, match=message):
        build_in_megatron_ddp(precision, float32=False, **options)


def test_offload_rejects_fraction_outside_0_to_1() -> None:
    for fraction in (-0.1, 1.01, float("nan")):
        with pytest.raises(ValueError, match="Offloaded"):
            build("fp32", offload=fraction)


@gpu
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16_naive"])
def test_gpu_offload_keeps_part_of_states_on_cpu_and_matches_plain_steps(mode: str) -> None:
    plain, optimizer = build(mode, device="cuda", max_norm=0.5)
    norms = steps(plain, optimizer, range(10))
    model, offloading = build(mode, device="cuda", max_norm=0.5, offload=0.6)
    assert steps(model, offloading, range(10)) == pytest.approx(norms, rel=1e-3)
    for one, other in zip(weights(model), weights(plain), strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=1e-2, atol=1e-3)
    assert all(copy.is_pinned() for copy in link_of(offloading, OffloadTransform).copies.values())
    sides = {piece.tensor.device.type for piece in offloading.stepped_tensors() if piece.param.requires_grad}
    assert sides == {"cpu", "cuda"}
    for piece in offloading.stepped_tensors():
        if piece.param.requires_grad:
            assert offloading.state[piece.tensor]["exp_avg"].device == piece.tensor.device
            assert piece.param.is_cuda


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_add_param_group_with_offload_keeps_weights_written_before(fraction: float) -> None:
    registry = ProcessGroupRegistry(Topology())
    first, second, late = (nn.Parameter(torch.full((size,), 1.0)) for size in (4, 3, 5))
    model = nn.ParameterList([first, second, late])
    declare(model, {"*": P()})
    inner = torch.optim.SGD([first, second], lr=0.5)
    optimizer = ParallelOptimizer(inner, registry, states=Offloaded(fraction))
    with torch.no_grad():
        for param in (first, second):
            param.fill_(7.0)
    optimizer.add_param_group({"params": [late]})
    optimizer.backward(torch.stack([param.sum() for param in model]).sum())
    optimizer.step()
    for param, value in ((first, 6.5), (second, 6.5), (late, 0.5)):
        assert torch.equal(param, torch.full_like(param, value))


class WithModes(torch.optim.SGD):
    """SGD with the methods ``train`` and ``eval`` of schedule-free optimizers, which here change no weight."""

    elementwise = True

    def train(self) -> None:
        pass

    def eval(self) -> None:
        pass


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_optimizer_train_and_eval_do_not_make_offloaded_step_reload_weights(precision: Any) -> None:
    results = []
    for changes in (True, False):
        with ProcessGroupRegistry(Topology()) as registry:
            model = Small(torch.bfloat16 if precision == "bf16" else torch.float32)
            inner = WithModes(model.parameters(), lr=0.05, momentum=0.9)
            optimizer = ParallelOptimizer(inner, registry, precision=precision, states=Offloaded())
            for index in range(4):
                optimizer.zero_grad()
                optimizer.backward(model(data(index).to(model.norm.weight.dtype)).float())
                with mock.patch.object(HostBucket, "load", autospec=True, side_effect=HostBucket.load) as load:
                    optimizer.step()
                assert not load.called
                if changes:
                    optimizer.eval()
                    optimizer.train()
            results.append([param.detach().clone() for param in model.parameters()])
    assert all(map(torch.equal, *results))
