"""How NCCL groups are requested, bound to devices and destroyed; NCCL itself is replaced by mocks."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from meshstep.parallel import ProcessGroupRegistry, Topology
from meshstep.parallel.mesh.registry import LAUNCH_ORDER, cuda_device, end_local_group, new_local_group, order_launches
from torch.distributed import distributed_c10d
from world import World


class Options:
    """Stands in for the NCCL options of torch 2.15."""

    lazy_init = False
    _timeout = timedelta(minutes=10)


class OlderOptions:
    pass


def asked_for(monkeypatch: pytest.MonkeyPatch, options: type, backend: str) -> Any:
    found: list[Any] = []

    def new_group(*_: Any, pg_options: Any, **__: Any) -> None:
        found.append(pg_options)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "new_group", new_group)
    with pytest.raises(RuntimeError, match="ignored the name of a new process group"):
        new_local_group((0, 1), "a group", timeout=timedelta(seconds=7), backend=backend)
    return found[0]


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_nccl_group_is_requested_with_lazy_init(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    options = asked_for(monkeypatch, Options, backend)
    assert options.lazy_init
    assert options._timeout == timedelta(seconds=7)


def test_nccl_group_gets_no_options_in_older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_for(monkeypatch, OlderOptions, "nccl") is None


def test_gloo_group_gets_no_nccl_options(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_for(monkeypatch, Options, "gloo") is None


# Devices ----------------------------------------------------------------------------------------------------------------


def torch_binds(monkeypatch: pytest.MonkeyPatch, rank: int, device: torch.device | None) -> torch.device:
    """Return the device to which torch 2.15 binds a group made by ``rank``, on a machine with four GPUs."""
    found: list[torch.device] = []
    options = SimpleNamespace(enable_reconfigure=False, process_group=None, global_ranks_in_group=[rank], group_rank=0)

    def new_group(*_: Any, **__: Any) -> None:
        torch_module: Any = distributed_c10d  # torch 2.14 declares no such attribute
        found.append(torch_module._nccl2_device(options))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(dist, "new_group", new_group)
    with pytest.raises(RuntimeError, match="ignored the name of a new process group"):
        new_local_group((rank,), "a group", timeout=timedelta(seconds=7), backend="gloo", device=device)
    return found[0]


@pytest.mark.skipif(not hasattr(distributed_c10d, "_nccl2_device"), reason="this torch binds no new group to a device")
@pytest.mark.parametrize("local_rank", [None, "2"])
def test_new_group_is_bound_to_the_chosen_device(monkeypatch: pytest.MonkeyPatch, local_rank: str | None) -> None:
    """Rank 6 of 8 ranks placed alternately on two nodes is the fourth on its node."""
    monkeypatch.setenv("LOCAL_RANK", local_rank or "")
    if local_rank is None:
        monkeypatch.delenv("LOCAL_RANK")
    assert torch_binds(monkeypatch, 6, torch.device("cuda", 3)) == torch.device("cuda", 3)
    assert os.environ.get("LOCAL_RANK") == local_rank
    assert torch_binds(monkeypatch, 6, None) == torch.device("cuda", 2)  # torch's own choice


def devices_of_groups() -> tuple[torch.device | None, torch.device, torch.device]:
    """Return the device bound to a group, the device of its registry, and that of a registry with another backend."""
    world = dist.group.WORLD
    assert world is not None
    chosen = torch.device("cuda", 3)
    world.bound_device_id = chosen
    try:
        with (
            ProcessGroupRegistry(Topology(data=2)) as on_cpu,
            mock.patch.object(torch.cuda, "current_device", return_value=0),
        ):
            over_nccl = ProcessGroupRegistry(Topology(data=2), backend="nccl")
            group = new_local_group((0, 1), f"bound/{over_nccl._name}", device=over_nccl.device)
            bound = group.bound_device_id
            dist.destroy_process_group(group)
            return bound, over_nccl.device, on_cpu.device
    finally:
        world.bound_device_id = None


def test_nccl_registry_takes_the_device_bound_to_the_default_group(world: World) -> None:
    chosen = torch.device("cuda", 3)
    assert world.run(2, devices_of_groups) == [(chosen, chosen, torch.device("cpu"))] * 2


def device_without_backend(config: str) -> torch.device:
    """Return the device of a registry without ``backend``, if the default group has the backends ``config``."""
    with (
        ProcessGroupRegistry(Topology(data=2)) as registry,
        mock.patch.object(dist, "get_backend_config", return_value=config),
        mock.patch.object(torch.cuda, "current_device", return_value=2),
    ):
        return registry.device


def test_registry_without_backend_chooses_device_by_backend_of_default_group(world: World) -> None:
    assert world.run(2, device_without_backend, "cpu:gloo,cuda:nccl") == [torch.device("cuda", 2)] * 2
    assert world.run(2, device_without_backend, "gloo") == [torch.device("cpu")] * 2


def test_cuda_device_is_the_current_device_if_no_group_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert cuda_device(None) == torch.device("cuda", 1)


# Destroying groups ------------------------------------------------------------------------------------------------------


def ended(how: str, backend: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return how, and in which order, the groups of this rank end."""
    found: list[tuple[str, tuple[int, ...]]] = []

    def note(name: str, end: Callable[[Any], None]) -> Any:
        def noted(group: Any) -> None:
            found.append((name, tuple(dist.get_process_group_ranks(group))))
            end(group)

        return noted

    axes = ["row", "col", "data"]
    if dist.get_rank() % 2:
        axes.reverse()
    destroy = dist.destroy_process_group
    with (
        mock.patch.object(dist, "get_backend_config", lambda *group: backend if group else "gloo"),
        mock.patch.object(distributed_c10d, "_abort_process_group", note("abort", destroy)),
        mock.patch.object(dist, "destroy_process_group", note("destroy", destroy)),
    ):
        try:
            with ProcessGroupRegistry(Topology(data=2, row=2, col=2), backend="gloo") as registry:
                for axis in axes:
                    registry.group(axis)
                if how == "an error":
                    raise ArithmeticError
        except ArithmeticError:
            pass
    return found


def test_groups_are_destroyed_in_the_same_order_on_all_ranks(world: World) -> None:
    by_rank = world.run(8, ended, "well", "nccl")
    for rank, found in enumerate(by_rank):
        assert found == sorted(found)
        assert len(found) == 3
        assert all(how == "destroy" and rank in members for how, members in found)


@pytest.mark.parametrize(("backend", "expected"), [("cuda:nccl", "abort"), ("gloo", "destroy")])
def test_registry_aborts_nccl_groups_and_destroys_gloo_groups_after_an_error(
    world: World, backend: str, expected: str
) -> None:
    for found in world.run(8, ended, "an error", backend):
        assert [how for how, _ in found] == [expected] * 3
        assert found == sorted(found)


def test_end_local_group_aborts_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "nccl")
    monkeypatch.setattr(distributed_c10d, "_abort_process_group", lambda group: calls.append("abort"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: calls.append("destroy"))
    group: Any = object()
    end_local_group(group)
    end_local_group(group, abort=True)
    assert calls == ["destroy", "abort"]


# Order of launches -----------------------------------------------------------------------------------------------------


@pytest.fixture
def unordered(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove the variable of the launch order; its value is restored after the test."""
    monkeypatch.setenv(LAUNCH_ORDER, "")
    monkeypatch.delenv(LAUNCH_ORDER)
    return monkeypatch


def after(collectives: int) -> Any:
    """Return a fake default group that has run ``collectives`` collectives."""
    return SimpleNamespace(_get_sequence_number_for_group=lambda: collectives)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("group", [None, after(0)])
def test_nccl_launch_order_variable_is_set_before_first_collective(unordered: pytest.MonkeyPatch, group: Any) -> None:
    order_launches(group)
    assert os.environ[LAUNCH_ORDER] == "1"


def test_nccl_launch_order_set_after_first_collective_warns_once(unordered: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match=r"NCCL ran collectives before .*call init_distributed\(\)"):
        order_launches(after(1))
    order_launches(after(1))  # the variable is set now: no second warning


@pytest.mark.filterwarnings("error")
def test_nccl_launch_order_set_by_user_is_kept(unordered: pytest.MonkeyPatch) -> None:
    unordered.setenv(LAUNCH_ORDER, "0")
    order_launches(after(1))
    assert os.environ[LAUNCH_ORDER] == "0"


def launch_orders() -> tuple[list[int], list[str | None]]:
    """Return the default group's sequence numbers before three all-reduces, and the launch order over gloo and NCCL."""
    group: Any = dist.group.WORLD
    counts = list[int]()
    for _ in range(3):
        counts.append(group._get_sequence_number_for_group())
        dist.all_reduce(torch.zeros(1))
    found: list[str | None] = []
    for backend in ("gloo", "cpu:gloo,cuda:nccl"):
        with (
            mock.patch.dict(os.environ),
            mock.patch.object(dist, "get_backend_config", lambda *_, config=backend: config),
            mock.patch.object(type(group), "_get_sequence_number_for_group", return_value=0),
        ):
            os.environ.pop(LAUNCH_ORDER, None)
            with ProcessGroupRegistry(Topology(data=2)):
                found.append(os.environ.get(LAUNCH_ORDER))
    return [count - counts[0] for count in counts], found


def test_registry_sets_nccl_launch_order_over_nccl_only(world: World) -> None:
    assert world.run(2, launch_orders) == [([0, 1, 2], [None, "1"])] * 2
