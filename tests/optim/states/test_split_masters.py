"""Split master weights: bfloat16 weights with two-byte remainders, compared with float32 master weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from dtensors import registry_of
from fully_sharded import data, sharded_net
from loops import using
from meshstep.amp import Bf16, MasterWeights, NaiveFp16
from meshstep.amp.master_weights import join_master, split_master
from meshstep.optim import (
    Fingerprints,
    HalfStates,
    Muon,
    Offloaded,
    ParallelOptimizer,
    PerParameter,
    Replayable,
    ReplicaMismatchError,
    Sharded,
    StatePlacement,
    Telemetry,
    load_checkpoint,
    save_checkpoint,
)
from meshstep.optim.kernels.choice import Kernels
from meshstep.optim.states.masters import SplitMasters
from meshstep.optim.step import c_engine as again
from meshstep.optim.step import update_request
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from planted import LAYOUTS, Planted, run_skipped_step, run_step
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from world import World
from zero_models import small_buckets

SPLIT = Bf16(split_masters=True)
ZERO1, ZERO2 = Sharded("data"), Sharded("data", gradients=True)
Bits = list[Tensor]


@contextmanager
def ties_away() -> Iterator[None]:
    """Round float32 master weights to bfloat16 as `split_master` does, so that they are the reference."""

    def write_back(self: MasterWeights, written: Sequence[Tensor] = ()) -> None:
        held = self.held()
        with torch.no_grad():
            for param, master in held:
                param.copy_(split_master(master.detach())[0])
        self._record_versions(held)

    with mock.patch.object(MasterWeights, "write_back", write_back):
        yield


def mode(is_split: bool) -> Any:
    return (SPLIT, nullcontext()) if is_split else (Bf16(), ties_away())


def masters_of(optimizer: ParallelOptimizer[Any]) -> dict[int, Tensor]:
    found: dict[int, Tensor] = optimizer.state_dict()["meshstep"]["weights"]["masters"]
    return found


def everything(model: nn.Module, optimizer: ParallelOptimizer[Any]) -> Bits:
    state = [optimizer.state.get(piece.tensor, {}) for piece in optimizer.stepped_tensors()]
    states = [entry[key] for entry in state for key in sorted(entry) if isinstance(entry[key], Tensor)]
    return [value.detach().clone() for value in (*model.parameters(), *masters_of(optimizer).values(), *states)]


def same(first: Bits, second: Bits) -> bool:
    pairs = [(a.reshape(-1), b.reshape(-1)) for a, b in zip(first, second, strict=True)]
    return all(a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


# Bitwise identical results --------------------------------------------------------------------------------------------


def learned(is_split: bool, steps: int, kind: str = "AdamW", fused: bool = True, **options: Any) -> tuple[Bits, int]:
    """Train a small network with clipping and NaN batches. Return all tensors, and the number of skipped steps."""
    precision, within = mode(is_split)
    with ProcessGroupRegistry(Topology()) as registry, within:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.LayerNorm(33), nn.Linear(33, 5))
        precision.prepare(model, registry)
        inner = getattr(torch.optim, kind)(model.named_parameters(), lr=3e-3, **({"fused": True} if fused else {}))
        optimizer = ParallelOptimizer(inner, registry, precision=precision, **{"max_norm": 0.5, **options})
        generator = torch.Generator().manual_seed(3)
        for step in range(steps):
            x = torch.randn(8, 6, generator=generator)
            for part in x.chunk(options.get("accumulation_steps", 1)):
                loss = F.mse_loss(model(part).float(), part[:, :5].roll(1, 1).square())
                optimizer.backward(loss * torch.nan if step % 97 == 5 else loss)
                optimizer.step()
                optimizer.zero_grad()
        return everything(model, optimizer), optimizer.skipped_steps


@pytest.mark.long
@pytest.mark.default_cases(1)
@pytest.mark.parametrize(("kernels", "steps"), [("auto", 1000), ("torch", 200)])
def test_split_masters_match_float32_masters_bitwise_over_many_steps(kernels: Kernels, steps: int) -> None:
    with using(kernels):
        found, skipped = learned(True, steps)
        wanted, _ = learned(False, steps)
    assert same(found, wanted)
    assert skipped == len(range(5, steps, 97))
    weights = [value for value in found if value.dtype == torch.bfloat16]
    masters = found[len(weights) : 2 * len(weights)]
    assert any(bool((weight.float() != master).any()) for weight, master in zip(weights, masters, strict=True))


@pytest.mark.long
def test_float32_masters_rounded_to_even_differ_from_split_masters() -> None:
    """Negative control: the comparison detects the rounding of ties."""
    with mock.patch("test_split_masters.split_master", lambda master: (master.bfloat16(), None)):
        wanted, _ = learned(False, 200)
    assert not same(learned(True, 200)[0], wanted)


@pytest.mark.parametrize(
    ("kind", "fused"),
    [("SGD", True), ("Adagrad", True), ("Adam", False), ("NAdam", False), ("RMSprop", False), ("ASGD", False)],
)
def test_split_masters_match_float32_masters_with_several_elementwise_optimizers(kind: str, fused: bool) -> None:
    assert same(learned(True, 30, kind, fused)[0], learned(False, 30, kind, fused)[0])


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_second_parallel_optimizer_with_split_masters_uses_new_remainders(kernels: Kernels) -> None:
    """The kernels cache memory addresses.

    The second wrapper must not use the addresses of the first wrapper's remainders.
    """
    with using(kernels), ProcessGroupRegistry(Topology()) as registry:
        model = SPLIT.prepare(nn.Linear(3, 4), registry)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def stepped() -> tuple[ParallelOptimizer[Any], Bits]:
            optimizer = ParallelOptimizer(inner, registry, precision=SPLIT)
            before = list(masters_of(optimizer).values())
            for _ in range(2):
                optimizer.backward(model(torch.ones(2, 3, dtype=torch.bfloat16)).sum())
                optimizer.step()
                optimizer.zero_grad()
            after = list(masters_of(optimizer).values())
            # Each of the two AdamW steps with constant gradients moves a weight by 1e-3, plus decay.
            wanted = [one * (1 - 1e-5) ** 2 - 2e-3 for one in before]
            torch.testing.assert_close(after, wanted, rtol=1e-5, atol=1e-6)
            return optimizer, after

        first, _ = stepped()
        kept = [transform.remainders for transform in first._chain.transforms if isinstance(transform, SplitMasters)]
        bits = [remainder.clone() for remainder in kept[0].values()]
        _, masters = stepped()
        assert any(bool((master.bfloat16().float() != master).any()) for master in masters)
        assert all(map(torch.equal, kept[0].values(), bits))


@pytest.mark.parametrize("options", [{"accumulation_steps": 4}, {"max_norm": PerParameter(0.05)}], ids=str)
def test_split_masters_match_float32_masters_with_accumulation_and_clip_rules(options: dict[str, Any]) -> None:
    assert same(learned(True, 20, **options)[0], learned(False, 20, **options)[0])


def test_split_masters_are_joined_per_bucket_with_identical_results() -> None:
    sizes: list[int] = []

    def recorded(weight: Tensor, remainder: Tensor) -> Tensor:
        sizes.append(weight.numel())
        return join_master(weight, remainder)

    with using("torch"):
        one, _ = learned(True, 20)
        with (
            mock.patch.object(update_request, "BUCKET_NUMEL", 50),
            mock.patch.object(update_request, "join_master", recorded),
        ):
            several, _ = learned(True, 20)
    assert same(several, one)
    assert max(sizes) == 6 * 33  # numel of the largest weight
    assert len(sizes) == 20 * 6


def two_optimizers(is_split: bool) -> Bits:
    precision, within = mode(is_split)
    with ProcessGroupRegistry(Topology()) as registry, within:
        torch.manual_seed(2)
        model = precision.prepare(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)))
        declare(model, {"*": P()})
        adamw = torch.optim.AdamW(model[0].named_parameters(), lr=1e-2, fused=True)
        sgd = torch.optim.SGD(model[1].named_parameters(), lr=1e-2, momentum=0.9)
        optimizer = ParallelOptimizer([adamw, sgd], registry, max_norm=0.5, precision=precision)
        for step in range(10):
            optimizer.backward(model(torch.randn(3, 6, generator=torch.Generator().manual_seed(step))).float().mean())
            optimizer.step()
            optimizer.zero_grad()
        return everything(model, optimizer)


def test_bucket_of_split_masters_uses_one_device_even_after_empty_weight() -> None:
    """`Offloaded` leaves empty shards on the device and moves other shards to the CPU."""
    devices = [torch.device("meta"), torch.device("cpu"), torch.device("meta")]
    weights = [
        nn.Parameter(torch.ones(size, dtype=torch.bfloat16, device=device))
        for size, device in zip((0, 3, 2), devices, strict=True)
    ]
    remainders: dict[Tensor, Tensor] = {weight: torch.zeros_like(weight, dtype=torch.int16) for weight in weights}
    for weight in weights:
        weight.grad_dtype = torch.float32
        weight.grad = torch.ones_like(weight, dtype=torch.float32)
    optimizer = torch.optim.SGD(weights, lr=0.1)
    seen: list[list[torch.device]] = []
    update_request.SplitWeights(remainders).step(
        optimizer, lambda: seen.append([master.device for master in optimizer.param_groups[0]["params"]])
    )
    assert seen == [[device] for device in devices]


def test_split_masters_match_float32_masters_with_two_optimizers() -> None:
    assert same(two_optimizers(True), two_optimizers(False))


def test_step_with_split_masters_updates_version_counters() -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        for kernels in ("auto", "torch"):
            with using(kernels):
                model = SPLIT.prepare(nn.Linear(4, 4))
                declare(model, {"*": P()})
                adamw = torch.optim.AdamW(model.named_parameters(), fused=True)
                optimizer = ParallelOptimizer(adamw, registry, precision=SPLIT)
                loss = model(torch.ones(1, 4, requires_grad=True)).float().sum()
                optimizer.backward(loss, retain_graph=True)
                optimizer.step()
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()


def test_split_masters_are_stepped_in_one_native_loop_call() -> None:
    calls: list[int] = []
    update = again.update_by_loops

    def counted(loops: Any, kind: Any, columns: Any, *rest: Any) -> None:
        calls.append(sum(address != 0 for address in columns.rests or ()))
        update(loops, kind, columns, *rest)

    with using("auto"), mock.patch.object(again, "update_by_loops", counted):  # overrides the environment variable
        learned(True, 3)
    assert calls == [6, 6, 6]


# Layouts and state placements -----------------------------------------------------------------------------------------

RUNS: dict[str, tuple[str, tuple[StatePlacement, ...], dict[str, Any]]] = {
    "grid": ("grid", (), {}),
    "tied": ("pipe, tied", (), {}),
    "replicas": ("data", (), {"check_replicas": True}),
    "overlap": ("data x tensor", (), {"overlap": True}),
    "ZeRO-1": ("data x tensor", (ZERO1,), {"check_replicas": Fingerprints(every=2)}),
    "ZeRO-2, windows": ("data x tensor", (ZERO2,), {"accumulation_steps": 2}),
    "ZeRO-1, half states": ("data", (ZERO1, HalfStates()), {}),
    "offload": ("tensor", (Offloaded(0.5),), {}),
    "ZeRO-2, offload, half states": ("data x tensor", (ZERO2, Offloaded(0.5), HalfStates()), {}),
}


def made(registry: ProcessGroupRegistry, name: str, precision: Bf16) -> tuple[Planted, ParallelOptimizer[Any]]:
    layout, states, options = RUNS[name]
    model = Planted(LAYOUTS[layout], registry.global_rank)
    precision.prepare(model, registry)
    groups: Any = model.groups()
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.5, 0.75), fused=True)
    return model, ParallelOptimizer(adamw, registry, max_norm=5.0, precision=precision, states=states, **options)


def go_on(model: Planted, optimizer: ParallelOptimizer[Any], name: str, steps: range) -> None:
    micros = RUNS[name][2].get("accumulation_steps", 1)
    for step in steps:
        run_step(model, optimizer, step, micros)
        optimizer.step()


def on_ranks(name: str, is_split: bool) -> Bits:
    precision, within = mode(is_split)
    with ProcessGroupRegistry(LAYOUTS[RUNS[name][0]].topology) as registry, small_buckets(64), within:
        model, optimizer = made(registry, name, precision)
        go_on(model, optimizer, name, range(25))
        optimizer.poll()
        return everything(model, optimizer)


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_split_masters_match_float32_masters_on_many_layouts_and_state_placements(world: World, name: str) -> None:
    ranks = LAYOUTS[RUNS[name][0]].topology.world_size
    for found, wanted in zip(
        world.run(ranks, on_ranks, name, True), world.run(ranks, on_ranks, name, False), strict=True
    ):
        assert same(found, wanted)


def fully_sharded(is_split: bool) -> Bits:
    precision, within = mode(is_split)
    with registry_of((("data", 2),)) as registry, within:
        net = sharded_net(registry, torch.bfloat16)
        adamw = torch.optim.AdamW(net.parameters(), lr=0.02, fused=True)
        optimizer = ParallelOptimizer(adamw, registry, max_norm=0.3, precision=precision, data_parallel=net)
        for step in range(10):
            optimizer.zero_grad()
            optimizer.backward(net(data(step)[registry.global_rank :: 2].bfloat16()).float().mean())
            optimizer.step()
        return [*masters_of(optimizer).values()]


def test_split_masters_match_float32_masters_with_fully_shard(world: World) -> None:
    for found, wanted in zip(world.run(2, fully_sharded, True), world.run(2, fully_sharded, False), strict=True):
        assert same(found, wanted)


def skipped(name: str, first: bool) -> bool:
    with ProcessGroupRegistry(LAYOUTS[RUNS[name][0]].topology) as registry:
        model, optimizer = made(registry, name, SPLIT)
        go_on(model, optimizer, name, range(0 if first else 3))
        before = everything(model, optimizer)
        run_skipped_step(model, optimizer, 3)
        after = everything(model, optimizer)
        created = after[len(before) :]  # states that the skipped step creates must be zeros
        return same(before, after[: len(before)]) and not any(bool(value.any()) for value in created)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", ["grid", "ZeRO-1", "ZeRO-1, half states", "offload"])
def test_skipped_step_with_split_masters_changes_no_values(world: World, name: str, first: bool) -> None:
    assert all(world.run(LAYOUTS[RUNS[name][0]].topology.world_size, skipped, name, first))


def turned(what: str) -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = nn.Linear(3, 2).bfloat16()
        declare(model, {"*": P()})
        for param in model.parameters():
            nn.init.ones_(param)
        fingerprints = Fingerprints(every=1)
        adamw = torch.optim.AdamW(model.named_parameters(), lr=0.1, fused=True)
        optimizer = ParallelOptimizer(adamw, registry, precision=SPLIT, check_replicas=fingerprints)
        for step in range(2):
            if step and registry.global_rank:
                kept = optimizer._chain.states()[0]
                kept["remainder" if what == "remainder" else "exp_avg"].view(torch.uint8).view(-1)[0] ^= 1
            optimizer.backward(model(torch.ones(3, dtype=torch.bfloat16)).float().sum())
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(ReplicaMismatchError) as error:
            optimizer.poll()
        return error.value.mismatches[0].kind


@pytest.mark.parametrize("what", ["remainder", "exp_avg"])
def test_fingerprints_detect_flipped_bit_in_remainder_or_exp_avg(world: World, what: str) -> None:
    assert [kind.endswith(what) for kind in world.run(2, turned, what)] == [True, True]


# Memory -----------------------------------------------------------------------------------------------------------------


def test_split_masters_with_adamw_need_12_bytes_per_element_or_8_with_half_states() -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        for states, nbytes in (((), 12), ((HalfStates(),), 8)):
            model = SPLIT.prepare(nn.Linear(64, 64, bias=False))
            declare(model, {"*": P()})
            adamw = torch.optim.AdamW(model.named_parameters(), fused=True)
            optimizer = ParallelOptimizer(adamw, registry, precision=SPLIT, states=states)
            optimizer.backward(model(torch.ones(1, 64)).float().sum())
            optimizer.step()
            kept = [value for state in optimizer._chain.states() for key, value in state.items() if key != "step"]
            stepped = [piece.tensor for piece in optimizer.stepped_tensors()]
            assert sum(tensor.nbytes for tensor in (*stepped, *kept)) == nbytes * 64 * 64


# Saving -----------------------------------------------------------------------------------------------------------------


def continued(name: str, path: str | None) -> bool:
    with ProcessGroupRegistry(LAYOUTS[RUNS[name][0]].topology) as registry:
        model, optimizer = made(registry, name, SPLIT)
        again, resumed = made(registry, name, SPLIT)
        go_on(model, optimizer, name, range(5))
        if path is not None:
            save_checkpoint(path, model, optimizer)
            load_checkpoint(path, again, resumed)
        else:
            with torch.no_grad():
                for old, new in zip(model.parameters(), again.parameters(), strict=True):
                    new.copy_(old)
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        at_once = same(everything(model, optimizer), everything(again, resumed))
        for network, opt in ((model, optimizer), (again, resumed)):
            go_on(network, opt, name, range(5, 8))
        return at_once and same(everything(model, optimizer), everything(again, resumed))


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("name", ["grid", "ZeRO-1", "ZeRO-2, offload, half states"])
def test_split_masters_resume_bitwise_identically(world: World, tmp_path: Path, name: str, checkpoint: bool) -> None:
    ranks = LAYOUTS[RUNS[name][0]].topology.world_size
    path = str(tmp_path) if checkpoint else None
    assert all(world.run(ranks, continued, name, path))


def write(path: str, is_split: bool) -> dict[str, Tensor]:
    """Save replicated states on two data ranks. Return the master weights by name."""
    with ProcessGroupRegistry(LAYOUTS["data"].topology) as registry:
        model, optimizer = made(registry, "replicas", SPLIT if is_split else Bf16())
        go_on(model, optimizer, "replicas", range(5))
        save_checkpoint(path, model, optimizer)
        names = [piece.name for piece in optimizer.stepped_tensors()]
        return dict(zip(names, masters_of(optimizer).values(), strict=True))


def read(path: str, is_split: bool, name: str) -> tuple[list[tuple[str, Any, Tensor, Tensor]], set[torch.dtype]]:
    """Load, and return name, region, master and weight of each shard, and the dtypes of the states; then run a step."""
    layout = LAYOUTS[RUNS[name][0]]
    with ProcessGroupRegistry(layout.topology) as registry:
        model, optimizer = made(registry, name, SPLIT if is_split else Bf16())
        load_checkpoint(path, model, optimizer)
        found = []
        for piece, master in zip(optimizer.stepped_tensors(), masters_of(optimizer).values(), strict=True):
            weight = piece.param.detach().reshape(-1)[piece.offset :][: piece.tensor.numel()]
            found.append((piece.name, piece.region, master.flatten().clone(), weight.clone()))
        dtypes = {value.dtype for state in optimizer.state.values() for value in state.values()}
        run_step(model, optimizer, 5)
        optimizer.step()
        return found, dtypes


@pytest.mark.parametrize("is_split", [True, False])
def test_checkpoints_of_float32_and_split_masters_load_into_each_other(
    world: World, tmp_path: Path, is_split: bool
) -> None:
    """The checkpoints are loaded on the mesh that wrote them, and on a larger mesh with ZeRO-1."""
    masters = world.run(2, write, str(tmp_path), not is_split)[0]
    for name, ranks in (("replicas", 2), ("ZeRO-1", 4)):
        for found, dtypes in world.run(ranks, read, str(tmp_path), is_split, name):
            assert dtypes == {torch.float32}
            for of, region, master, weight in found:
                wanted = region.of(masters[of]).flatten()[region.start : region.stop]
                assert torch.equal(master, wanted)
                assert torch.equal(weight, split_master(master)[0] if is_split else master.bfloat16())


def test_split_masters_support_existing_states_frozen_weights_and_added_groups() -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        first, frozen, late = (nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(3))
        frozen.requires_grad_(False)
        for name, param in {"first": first, "frozen": frozen, "late": late}.items():
            declare(nn.ParameterDict({name: param}), {"*": P()})
        adamw = torch.optim.AdamW([first, frozen], lr=0.1, fused=True)
        first.grad = torch.ones_like(first)
        adamw.step()
        optimizer = ParallelOptimizer(adamw, registry, precision=SPLIT)
        for step in range(3):
            if step == 1:
                optimizer.add_param_group({"params": [late]})
            optimizer.backward((first.float() + frozen.float() + late.float()).square().sum())
            if step == 0:
                late.grad = None
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(frozen, torch.ones(3, dtype=torch.bfloat16))
        assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {torch.float32}
        assert len(masters_of(optimizer)) == 2
        assert all(bool((master != 1).all()) for master in masters_of(optimizer).values())


# Overwritten weights --------------------------------------------------------------------------------------------------

STATES: dict[str, tuple[StatePlacement, ...]] = {
    "whole": (),
    "ZeRO-1": (ZERO1,),
    "ZeRO-2": (ZERO2,),
    "offload": (Offloaded(1.0),),
    "ZeRO-1, offload, half states": (ZERO1, Offloaded(0.5), HalfStates()),
}


def write_weights(how: str, model: nn.Module, registry: ProcessGroupRegistry, path: str) -> None:
    """Write weights like user code between two steps, including zeros."""
    generator = torch.Generator().manual_seed(7)
    params = dict(model.named_parameters())
    values = {name: torch.randn(param.shape, generator=generator).bfloat16() for name, param in params.items()}
    values = {name: value * (torch.rand(value.shape, generator=generator) > 0.5) for name, value in values.items()}
    with torch.no_grad():
        if how == "load_state_dict":
            model.load_state_dict(values)
        elif how == "load_checkpoint":
            load_checkpoint(path, model, None, registry=registry)
        for name, param in params.items():
            if how == "copy_":
                param.copy_(values[name])
            elif how == "mask":
                param.mul_(values[name] != 0)
            elif how == "negative zeros":
                param.zero_().neg_()
            elif how == "new memory":
                param.data = values[name].to(param.device)
            elif how == ".data":
                param.data.mul_(values[name] != 0)


def stepped_from_written(how: str, states: str, kernels: Kernels, path: str) -> tuple[bool, bool, bool]:
    """Return whether remainders existed, whether all is finite after the next step, and whether it used the written
    values."""
    with ProcessGroupRegistry(Topology(data=2)) as registry, using(kernels), small_buckets(64):
        torch.manual_seed(4)
        model = SPLIT.prepare(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5)), registry)
        declare(model, {"*": P()})
        if how == "load_checkpoint":
            save_checkpoint(path, model, ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), registry))
        sgd = torch.optim.SGD(model.named_parameters(), lr=0.25, momentum=0.5, fused=True)
        optimizer = ParallelOptimizer(sgd, registry, precision=SPLIT, states=STATES[states])

        def backward(step: int) -> None:
            optimizer.zero_grad()
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            optimizer.backward(model(x[registry.global_rank :: 2].bfloat16()).float().square().sum())

        for step in range(3):
            backward(step)
            optimizer.step()
        had = any(bool(state["remainder"].any()) for state in optimizer._chain.states() if "remainder" in state)
        write_weights(how, model, registry, path)
        kept = {name: param.detach().clone() for name, param in model.named_parameters()}
        backward(3)
        optimizer.step()
        masters = list(masters_of(optimizer).values())
        finite = all(bool(tensor.isfinite().all()) for tensor in (*model.parameters(), *masters))
        exact = []
        for piece, master in zip(optimizer.stepped_tensors(), masters, strict=True):
            start = kept[piece.name].reshape(-1)[piece.offset :][: master.numel()].float().view(master.shape)
            momentum = optimizer.state[piece.tensor]["momentum_buffer"].float()
            exact.append(torch.allclose(master, start - 0.25 * momentum, rtol=1e-6, atol=2e-8))
        return had, finite, all(exact)


VISIBLE = ["copy_", "mask", "negative zeros", "load_state_dict", "load_checkpoint", "new memory"]


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_split_masters_drop_remainders_of_weights_written_by_other_code(
    world: World, states: str, kernels: Kernels, tmp_path: Path
) -> None:
    for how in VISIBLE:
        if "half states" in states and how != "mask":
            continue
        for had, finite, exact in world.run(2, stepped_from_written, how, states, kernels, str(tmp_path / how)):
            assert had
            assert finite, how
            assert exact or "half states" in states, how


@pytest.mark.parametrize("states", ["whole", "ZeRO-1", "ZeRO-2"])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_zeros_written_through_param_data_stay_finite_with_split_masters(
    world: World, states: str, kernels: Kernels
) -> None:
    for had, finite, _ in world.run(2, stepped_from_written, ".data", states, kernels, ""):
        assert had
        assert finite


def one_weight(steps: int = 2) -> tuple[nn.Parameter, ParallelOptimizer[Any]]:
    registry = ProcessGroupRegistry(Topology())
    model = SPLIT.prepare(nn.Linear(8, 8, bias=False))
    declare(model, {"*": P()})
    adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-3, fused=True)
    optimizer = ParallelOptimizer(adamw, registry, precision=SPLIT)
    weight = model.get_parameter("weight")
    for _ in range(steps):
        step_on_squares(weight, optimizer)
    return weight, optimizer


def step_on_squares(weight: Tensor, optimizer: ParallelOptimizer[Any]) -> None:
    optimizer.zero_grad()
    optimizer.backward(weight.float().square().sum())
    optimizer.step()


def write_and_step(weight: Tensor, optimizer: ParallelOptimizer[Any]) -> None:
    with torch.no_grad():
        weight.clamp_(-0.2, 0.2)
    step_on_squares(weight, optimizer)


def test_state_dict_of_split_masters_contains_weights_written_by_other_code() -> None:
    weight, optimizer = one_weight()
    assert not torch.equal(masters_of(optimizer)[0], weight.float())
    with torch.no_grad():
        weight.mul_(3)
    assert torch.equal(optimizer._chain.values()[0], weight.float())
    assert torch.equal(masters_of(optimizer)[0], weight.float())
    optimizer.registry.close()


@pytest.mark.parametrize("changed", [False, True])
def test_loaded_masters_are_kept_if_equal_weights_are_loaded_afterwards(changed: bool) -> None:
    weight, optimizer = one_weight()
    saved, kept = copy.deepcopy(optimizer.state_dict()), weight.detach().clone()
    step_on_squares(weight, optimizer)
    optimizer.load_state_dict(saved)
    with torch.no_grad():
        weight.copy_(kept * 2 if changed else kept)
    wanted = weight.float() if changed else saved["meshstep"]["weights"]["masters"][0]
    assert torch.equal(masters_of(optimizer)[0], wanted)
    optimizer.registry.close()


def test_weight_added_and_written_after_a_load_has_its_new_value_as_master() -> None:
    _, optimizer = one_weight()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    added = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer.add_param_group({"params": [("added", added)]})
    with torch.no_grad():
        added.mul_(3)
    assert torch.equal(masters_of(optimizer)[1], torch.full((4,), 3.0))
    optimizer.registry.close()


WRITTEN = "weight was written before each of 3 steps in a row.*pruning mask, for example, in the forw"


def test_split_masters_warn_once_if_weights_change_before_three_steps_in_a_row() -> None:
    weight, optimizer = one_weight()
    write_and_step(weight, optimizer)
    step_on_squares(weight, optimizer)
    write_and_step(weight, optimizer)
    write_and_step(weight, optimizer)
    with pytest.warns(UserWarning, match=WRITTEN):
        write_and_step(weight, optimizer)
    write_and_step(weight, optimizer)
    optimizer.registry.close()


def test_split_masters_warn_in_third_step_if_weights_change_before_each_step() -> None:
    weight, optimizer = one_weight(steps=0)
    write_and_step(weight, optimizer)
    write_and_step(weight, optimizer)
    with pytest.warns(UserWarning, match=WRITTEN):
        write_and_step(weight, optimizer)
    optimizer.registry.close()


def test_weights_written_before_captured_step_raise_with_split_masters() -> None:
    weight, optimizer = one_weight()
    transform = next(transform for transform in optimizer._chain.transforms if isinstance(transform, SplitMasters))
    optimizer._window.captured = True
    transform.pull_grads(optimizer._window, False)
    with torch.no_grad():
        weight.zero_()
    with pytest.raises(RuntimeError, match=r"weight was written, or moved .*make one step without a graph"):
        transform.pull_grads(optimizer._window, False)
    optimizer.registry.close()


def tied_masters(path: str, is_split: bool) -> Tensor:
    """Save float32 master weights halfway between two bfloat16 values, or load them as split master weights.

    Return the master weights.
    """
    with ProcessGroupRegistry(Topology()) as registry:
        model = Bf16().prepare(nn.Linear(2, 1, bias=False))
        declare(model, {"*": P()})
        precision = SPLIT if is_split else Bf16()
        adamw = torch.optim.AdamW(model.named_parameters(), fused=True)
        optimizer = ParallelOptimizer(adamw, registry, precision=precision)
        if is_split:
            load_checkpoint(path, model, optimizer)
            return masters_of(optimizer)[0]
        state = optimizer.state_dict()
        state["meshstep"]["weights"]["masters"] = {0: torch.tensor([[1 + 2**-8, -1 - 3 * 2**-8]])}
        optimizer.load_state_dict(state)
        save_checkpoint(path, model, optimizer)
        return masters_of(optimizer)[0].clone()


def test_float32_masters_halfway_between_bfloat16_values_load_unchanged_as_split_masters(tmp_path: Path) -> None:
    written = tied_masters(str(tmp_path), False)
    assert torch.equal(tied_masters(str(tmp_path), True), written)


# Telemetry ------------------------------------------------------------------------------------------------------------


def measured(is_split: bool) -> dict[str, float]:
    precision, within = mode(is_split)
    with ProcessGroupRegistry(LAYOUTS["data"].topology) as registry, within:
        model, optimizer = made(registry, "replicas", precision)
        telemetry = Telemetry(optimizer, every=1)
        go_on(model, optimizer, "replicas", range(3))
        assert telemetry.last is not None
        return dict(zip(telemetry.last.names, telemetry.last.values.tolist(), strict=True))


def test_telemetry_with_split_masters_matches_float32_masters(world: World) -> None:
    assert world.run(2, measured, True) == world.run(2, measured, False)


# Rejected options -----------------------------------------------------------------------------------------------------


def refusal(what: str) -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        dtype = torch.float16 if what == "float16" else torch.bfloat16
        model: nn.Module = nn.Linear(4, 4, bias=False).to(dtype)
        declare(model, {"*": P()})
        options: dict[str, Any] = {}
        if what == "ddp":
            model = options["data_parallel"] = DistributedDataParallel(model)
        elif what == "Replayable":
            options["states"] = Replayable()
        inner: Any = Muon(model.named_parameters()) if what == "Muon" else torch.optim.AdamW(model.named_parameters())
        before = [*inner.param_groups[0]["params"]]
        with pytest.raises(ValueError) as error:  # noqa: PT011 (the test compares the message)
            ParallelOptimizer(inner, registry, precision=SPLIT, **options)
        assert all(a is b for a, b in zip(before, inner.param_groups[0]["params"], strict=True))
        return str(error.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("float16", "weight is float16, but only bfloat16 parameters can have split masters: prepare the model"),
        ("ddp", "needs float32 gradients, which DistributedDataParallel does not make: leave data_parallel out"),
        ("Replayable", "leave Replayable out of states=, or leave split_masters=True out"),
        ("Muon", "several calls of the optimizer's step"),
    ],
)
def test_split_masters_reject_unsupported_options_on_every_rank(world: World, what: str, words: str) -> None:
    for told in world.run(2, refusal, what):
        assert words in told


def test_naive_fp16_mode_has_no_split_masters_option() -> None:
    options: Any = {"split_masters": True}
    with pytest.raises(TypeError, match="split_masters"):
        NaiveFp16(**options)
