"""A wrong argument on one of two ranks raises an error on both ranks, changes nothing, and leaves no rank waiting.

Exceptions: calls of `clip_grad_norm_` after the first one, and calls of `GradScaler`. They raise on the rank with the
wrong argument only. The other rank gets a non-finite norm, or skips its step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from checkpoints import content
from meshstep.amp import GradScaler
from meshstep.optim import (
    AsyncSaver,
    Booster,
    ClipState,
    ParallelOptimizer,
    PerParameter,
    Recorder,
    Sharded,
    TorchStates,
    broadcast_weights,
    clip_grad_norm_,
    global_norm,
    load_checkpoint,
    save_checkpoint,
    sync_gradients,
    take_over_clipping,
)
from meshstep.parallel import (
    P,
    ProcessGroupRegistry,
    Topology,
    declare,
    gather_objects,
    on_all_ranks,
    prepare_dataloader,
    random_factors,
    unshard,
)
from meshstep.testing import infer, prove
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from world import World

Call = Callable[[], object]


class Script:
    """The variables of a user's script on one rank of ``data=2``."""

    def __init__(self, folder: Path, stack: ExitStack, timeout: float = 60) -> None:
        self.folder = folder
        self.registry = stack.enter_context(
            ProcessGroupRegistry(Topology(data=2), timeout=timedelta(seconds=timeout), exclusive_groups=True)
        )
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)
        declare(self.model, {"*": P()})
        self.adam = torch.optim.AdamW(self.model.named_parameters(), lr=0.1)

    @property
    def params(self) -> list[nn.Parameter]:
        return [*self.model.parameters()]

    def optimizer(self, **options: Any) -> ParallelOptimizer[Any]:
        """Return an optimizer that has made a step, so that it has states."""
        optimizer = ParallelOptimizer(self.adam, self.registry, **options)
        optimizer.backward(self.loss())
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    def loss(self) -> Tensor:
        output: Tensor = self.model(torch.ones(3, 4))
        return output.square().mean()

    def state(self) -> object:
        """Return weights, gradients, optimizer state and number of param groups in a form that can be compared."""
        grads = [param.grad for param in self.model.parameters()]
        return content([self.model.state_dict(), grads, self.adam.state_dict(), len(self.adam.param_groups)])


def on_rank_1(wrong: Any, right: Any) -> Any:
    return wrong if dist.get_rank() == 1 else right


def raises_in_iteration() -> Iterator[Tensor]:
    yield torch.ones(1, requires_grad=True)
    raise LookupError("the user's generator raised")


class Refuses:
    """An object that `pickle` does not accept."""

    def __reduce__(self) -> Any:
        raise LookupError("no copies of this object")


# Functions that prepare a call with a wrong argument on rank 1, or that return such a function. See `WRONG`.


def optimizer_of_none(script: Script) -> Call:
    return lambda: ParallelOptimizer(on_rank_1(None, script.adam), script.registry)


def for_model_of(wrong: Any) -> Callable[[Script], Call]:
    return lambda script: lambda: ParallelOptimizer.for_model(on_rank_1(wrong, script.model), script.adam)


def meshes_of(wrong: Any) -> Callable[[Script], Call]:
    def prepare(script: Script) -> Call:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
        return lambda: Topology.of_meshes(on_rank_1(wrong, mesh))

    return prepare


def proof(call: Callable[..., object], **wrong: Any) -> Callable[[Script], Call]:
    def prepare(script: Script) -> Call:
        right = {
            "model": script.model,
            "loss_fn": lambda model: model(torch.ones(3, 4)).sum(),
            "registry": script.registry,
        }
        return lambda: call(**on_rank_1({**right, **wrong}, right))

    return prepare


def add_group(wrong: Callable[[], Any], **options: Any) -> Callable[[Script], Call]:
    def prepare(script: Script) -> Call:
        optimizer, more = script.optimizer(**options), nn.Linear(2, 2)
        declare(more, {"*": P()})
        group = {"params": [*more.named_parameters()]}
        return lambda: optimizer.add_param_group(on_rank_1(wrong(), group))

    return prepare


def load_state(spoil: Callable[[dict[str, Any]], Any]) -> Callable[[Script], Call]:
    """Prepare to load a state of `TorchStates` with DTensors; ``spoil`` changes it on rank 1."""

    def prepare(script: Script) -> Call:
        states = TorchStates(script.optimizer(states=Sharded("data")))
        state = copy.copy(states.state_dict())
        wrong = {**state, "state": {key: dict(value) for key, value in state["state"].items()}}
        wrong = spoil(wrong) or wrong
        return lambda: states.load_state_dict(on_rank_1(wrong, state))

    return prepare


def load_full_state(spoil: Callable[[dict[str, Any]], Any]) -> Callable[[Script], Call]:
    """As `load_state`, but with replicated states, which are plain tensors."""

    def prepare(script: Script) -> Call:
        states = TorchStates(script.optimizer())
        wrong = copy.deepcopy(states.state_dict())
        state = copy.deepcopy(wrong)
        spoil(wrong)
        return lambda: states.load_state_dict(on_rank_1(wrong, state))

    return prepare


def save(**wrong: Any) -> Callable[[Script], Call]:
    def prepare(script: Script) -> Call:
        optimizer = script.optimizer()
        right = {"path": script.folder, "model": script.model, "optimizer": optimizer, "extra": 1, "keep": 1}
        return lambda: save_checkpoint(**on_rank_1({**right, **wrong}, right))

    return prepare


def save_state(script: Script) -> Call:
    optimizer = script.optimizer()
    if dist.get_rank() == 1:
        optimizer.param_groups[0]["note"] = Refuses()
    return lambda: save_checkpoint(script.folder, script.model, optimizer)


def load(**wrong: Any) -> Callable[[Script], Call]:
    def prepare(script: Script) -> Call:
        optimizer = script.optimizer()
        right = {"path": script.folder, "model": script.model, "optimizer": optimizer, "registry": script.registry}
        save_checkpoint(script.folder, script.model, optimizer)
        return lambda: load_checkpoint(**on_rank_1({**right, **wrong}, right))

    return prepare


def save_in_background(**wrong: Any) -> Callable[[Script], Call]:
    def prepare(script: Script) -> Call:
        right = {"model": script.model, "optimizer": script.optimizer()}
        saver = AsyncSaver(script.folder, script.registry)
        return lambda: saver.save(**on_rank_1({**right, **wrong}, right))

    return prepare


def background_saver(script: Script) -> Call:
    return lambda: AsyncSaver(on_rank_1(None, script.folder), script.registry)


def recorder(script: Script) -> Call:
    optimizer = script.optimizer()

    def record() -> None:
        try:
            Recorder(optimizer, on_rank_1(None, script.folder / "run.jsonl"))
        finally:
            assert not optimizer.observers

    return record


def loader(**wrong: Any) -> Callable[[Script], Call]:
    dataset: Any = [1, 2]
    return lambda script: lambda: prepare_dataloader(dataset, script.registry, 1, **on_rank_1(wrong, {}))


def factors(script: Script) -> Call:
    def enter() -> None:
        with random_factors(on_rank_1(None, script.model), script.registry):
            pass

    return enter


def clip(call: Callable[..., object], **wrong: Any) -> Callable[[Script], Call]:
    """Prepare a call that clips or measures. It is the first call with this registry, in which ranks compare arguments."""

    def prepare(script: Script) -> Call:
        script.loss().backward()
        right = {"params": script.params, "registry": script.registry}
        right |= {"max_norm": 1.0} if call is clip_grad_norm_ else {}
        return lambda: call(**on_rank_1({**right, **wrong}, right))

    return prepare


def accelerator() -> Any:
    return SimpleNamespace(sync_gradients=True, scaler=None, clip_grad_norm_=None, clip_grad_value_=None)


def take_over(script: Script) -> Call:
    optimizer = script.optimizer()
    return lambda: take_over_clipping(on_rank_1(None, accelerator()), optimizer)


def clip_taken_over(script: Script) -> Call:
    optimizer, driver = ParallelOptimizer(script.adam, script.registry), accelerator()
    take_over_clipping(driver, optimizer)
    optimizer.backward(script.loss())
    return lambda: driver.clip_grad_norm_(on_rank_1(None, script.params), 1.0)


def sync(**wrong: Any) -> Callable[[Script], Call]:
    """Prepare the first call of `sync_gradients` with this registry."""

    def prepare(script: Script) -> Call:
        script.loss().backward()
        return lambda: sync_gradients(**{"params": script.params, **on_rank_1(wrong, {})}, registry=script.registry)

    return prepare


def booster(**wrong: Any) -> Callable[[Script], Call]:
    return lambda script: lambda: Booster(registry=script.registry, **on_rank_1(wrong, {}))


def boost(**wrong: Any) -> Callable[[Script], Call]:
    def prepare(script: Script) -> Call:
        maker = Booster(registry=script.registry)
        right = {"model": script.model, "optimizer": script.adam}
        return lambda: maker.boost(**on_rank_1({**right, **wrong}, right))

    return prepare


def unshard_wrong(wrong: Any) -> Callable[[Script], Call]:
    return lambda script: lambda: unshard(on_rank_1(wrong, torch.ones(2, 2)), P("data", None), script.registry)


def gather(script: Script) -> Call:
    return lambda: gather_objects(on_rank_1(Refuses(), 1), script.registry)


def function_of_none(script: Script) -> Call:
    return lambda: on_all_ranks(on_rank_1(None, int), script.registry)


WRONG: dict[str, tuple[Callable[[Script], Call], str]] = {
    "ParallelOptimizer(None)": (optimizer_of_none, "the optimizer is a NoneType, not a torch optimizer"),
    "for_model(None)": (for_model_of(None), "the model is a NoneType; give the nn.Module"),
    "for_model([])": (for_model_of([]), "the model is a list; give the nn.Module"),
    "of_meshes(None)": (meshes_of(None), "None is not a DeviceMesh of torch; give the result of"),
    "add_param_group(None)": (add_group(lambda: None), "param_group is a NoneType; give a dict with the key 'params'"),
    "add_param_group({})": (add_group(dict), "give a dict with the key 'params'"),
    "add params None": (add_group(lambda: {"params": None}), "'params' of the param group is None; give a list"),
    "add params 'weight'": (
        add_group(lambda: {"params": "weight"}),
        "'params' of the param group is 'weight'",
    ),
    "add params [None]": (add_group(lambda: {"params": [None]}), "optimizer can only optimize Tensors"),
    "add params, generator raises": (
        add_group(lambda: {"params": raises_in_iteration()}),
        "the user's generator raised",
    ),
    "add params None, sharded": (
        add_group(lambda: {"params": None}, states=Sharded("data")),
        "'params' of the param group",
    ),
    "TorchStates None": (load_full_state(lambda state: state.clear()), "the state has no key 'state'; expected a dict"),
    "TorchStates no groups": (
        load_full_state(lambda s: s.update(param_groups=[None])),
        "the state['param_groups'][0] is None",
    ),
    "TorchStates state None": (
        load_full_state(lambda s: s["state"].update({0: None})),
        "the state['state'][0] is None",
    ),
    "TorchStates shape": (
        load_full_state(lambda s: s["state"][0].update(exp_avg=torch.ones(3))),
        "has shape (3,), but the",
    ),
    "TorchStates sharded None": (load_state(lambda s: s["state"][0].update(exp_avg=None)), "exp_avg of weight is"),
    "TorchStates sharded tensor": (load_state(lambda s: s["state"][0].update(exp_avg=torch.ones(3))), "no DTensor"),
    "TorchStates sharded missing": (load_state(lambda s: s["state"].pop(0) and None), "and missing on rank 1"),
    "save path": (save(path=None), "path is None; give the directory of the checkpoints"),
    "save model": (save(model=None), "NoneType"),
    "save keep": (save(keep="all"), "keep='all': give the number of checkpoints to keep"),
    "save extra": (save(extra=Refuses()), "extra= can't be stored (no copies of this object)"),
    "save state": (save_state, "'note' of param group 0 can't be stored (no copies of this object)"),
    "load path": (load(path=None), "path is None; give the directory of the checkpoints"),
    "load model": (load(model=None), "NoneType"),
    "load optimizer": (load(optimizer=None), "optimizer= of load_checkpoint is 'given' on rank 0 and 'None' on rank 1"),
    "load trainable_only": (
        load(trainable_only=True),
        "trainable_only= of load_checkpoint is False on rank 0 and True on",
    ),
    "AsyncSaver path": (background_saver, "path is None; give the directory of the checkpoints"),
    "AsyncSaver.save optimizer": (save_in_background(optimizer=None), "the optimizer is of type NoneType; give the"),
    "Recorder path": (recorder, "path is None; give the path of the file"),
    "loader option": (loader(nonsense=1), "unexpected keyword argument 'nonsense'"),
    "loader workers": (loader(num_workers=-1), "num_workers option should be non-negative"),
    "random_factors": (factors, "NoneType"),
    "clip params None": (clip(clip_grad_norm_, params=None), "params is None; give a module, parameters, or"),
    "clip params [None]": (clip(clip_grad_norm_, params=[None]), "params has an item of type NoneType"),
    "clip max_norm": (clip(clip_grad_norm_, max_norm=None), "max_norm=None: give a threshold or a rule"),
    "clip norm_type": (clip(clip_grad_norm_, norm_type="two"), "norm_type"),
    "norm params": (clip(global_norm, params=3), "params is 3; give a module, parameters, or"),
    "take_over_clipping": (take_over, "take_over_clipping(NoneType, ...): give an Accelerator or a Trainer"),
    "clip of accelerate": (clip_taken_over, "'NoneType' object is not iterable"),
    "prove model": (proof(prove, model=None), "the model is a NoneType; give an nn.Module"),
    "prove dtype": (proof(prove, dtype="float64"), "dtype=float64: give torch.float64, or None"),
    "prove max_parameters": (proof(prove, max_parameters="all"), "max_parameters=all: give a number >= 1"),
    "prove max_parameters True": (proof(prove, max_parameters=True), "max_parameters=True: give a number >= 1"),
    "prove seed": (proof(prove, seed=1), "seed= is 0 on rank 0 and 1 on rank 1"),
    "infer model": (proof(infer, model=None), "the model is a NoneType; give an nn.Module"),
    "infer shapes": (proof(infer, shapes=[4, 2]), "shapes is a list; give a dict of shapes by name"),
    "sync params None": (sync(params=None), "'NoneType' object is not iterable"),
    "sync params [None]": (sync(params=[None]), "params has an item of type NoneType"),
    "sync undeclared": (sync(params=[nn.Parameter(torch.ones(2))]), "declare the same parameters"),
    "broadcast_weights model": (
        lambda script: lambda: broadcast_weights(on_rank_1(None, script.model), script.registry),
        "broadcast_weights: the model is a NoneType; give an nn.Module",
    ),
    "broadcast_weights shapes": (
        lambda script: lambda: broadcast_weights(on_rank_1(nn.Linear(2, 4), script.model), script.registry),
        "first [weight (2, 4) torch.float32] on rank 0 and [weight (4, 2) torch.float32] on rank 1",
    ),
    "broadcast_weights order": (
        lambda script: (
            lambda: broadcast_weights(
                nn.Sequential(*on_rank_1([nn.Linear(4, 2), nn.Linear(2, 4)], [nn.Linear(2, 4), nn.Linear(4, 2)])),
                script.registry,
            )
        ),
        "ranks 0 and 1 have different tensors, first [0.weight (4, 2) torch.float32] on rank 0 and [0.weight (2, 4) "
        "torch.float32] on rank 1",
    ),
    "broadcast_weights dtype": (
        lambda script: lambda: broadcast_weights(on_rank_1(nn.Linear(4, 2).half(), script.model), script.registry),
        "[weight (2, 4) torch.float16]",
    ),
    "broadcast_weights one more": (
        lambda script: (
            lambda: broadcast_weights(nn.Sequential(script.model, *on_rank_1([nn.Linear(2, 2)], [])), script.registry)
        ),
        "first [no such tensor] on rank 0 and [1.weight (2, 2) torch.float32]",
    ),
    "connect": (lambda script: lambda: script.registry.connect(on_rank_1("rows", "data")), "rows"),
    "Booster mixed_precision": (booster(mixed_precision="fp17"), "fp17"),
    "Booster data_parallel": (booster(data_parallel="zero4"), "data_parallel='zero4': give one of"),
    "Booster max_norm": (booster(max_norm=-1.0), "max_norm=-1.0: give a finite number > 0"),
    "Booster accumulation_steps": (booster(accumulation_steps=0), "accumulation_steps"),
    "Booster option": (booster(plugin=1), "plugin= is an argument of neither Booster nor ParallelOptimizer"),
    "boost model": (boost(model=None), "the model is a NoneType; give the nn.Module"),
    "boost optimizer None": (boost(optimizer=None), "optimizer= of boost is given on rank 0 and None on rank 1"),
    "boost optimizer": (boost(optimizer=3), "optimizer is a int; give a plain torch optimizer"),
    "boost criterion": (boost(criterion=3), "criterion is a int; give a loss function or a module, or None"),
    "boost dataloader": (boost(dataloader=3), "dataloader is a int; give a DataLoader, another iterable, or None"),
    "unshard None": (unshard_wrong(None), "shard"),
    "unshard number": (unshard_wrong(3), "shard"),
    "unshard dtype": (
        unshard_wrong(torch.ones(2, 2, dtype=torch.int64)),
        "torch.int64 with ndim=2 on rank 1, and torch.",
    ),
    "unshard dims": (unshard_wrong(torch.ones(2)), "shard"),
    "gather_objects": (gather, "pickle fails (LookupError: no copies of this object)"),
    "on_all_ranks": (function_of_none, "'NoneType' object is not callable"),
}


class Outcome(NamedTuple):
    error: str  # the name of its class, and its text
    changed: bool


def attempt(script: Script, call: Call) -> Outcome:
    before = script.state()
    try:
        call()
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    else:
        error = ""
    return Outcome(error, script.state() != before)


def make_wrong_call(name: str, folder: Path) -> Outcome:
    with ExitStack() as stack:
        script = Script(folder, stack)
        outcome = attempt(script, WRONG[name][0](script))
        gather_objects(None, script.registry)  # the collectives of the ranks still match
        return outcome


def check(outcomes: list[Outcome], expected: str) -> None:
    for rank, outcome in enumerate(outcomes):
        assert expected in outcome.error, f"rank {rank}: {outcome.error}"
        assert not outcome.changed, f"rank {rank} was changed"


@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument_on_one_rank_raises_on_both_ranks(world: World, tmp_path: Path, name: str) -> None:
    check(world.run(2, make_wrong_call, name, tmp_path), WRONG[name][1])


def raise_on_one_rank_only(folder: Path) -> Outcome:
    with ExitStack() as stack:
        script = Script(folder, stack, timeout=2)

        def call() -> None:
            if dist.get_rank() == 1:
                raise ValueError("wrong")
            gather_objects(None, script.registry)

        return attempt(script, call)


@pytest.mark.long
def test_helper_check_detects_error_raised_on_one_rank_only(world: World, tmp_path: Path) -> None:
    outcomes = world.run(2, raise_on_one_rank_only, tmp_path)
    world.close()  # a process group in which a rank got no reply is unusable
    assert "got no reply" in outcomes[0].error
    with pytest.raises(AssertionError, match=r"rank 0: .*got no reply"):
        check(outcomes, "ValueError: wrong")


# In later calls of `clip_grad_norm_`, ranks no longer compare arguments. An error on one rank makes the norm non-finite on
# the other rank.

LATER: dict[str, dict[str, Any]] = {
    "params": {"params": None},
    "items": {"params": [None]},
    "max_norm": {"max_norm": -1.0},
    "norm_type": {"norm_type": 0.5},
    "reduction": {"reduction": "none"},
}
RULES: dict[str, Callable[[], Any]] = {"threshold": lambda: 1e-3, "rule": lambda: ClipState(PerParameter(1e-3))}


def make_later_call(wrong: dict[str, Any], rule: str, folder: Path) -> tuple[str, bool, bool]:
    """Make a second, wrong call. Return its error, whether ``found_inf`` is 1, and whether the result of `Script.state`
    changed."""
    with ExitStack() as stack:
        script = Script(folder, stack)
        right = {"params": script.params, "max_norm": RULES[rule](), "registry": script.registry}
        script.loss().backward()
        clip_grad_norm_(**right)
        stats: Any = None

        def call() -> None:
            nonlocal stats
            stats = clip_grad_norm_(**on_rank_1({**right, **wrong}, right))

        outcome = attempt(script, call)
        gather_objects(None, script.registry)
        return outcome.error, stats is not None and bool(stats.found_inf), outcome.changed


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("wrong", LATER)
def test_wrong_argument_of_later_clipping_makes_norm_nonfinite_on_other_rank(
    world: World, tmp_path: Path, wrong: str, rule: str
) -> None:
    if wrong == "max_norm" and rule == "rule":
        pytest.skip("without its ClipState, a rank cannot know which collective the other rank calls")
    results = world.run(2, make_later_call, LATER[wrong], rule, tmp_path)
    assert results[0] == ("", True, False)
    assert results[1][0].startswith(("TypeError", "ValueError"))
    assert not results[1][2]


def unscale_wrong(folder: Path, call: str) -> tuple[str, bool]:
    """Return the error, and whether the optimizer of the wrong call was stepped."""
    with ExitStack() as stack:
        script = Script(folder, stack)
        scaler = GradScaler(script.registry, device="cpu")
        weight = nn.Parameter(torch.ones(3))
        second = torch.optim.SGD([weight], lr=0.1)
        scaler.scale(script.loss() + weight.sum()).backward()
        if call == "unscale_ of the second optimizer":
            scaler.unscale_(script.adam)

        def wrong() -> None:
            of_this_rank: Any = on_rank_1(None, second)
            if call != "step":
                scaler.unscale_(of_this_rank)
            scaler.step(of_this_rank)

        error = attempt(script, wrong).error
        gather_objects(None, script.registry)
        return error, not torch.equal(weight, torch.ones(3))


@pytest.mark.parametrize("call", ["step", "unscale_", "unscale_ of the second optimizer"])
def test_grad_scaler_with_wrong_optimizer_on_one_rank_raises_there_and_skips_step_elsewhere(
    world: World, tmp_path: Path, call: str
) -> None:
    first, second = world.run(2, unscale_wrong, tmp_path, call)
    assert first == ("", False)
    assert second == ("TypeError: the optimizer is a NoneType; give a torch optimizer or a ParallelOptimizer", False)
