"""Start-up from the environment of each launcher, with real processes; incomplete variables; the logger."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import forked_python
import pytest
import torch
import torch.distributed as dist
from forked_python import Forked
from free_ports import LOOPBACK, free_port
from meshstep.parallel import Launch, ProcessGroupRegistry, Topology, get_dist_logger, init_distributed
from meshstep.parallel.launch import LaunchEnvironment, _attempt, first_host, read_environment
from world import World

PREFIXES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_", "GROUP_WORLD_SIZE"),
    *("OMPI_", "PMIX_", "PMI_", "MPI_", "MV2_", "PALS_", "FLUX_", "SLURM_"),
)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Mapping[str, str]], None]]:
    """Remove launcher variables. Return a function that adds variables. Afterwards, destroy the default group."""
    for name in [name for name in os.environ if name.startswith(PREFIXES)]:
        monkeypatch.delenv(name)

    def add(variables: Mapping[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    yield add
    if dist.is_initialized():
        dist.destroy_process_group()


def torchrun(rank: int, size: int = 2) -> dict[str, str]:
    names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": 29411}
    return {name: str(value) for name, value in names.items()}


def openmpi(rank: int, size: int = 2) -> dict[str, str]:
    ours = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in ours.items()}


def slurm(rank: int, size: int = 2, nodes: str = "localhost") -> dict[str, str]:
    ours = {"PROCID": rank, "NTASKS": size, "LOCALID": rank, "JOB_NODELIST": nodes, "JOB_ID": 4711, "STEP_ID": 0}
    return {f"SLURM_{name}": str(value) for name, value in ours.items()}


def mpich(rank: int, size: int = 2) -> dict[str, str]:
    ours = {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": size}
    return {name: str(value) for name, value in ours.items()}


def mvapich(rank: int, size: int = 2) -> dict[str, str]:
    return {name.replace("OMPI", "MV2"): value for name, value in openmpi(rank, size).items()}


def on_another_node(variables: dict[str, str]) -> dict[str, str]:
    """Return the environment of the first rank of a second node with two ranks per node, under mpirun in a Slurm job."""
    local = {
        name: "0" if name.endswith(("LOCAL_RANK", "LOCALRANKID")) else "2" for name in variables if "LOCAL" in name
    }
    inherited = {**slurm(0, 4, nodes="tux[07-08]"), "SLURM_STEP_NODELIST": "tux08", "MASTER_PORT": "77"}
    return {**inherited, **variables, **local}


def test_init_distributed_without_launcher_makes_a_world_of_one_process(environment: object) -> None:
    expected = Launch(0, 1, 0, torch.device("cpu"), "gloo", "none")
    assert init_distributed(backend="gloo") == expected
    value = torch.tensor([3.0])
    dist.all_reduce(value)
    assert value.item() == 3.0
    world_group = dist.group.WORLD
    assert init_distributed(backend="nccl") == expected  # the existing group is described, not changed
    assert dist.group.WORLD is world_group
    with ProcessGroupRegistry(Topology(tensor=1)) as registry:
        assert registry.group("tensor") is world_group


@pytest.mark.default_cases(99)  # all cases: unlike other tests of this file, these start no process
@pytest.mark.parametrize("variables", [torchrun(0, 1), openmpi(0, 1), slurm(0, 1)])
def test_world_of_one_rank_needs_no_reachable_master_address(
    environment: Callable[[Mapping[str, str]], None], variables: dict[str, str]
) -> None:
    environment({**variables, "MASTER_ADDR": "no.such.host.invalid"})
    launch = init_distributed(backend="gloo")
    assert (launch.rank, launch.world_size) == (0, 1)


PROGRAM = """
import sys, torch, torch.distributed as dist
from meshstep.parallel import get_dist_logger, init_distributed
from meshstep.parallel import ProcessGroupRegistry
from meshstep.parallel import Topology
launch = init_distributed(backend="gloo")
with ProcessGroupRegistry(Topology(data=1, tensor=2)) as registry:
    total = torch.tensor(1.0 + launch.rank)
    dist.all_reduce(total, group=registry.group("tensor"))
    alone = torch.tensor(1.0 + launch.rank)
    dist.all_reduce(alone, group=registry.group("data"))
get_dist_logger(ranks=[1]).info("spoken")
dist.destroy_process_group()
words = launch.launcher, launch.rank, launch.local_rank, launch.device, total.item(), alone.item()
sys.stdout.write(" ".join(map(str, words)) + "\\n")  # one call, because ranks may share an unbuffered pipe
"""


def run_two(variables: list[dict[str, str]]) -> list[subprocess.CompletedProcess[str]]:
    base = {name: value for name, value in os.environ.items() if not name.startswith(PREFIXES)}
    processes = [Forked("-c", PROGRAM, env={**base, **mine}) for mine in variables]
    done = []
    for process in processes:
        try:
            process.wait(timeout=240)
        except subprocess.TimeoutExpired:
            process.kill()
        out, err = process.communicate()
        done.append(subprocess.CompletedProcess(process.args, process.wait(), out, err))
    return done


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind((LOOPBACK[socket.AF_INET6], 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("launcher", "variables", "address"),
    [
        ("slurm", slurm, None),
        ("openmpi", openmpi, None),
        ("mpich", mpich, None),
        ("mvapich", mvapich, None),
        pytest.param("torchrun", torchrun, "[::1]", marks=pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")),
    ],
)
def test_init_distributed_connects_two_processes_of_each_launcher(
    launcher: str, variables: Callable[[int], dict[str, str]], address: str | None
) -> None:
    shared = {"MASTER_PORT": free_port(socket.AF_INET6 if address else socket.AF_INET)}
    if address:
        shared["MASTER_ADDR"] = address
    done = run_two([{**variables(rank), **shared} for rank in range(2)])
    for rank, result in enumerate(done):
        assert result.returncode == 0, result.stderr
        assert result.stdout == f"{launcher} {rank} {rank} cpu 3.0 {rank + 1.0}\n"
        assert ("rank 1 INFO] spoken" in result.stderr) == (rank == 1)


def test_init_distributed_connects_two_processes_under_torchrun() -> None:
    """The ranks are forked. In `test_checkpoint_kill.py` they are fresh interpreters."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    result = forked_python.run(*torchrun, sys.executable, "-c", PROGRAM, fork_children=True)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["torchrun 0 0 cpu 3.0 1.0", "torchrun 1 1 cpu 3.0 2.0"]


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.default_cases(99)  # all cases: unlike other tests of this file, these start no process
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, LaunchEnvironment("none")),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1", "SLURM_CONF": "x"}, LaunchEnvironment("none")),
        (torchrun(1), LaunchEnvironment("torchrun", 1, 2, 1, "localhost", 29411)),
        ({**slurm(1), **openmpi(0), **torchrun(1)}, LaunchEnvironment("torchrun", 1, 2, 1, "localhost", 29411)),
        # A batch script that exports WORLD_SIZE and the address, but not the rank
        (
            {**slurm(1), "WORLD_SIZE": "2", "MASTER_ADDR": "fe80::2", "MASTER_PORT": "77"},
            LaunchEnvironment("slurm", 1, 2, 1, "fe80::2", 77),
        ),
        (
            {**slurm(3, 4, nodes="tux[07-09],gpu1"), "MASTER_PORT": "77"},
            LaunchEnvironment("slurm", 3, 4, 3, "tux07", 77),
        ),
        (
            {**slurm(0, nodes=""), "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1", "MASTER_PORT": "77"},
            LaunchEnvironment("slurm", 0, 2, 0, "10.0.0.1", 77),
        ),
        (
            {**slurm(0), "SLURM_STEP_NODELIST": "tux3", "MASTER_PORT": "77"},
            LaunchEnvironment("slurm", 0, 2, 0, "tux3", 77),
        ),
        # mpirun inside of a Slurm job
        ({**slurm(0, 1), **openmpi(1), "MASTER_PORT": "77"}, LaunchEnvironment("openmpi", 1, 2, 1, "127.0.0.1", 77)),
        (on_another_node(openmpi(2, 4)), LaunchEnvironment("openmpi", 2, 4, 0, "tux07", 77)),
        (on_another_node(mpich(2, 4)), LaunchEnvironment("mpich", 2, 4, 0, "tux07", 77)),
        (on_another_node(mvapich(2, 4)), LaunchEnvironment("mvapich", 2, 4, 0, "tux07", 77)),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "1"}, LaunchEnvironment("none")),
        # srun, which sets PMI variables
        (
            {**slurm(1), "PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_PORT": "77"},
            LaunchEnvironment("slurm", 1, 2, 1, "localhost", 77),
        ),
        # a batch script of one task
        (
            without({**slurm(0, 1), "MASTER_PORT": "77"}, "SLURM_STEP_ID"),
            LaunchEnvironment("slurm", 0, 1, 0, "localhost", 77),
        ),
    ],
)
def test_read_environment_recognizes_each_launcher(variables: dict[str, str], expected: LaunchEnvironment) -> None:
    assert read_environment(variables) == expected


def test_default_port_differs_between_most_slurm_jobs() -> None:
    ports = {read_environment({**slurm(0), "SLURM_JOB_ID": str(job)}).port for job in range(50)}
    assert len(ports) > 45
    assert all(20_000 <= port < 30_000 for port in ports)
    assert read_environment(slurm(0)).port == read_environment(slurm(1)).port


@pytest.mark.default_cases(99)  # all cases: unlike other tests of this file, these start no process
@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_error_names_missing_torchrun_variable(missing: str) -> None:
    with pytest.raises(RuntimeError, match=rf"torchrun needs {missing}\."):
        read_environment(without(torchrun(0), missing))


@pytest.mark.default_cases(99)  # all cases: unlike other tests of this file, these start no process
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (without(slurm(0), "SLURM_PROCID"), r"slurm needs SLURM_PROCID\."),
        (without(slurm(0), "SLURM_NTASKS", "SLURM_LOCALID"), r"slurm needs SLURM_NTASKS, SLURM_LOCALID\."),
        (without(slurm(0), "SLURM_JOB_NODELIST"), r"slurm needs MASTER_ADDR"),
        (without(openmpi(0), "OMPI_COMM_WORLD_SIZE"), r"openmpi needs OMPI_COMM_WORLD_SIZE\."),
        (without(openmpi(0), "OMPI_COMM_WORLD_LOCAL_RANK"), r"openmpi needs OMPI_COMM_WORLD_LOCAL_RANK\."),
        ({**openmpi(0, 4), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, r"openmpi needs MASTER_ADDR \(the host of rank 0\)"),
        (
            {"RANK": "0", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
            r"torchrun needs WORLD_SIZE.*; slurm needs SLURM_NTASKS",
        ),
        # The rank of Slurm is not used: it is 0 in all processes that mpirun starts.
        ({**slurm(0, 4, nodes=""), **openmpi(2, 4), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, r"openmpi needs MASTER_ADDR"),
        (without(mpich(0), "MPI_LOCALRANKID"), r"mpich needs MPI_LOCALRANKID\."),
        (without({**slurm(0), **mpich(1)}, "MPI_LOCALRANKID"), r"mpich needs MPI_LOCALRANKID\."),
        (without(mvapich(0), "MV2_COMM_WORLD_SIZE"), r"mvapich needs MV2_COMM_WORLD_SIZE\."),
        (
            {"PMIX_RANK": "1"},
            r"PMIX_RANK=1 is set by a launcher that is not supported.*Set RANK, .*call init_distributed\(launcher='none'\)",
        ),
        ({"PALS_RANKID": "0"}, "PALS_RANKID=0"),
        # A batch script, or a shell of salloc, that starts Python without srun
        (
            without(slurm(0, 8), "SLURM_STEP_ID"),
            r"SLURM_NTASKS=8, SLURM_LOCALID=0\), but srun did not start .*Write 'srun python \.\.\.'",
        ),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, "srun did not start this process"),
        ({"SLURM_NTASKS": "8"}, "srun did not start this process"),
        ({**torchrun(0), "RANK": "2"}, "RANK=2 isn't below WORLD_SIZE=2"),
        ({**slurm(0), "SLURM_PROCID": "7"}, "SLURM_PROCID=7 isn't below SLURM_NTASKS=2"),
        ({**torchrun(0), "WORLD_SIZE": "two"}, "WORLD_SIZE='two': give an integer >= 0"),
        ({**torchrun(0), "RANK": "-1"}, "RANK='-1': give an integer >= 0"),
        ({**torchrun(0), "MASTER_PORT": "http"}, "MASTER_PORT='http': give an integer from 1 to 65535"),
        ({**torchrun(0), "MASTER_PORT": "0"}, "MASTER_PORT='0': give an integer from 1 to 65535"),
        ({**torchrun(0), "MASTER_PORT": "70000"}, "MASTER_PORT='70000': give an integer from 1 to 65535"),
    ],
)
def test_error_names_missing_or_invalid_launcher_variable(
    variables: dict[str, str], message: str, environment: Callable[[Mapping[str, str]], None]
) -> None:
    environment(variables)
    with pytest.raises(RuntimeError, match=message):
        init_distributed(backend="gloo")
    assert not dist.is_initialized()
    assert init_distributed(backend="gloo", launcher="none").world_size == 1


def test_explicit_launcher_overrides_detection() -> None:
    assert read_environment({**torchrun(0), **slurm(1)}, "slurm").rank == 1
    with pytest.raises(RuntimeError, match="openmpi needs"):
        read_environment(torchrun(0), "openmpi")
    with pytest.raises(RuntimeError, match="a launcher are incomplete: slurm needs SLURM_PROCID"):
        read_environment({}, "slurm")
    with pytest.raises(ValueError, match="'srun' is unknown; write one of 'torchrun'"):
        read_environment({}, "srun")  # type: ignore[arg-type]


@pytest.mark.default_cases(99)  # all cases: unlike other tests of this file, these start no process
@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("", ""),
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("tux[03-05,07],gpu1", "tux03"),
        ("rack[2-3]n[01,05]-ib,x", "rack2n01-ib"),
        ("a.b.example.org", "a.b.example.org"),
    ],
)
def test_first_host_is_parsed_from_slurm_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.long
def test_init_distributed_times_out_if_other_ranks_never_start(
    environment: Callable[[Mapping[str, str]], None],
) -> None:
    environment({**torchrun(0), "MASTER_PORT": free_port()})
    with pytest.raises(
        RuntimeError, match=r"rank 0 of 2 .*didn't connect to the other ranks at tcp://localhost:\d+; start all 2 ranks"
    ):
        init_distributed(backend="gloo", timeout=timedelta(seconds=1))


@pytest.mark.default_cases(4)
@pytest.mark.parametrize(
    ("error", "backend", "variables", "message"),
    [
        (dist.DistNetworkError, "nccl", {}, "didn't connect to .*, and set MASTER_ADDR to the host of rank 0"),
        (
            dist.DistStoreError,
            "gloo",
            {"TORCHELASTIC_RUN_ID": "1"},
            "didn't connect to .*, and give torchrun an address of",
        ),
        (
            dist.DistBackendError,
            "nccl",
            {"TORCHELASTIC_RUN_ID": "1"},
            "rank 0 of 2 .*connected to tcp://localhost:29411, but the nccl communicator .*couldn't be created; see .*, or "
            "set NCCL_DEBUG=INFO",
        ),
        (dist.DistBackendError, "gloo", {}, r"but the gloo communicator .*see the first error of the other ranks\."),
    ],
)
def test_init_distributed_distinguishes_failed_connection_from_failed_communicator(
    environment: Callable[[Mapping[str, str]], None],
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
    backend: str,
    variables: dict[str, str],
    message: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error("planted")

    environment({**torchrun(0), **variables})
    monkeypatch.setattr(dist, "init_process_group", fail)
    monkeypatch.setattr("meshstep.parallel.launch._device", lambda *_: torch.device("cpu"))
    with pytest.raises(RuntimeError, match=f"{message}.* torch reports: planted"):
        init_distributed(backend=backend)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, environment: object) -> Callable[[int], list[dict[str, Any]]]:
    """Return a function that fakes a number of GPUs and returns the list of recorded `init_process_group` arguments."""
    joined: list[dict[str, Any]] = []
    current: list[torch.device] = []

    def init(backend: str, **options: Any) -> None:
        joined.append({"backend": backend, "current": current[-1] if current else None, **options})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "")  # so that monkeypatch removes a value set by the test
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT")

    def there_are(count: int) -> list[dict[str, Any]]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        return joined

    return there_are


def test_init_distributed_chooses_device_by_local_rank(
    gpus: Callable[[int], list[dict[str, Any]]], environment: Callable[[Mapping[str, str]], None]
) -> None:
    environment(torchrun(3, 8))
    for count, device in ((4, torch.device("cuda", 3)), (1, torch.device("cuda", 0))):
        joined = gpus(count)
        assert init_distributed().device == device
        assert [joined[-1][name] for name in ("backend", "current", "device_id")] == ["nccl", device, device]
    assert init_distributed(backend="gloo").device == torch.device("cpu")
    assert joined[-1]["device_id"] is None
    gpus(2)
    with pytest.raises(RuntimeError, match=r"local rank 3 has no device, because 2 CUDA devices are visible"):
        init_distributed()


@pytest.mark.default_cases(99)  # all cases: unlike other tests of this file, these start no process
@pytest.mark.parametrize("ranks", [1, 8])
def test_init_distributed_binds_default_group_to_the_chosen_device(
    gpus: Callable[[int], list[dict[str, Any]]], environment: Callable[[Mapping[str, str]], None], ranks: int
) -> None:
    """In the case of 8 ranks, which alternate between two nodes, rank 5 is the third on its node (GPU 2); torch would use 5
    modulo 4."""
    rank, local = (5, 2) if ranks == 8 else (0, 0)
    environment({**slurm(rank, ranks), "SLURM_LOCALID": str(local), "MASTER_PORT": "77"})
    joined = gpus(4)
    launch = init_distributed()
    assert launch.device == joined[0]["device_id"] == joined[0]["current"] == torch.device("cuda", local)
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"


def test_init_distributed_keeps_nccl_launch_order_set_by_user(
    gpus: Callable[[int], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0")
    gpus(1)
    init_distributed()
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "0"


def device_of_existing() -> torch.device:
    world = dist.group.WORLD
    assert world is not None
    world.bound_device_id = torch.device("cuda", 2)
    try:
        with mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo,cuda:nccl"):
            return init_distributed().device
    finally:
        world.bound_device_id = None


def test_init_distributed_returns_device_bound_to_existing_group(world: World) -> None:
    assert world.run(2, device_of_existing) == [torch.device("cuda", 2)] * 2


def describe_existing() -> Launch:
    return init_distributed()


def test_init_distributed_describes_existing_default_group(world: World) -> None:
    launches = world.run(2, describe_existing)
    assert [(launch.rank, launch.world_size) for launch in launches] == [(0, 2), (1, 2)]
    assert {(launch.launcher, launch.backend) for launch in launches} == {("other", "gloo")}


def log_on_some(directory: str) -> bool:
    logger = get_dist_logger("meshstep.test", ranks=[1, 2], file=f"{directory}/logs/{{rank}}.txt")
    logger.info("hello")
    logging.getLogger("meshstep.test.below").warning("there")
    logger.debug("hidden")
    get_dist_logger("meshstep.test", ranks=None, file=f"{directory}/all-{{rank}}.txt").info("everybody")
    return len(logger.handlers) == 2


def test_dist_logger_logs_only_on_given_ranks(world: World, tmp_path: Path) -> None:
    assert world.run(3, log_on_some, str(tmp_path)) == [True] * 3
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["1.txt", "2.txt"]
    lines = (tmp_path / "logs" / "2.txt").read_text().splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["rank 2 INFO] hello", "rank 2 WARNING] there"]
    for rank in range(3):
        assert (tmp_path / f"all-{rank}.txt").read_text().endswith(f"rank {rank} INFO] everybody\n")


def test_dist_logger_before_init_distributed_reads_rank_from_environment(
    environment: Callable[[Mapping[str, str]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    environment(slurm(1))
    get_dist_logger("meshstep.test", ranks=[1]).info("early")
    get_dist_logger("meshstep.test").info("silent")
    assert capsys.readouterr().err.endswith("rank 1 INFO] early\n")
    for handler in logging.getLogger("meshstep.test").handlers[:]:
        logging.getLogger("meshstep.test").removeHandler(handler)


@pytest.mark.default_cases(99)  # all cases: unlike other tests of this file, these start no process
@pytest.mark.parametrize(
    ("nodes", "restarts", "prefix"),
    [
        ("1", None, ""),
        ("1", "0", ""),
        ("1", "2", "meshstep/restart/2"),
        ("2", "2", ""),
        ("2", "0", ""),
        (None, "2", ""),
    ],
)
def test_store_prefix_contains_restart_count_only_in_single_node_jobs(
    environment: Callable[[Mapping[str, str]], None], nodes: str | None, restarts: str | None, prefix: str
) -> None:
    variables = {"GROUP_WORLD_SIZE": nodes, "TORCHELASTIC_RESTART_COUNT": restarts}
    environment({name: value for name, value in variables.items() if value is not None})
    assert _attempt() == prefix
