"""The examples in the docstrings of exported names run, except those in `NOT_RUN`, and have the values in their comments.

An example is an indented block outside of sections such as ``Args:``, or a fenced block of Python. It runs in one process.
`Names` makes the names that it uses without defining them, such as ``registry`` and ``model``. Formulas and tables are
fenced blocks of text, which are not run.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import re
import textwrap
import tokenize
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import meshstep
import pytest
import torch
from loops import using
from meshstep import ParallelOptimizer, ProcessGroupRegistry, Topology, declare
from meshstep.optim.kernels.choice import kernels_chosen
from meshstep.testing import fake_world
from torch import nn

PACKAGES = ("meshstep.parallel", "meshstep.amp", "meshstep.optim", "meshstep.testing")
SECTION = re.compile(r"(Args|Raises|Returns|Attributes|Yields|Collectives):\s*$")
AXES = ("data", "tensor", "row", "col", "input", "output", "weight", "expert", "cp", "pipe")
RANKS = {  # the number of ranks, of which the example runs on the first; other examples run in a world of one
    "ProcessGroupRegistry": 8,
    "ProcessGroupRegistry.from_device_mesh": 8,
    "Topology.of_meshes": 8,
    "NoiseScale": 2,
}
NOT_RUN = {  # examples that the test does not run, and what each one needs
    "ModelParallelUnit": "deepspeed",
    "WeightsAndBiases": "wandb and an account",
    "take_over_clipping": "transformers and accelerate; tests/interop run them",
    "Ranks": "the pytest fixture",
    "RankPool": "a function in a file, for other processes",
    "RanksError": "a function in a file, for other processes",
    "run_ranks": "a function in a file, for other processes",
    "registry_of": "a model of Transformers; tests/interop run it",
    "declare_adapters": "peft; tests/interop run it",
    "save_adapter": "safetensors; tests/optim/adapters run it",
    "load_adapter": "safetensors; tests/optim/adapters run it",
}
WITHOUT = {  # exported names without an example -> the reason
    "BiasLayout": "names of options",
    "DataParallel": "names of options",
    "Mode": "names of options",
    "Role": "names of options",
    "Position": "names of options; see StatePlacement",
    "Classifier2p5D": "deprecated",
    "Embedding2p5D": "deprecated",
    "LayerNorm2p5D": "deprecated",
    "Linear2p5D": "deprecated",
    "WarmupLR": "base class of the schedules, which have examples",
    "CommHook": "base class; Bf16Compression has an example",
    "PlacementContext": "made by the library for StatePlacement.check",
    "UpdateRequest": "made by the library for ParamTransform.step",
}

# Code that defines the names which an example takes from the text around it. It is executed before the example.
HIDDEN = "hidden = torch.randn(2, 4, 512)"
RECORDED = (
    "for name in ('a.jsonl', 'b.jsonl'):\n"
    "    with Recorder(optimizer, name):\n"
    "        optimizer.backward(model(x).square().mean()); optimizer.step()"
)
EXPERTS = (
    "experts = nn.ParameterDict({name: nn.Parameter(torch.ones(2, 4, 4)) for name in ('up', 'down')})\n"
    "model.experts = experts"
)
SETUP = {
    "random_factors": "from meshstep.parallel.interop.audit import audit\n"
    "loss_of = lambda model: model(x).square().mean()",
    "LoRA.merge": "model.up = LoRA(model.up, r=2, alpha=4)",
    "LoRA.unmerge": "model.up = LoRA(model.up, r=2, alpha=4)",
    "GroupedLoRA": EXPERTS,
    "GroupedLoRA.merge": f"{EXPERTS}; model.experts = GroupedLoRA(experts, ['up'], r=2, alpha=4, registry=registry)",
    "GroupedLoRA.unmerge": f"{EXPERTS}; model.experts = GroupedLoRA(experts, ['up'], r=2, alpha=4, registry=registry)",
    "Classifier2D": "embedding = Embedding2D(32000, 512, registry)\n"
    "hidden = torch.randn(4, 512); target = torch.randint(32000, (4,))",
    "Classifier3D": "hidden = torch.randn(4, 64); target = torch.randint(32000, (4,))",
    "ProcessGroupRegistry": "x = torch.ones(2)",
    "ProcessGroupRegistry.from_device_mesh": "from torch.distributed.device_mesh import init_device_mesh",
    "Region": "topology, full = Topology(tensor=2), torch.randn(8, 4)",
    "ShardedDataLoader": "loader = prepare_dataloader(dataset, registry, batch_size=2)",
    "Topology.of_meshes": "from torch.distributed.device_mesh import init_device_mesh\n"
    "dense = init_device_mesh('cpu', (4, 2), mesh_dim_names=('data', 'tensor'))\n"
    "experts = init_device_mesh('cpu', (2, 4), mesh_dim_names=('edp', 'expert'))",
    "all_gather_to": HIDDEN,
    "all_to_all": "tokens, sent, received, heads = torch.randn(6, 4), [6], [6], torch.randn(2, 4, 8, 16)",
    "annotate": "self = nn.Linear(4, 4)",
    "broadcast_from": "weight = torch.randn(4, 4)",
    "copy_to": HIDDEN,
    "cross_entropy_2d": "head, hidden = Classifier2D(8, 32, registry), torch.randn(4, 8); target = torch.randint(32, (4,))",
    "cross_entropy_3d": "head, hidden = Classifier3D(8, 32, registry), torch.randn(4, 8); target = torch.randint(32, (4,))",
    "declare": "layer = nn.ModuleDict({'mlp': nn.Linear(4, 4)})\n"
    "model = nn.ModuleDict({'head': nn.Linear(4, 4), 'layers': nn.ModuleList([layer])})",
    "gather_from": "logits = torch.randn(4, 8)",
    "get_dist_logger": "step = 1",
    "join": "model = nn.Linear(4, 4)",
    "on_all_ranks": "path = os.devnull",
    "reduce_from": "partial_output = torch.randn(4, 8)",
    "reduce_scatter_to": "partial_hidden = torch.randn(2, 4, 8)",
    "scatter_to": HIDDEN,
    "shard": "full_weight = torch.randn(4, 4)",
    "unshard": "weight = model.up.weight; weight.grad = torch.randn_like(weight)",
    "vocab_parallel_cross_entropy": "logits, target = torch.randn(4, 8), torch.randint(8, (4,))",
    "LossScale": "loss_scale, found_inf = DynamicLossScale(), torch.zeros(1)",
    "TorchFp16": "criterion = nn.MSELoss()",
    "stochastic_round_": "weight = torch.zeros(4, dtype=torch.bfloat16); weight_float32 = torch.randn(4)",
    "AsyncSaver": "path, steps, schedule = 'checkpoints', 2, torch.optim.lr_scheduler.ConstantLR(optimizer)",
    "ByGroup": "optimizer.add_param_group({'params': [('scale', nn.Parameter(torch.ones(2)))]})",
    "ClipState": "batches, path = [], 'clip.pt'; params = [*model.parameters()]; loss.backward()",
    "ClipResult": "norms = Norms(torch.tensor(2.0), *[None] * 6, 2.0)",
    "HoldOnSkip": "from torch.optim.lr_scheduler import OneCycleLR",
    "NoiseScale": "registry = ProcessGroupRegistry(Topology(data=2))\noptimizer = ParallelOptimizer(adamw, registry)",
    "Norms": "plan = optimizer.plan; gradients = [row.grad_tensor.grad for row in optimizer.stepped_tensors()]",
    "ParallelOptimizer.add_param_group": "adapter = nn.Linear(4, 4)",
    "ParallelOptimizer.window": "engine, inputs = Engine(optimizer, model), batch",
    "ParallelOptimizer.reload_from_model": "critic = model",
    "ParallelOptimizer.refresh": "optimizer.step()",
    "TorchStates": "from torch.distributed import checkpoint as dcp; path = 'saved'\n"
    "from torch.distributed.checkpoint.state_dict import (\n"
    "    get_model_state_dict, get_optimizer_state_dict, set_optimizer_state_dict)",
    "align_replicas": "step = 200",
    "Difference": RECORDED,
    "RunComparison": RECORDED,
    "compare_runs": RECORDED,
    "coordinate_check": "Model = lambda width, registry: declared(nn.Sequential(nn.Linear(4, width)))\n"
    "train = lambda model, steps: None",
    "load_checkpoint": "scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer); optimizer.step()\n"
    "save_checkpoint('checkpoints', model, optimizer, lr_scheduler=scheduler)",
    "save_checkpoint": "scheduler, step = torch.optim.lr_scheduler.ConstantLR(optimizer), 1; optimizer.step()",
    "replay": "optimizer = ParallelOptimizer(adamw, registry, states=Replayable())\n"
    "optimizer.backward(model(x).square().mean()); optimizer.step()",
    "Booster": "criterion, loader = nn.MSELoss(), torch.utils.data.DataLoader(dataset, batch_size=32)",
    "StatePlacement": "CountUpdates = ParamTransform",
    "Pipeline": "from torch.distributed.pipelining import PipelineStage, ScheduleGPipe\n"
    "inputs, targets = torch.randn(8, 4), torch.randn(8, 4)\n"
    "stage = PipelineStage(model, 0, 1, registry.device, group=registry.group('pipe'))\n"
    "schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)\n"
    "optimizer = ParallelOptimizer(adamw, registry)",
    "Finding": "model = WithLoss(model)",
    "Proof": "model = WithLoss(model)",
    "InferredLayout": "model = WithLoss(model)",
    "assert_exact": "import copy; parallel, dense = model, copy.deepcopy(model)",
    "CoordinateCheck": "def build(width):\n"
    "    model = declared(nn.Sequential(nn.Linear(4, width)))\n"
    "    return Trial(model, lambda: model(x), lambda: None)\n",
    "Trial": "train = lambda model, steps: None",
    "infer": "model = WithLoss(model)",
    "prove": "model = WithLoss(model)",
}


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.layers = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).square().mean()
        return loss


class Engine:
    """A user's training engine, which calls backward itself."""

    def __init__(self, optimizer: ParallelOptimizer, model: nn.Module) -> None:
        self.optimizer, self.model = optimizer, model

    def train_batch(self, inputs: torch.Tensor) -> None:
        self.optimizer.scale_loss(self.model(inputs).square().mean()).backward()


# Examples of docstrings -----------------------------------------------------------------------------------------------


def example_of(doc: str) -> str:
    """Return the code of a docstring as one program; "" if there is none. An indented block begins after an empty line."""
    found, in_section, fence, before = list[str](), False, "", ""
    for line in inspect.cleandoc(doc).splitlines():
        if line.startswith("```"):
            fence = "" if fence else line
        elif fence:
            found += ["    " + line] if fence == "```python" else []
        elif line.startswith("    ") and not in_section and (not before or found[-1:] == [before]):
            found.append(line)
        elif line:
            in_section = bool(SECTION.match(line)) or (in_section and line.startswith(" "))
        elif found:
            found.append("")
        before = line
    return textwrap.dedent("\n".join(found)).strip()


def documented(package: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, docstring) of an exported name and of its own public methods and properties."""
    found = getattr(import_module(package), name)
    yield name, (vars(found).get("__doc__") if isinstance(found, type) else getattr(found, "__doc__", "")) or ""
    for key, value in vars(found).items() if isinstance(found, type) else ():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not key.startswith("_") and inspect.isfunction(function):
            yield f"{name}.{key}", function.__doc__ or ""


EXAMPLES = {
    label: code
    for package in PACKAGES
    for name in import_module(package).__all__
    for label, doc in documented(package, name)
    if (code := example_of(doc))
}


# Names that examples use ----------------------------------------------------------------------------------------------


class Names:
    """Makes the names that an example uses without defining them; ``folder`` is a directory for files."""

    def __init__(self, code: str, folder: Path) -> None:
        self.code, self.folder, self.made = code, folder, dict[str, Any]()

    def of_example(self, setup: str) -> dict[str, Any]:
        """Return the namespace of the example: all exported names, and the names made here that it or ``setup`` uses."""
        used = {
            node.id for code in (self.code, setup) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)
        }
        exported = {name: getattr(import_module(package), name) for package in PACKAGES for name in dir_of(package)}
        modules = {"torch": torch, "dist": torch.distributed, "os": import_module("os"), "time": import_module("time")}
        helpers = {"nn": nn, "WithLoss": WithLoss, "Engine": Engine, "declared": declared}
        return (
            {"__name__": "example"}
            | exported
            | modules
            | helpers
            | {name: self.get(name) for name in used if self.has(name)}
        )

    def has(self, name: str) -> bool:
        return hasattr(self, f"make_{name}")

    def get(self, name: str) -> Any:
        if name not in self.made:
            make: Callable[[], Any] = getattr(self, f"make_{name}")
            self.made[name] = make()
        return self.made[name]

    def make_registry(self) -> ProcessGroupRegistry:
        return ProcessGroupRegistry(self.get("topology"))

    def make_topology(self) -> Topology:
        size = torch.distributed.get_world_size()
        axes: dict[str, Any] = dict.fromkeys(AXES, 1) | {"data": size}
        return Topology(**axes)

    def make_model(self) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential()
        model.add_module("up", nn.Linear(4, 8))
        model.add_module("head", nn.Linear(8, 4))
        return declared(model)

    def make_adamw(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.get("model").named_parameters(), lr=1e-3, fused=True)

    make_inner = make_adamw

    def make_sgd(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.get("model").named_parameters(), lr=1e-3, momentum=0.9, fused=True)

    def make_optimizer(self) -> ParallelOptimizer:
        optimizer = ParallelOptimizer(self.get("adamw"), self.get("registry"), max_norm=1.0)
        if "backward" not in self.code:
            optimizer.backward(self.get("loss"))
        return optimizer

    def make_loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.get("model")(self.get("x")).square().mean()
        return loss

    def make_x(self) -> torch.Tensor:
        return torch.randn(8, 4)

    make_batch = make_x

    def make_dataset(self) -> torch.utils.data.Dataset[Any]:
        return torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 4))


def declared(model: nn.Module) -> nn.Module:
    declare(model, {"*": meshstep.P()})
    return model


def dir_of(package: str) -> list[str]:
    names: list[str] = import_module(package).__all__
    return names


# Tests ----------------------------------------------------------------------------------------------------------------


def stated_values(code: str) -> dict[int, Any]:
    """Return the values that comments state, by line: ``3 + 4  # 7``. A comment that is not a literal states no value."""
    values = {}
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            with contextlib.suppress(ValueError, SyntaxError):
                values[token.start[0]] = ast.literal_eval(token.string[1:].partition(";")[0].strip())
    return values


def run(code: str, namespace: dict[str, Any], label: str) -> int:
    """Execute an example statement by statement. Return the number of values that were compared with a comment."""
    stated, compared = stated_values(code), 0
    for statement in ast.parse(code).body:
        if isinstance(statement, ast.Expr) and statement.end_lineno in stated:
            value = eval(compile(ast.Expression(statement.value), label, "eval"), namespace)
            if value is None:  # a call of `print`, whose text depends on the model
                continue
            assert str(value) == str(stated[statement.end_lineno]), f"{label}: {ast.unparse(statement)}"
            compared += 1
        else:
            exec(compile(ast.Module([statement], []), label, "exec"), namespace)
    return compared


@pytest.mark.parametrize("label", [label for label in EXAMPLES if label not in NOT_RUN])
def test_docstring_example_runs(label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = EXAMPLES[label].replace('"cuda"', '"cpu"')
    kernels = using(kernels_chosen())  # an example calls use_kernels, which must not affect later tests
    with kernels, fake_world(RANKS.get(label, 1)), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        setup = SETUP.get(label, "")
        namespace = Names(code, tmp_path).of_example(setup)
        exec(setup, namespace)
        run(code, namespace, label)


def test_exported_names_without_docstring_example_are_the_listed_exceptions() -> None:
    exported = {name for package in PACKAGES for name in dir_of(package)}
    assert exported - {*EXAMPLES} == {*WITHOUT}
    assert {*SETUP, *NOT_RUN, *RANKS} <= {*EXAMPLES}


def test_values_in_comments_of_docstring_examples_are_compared_with_results() -> None:
    topology = EXAMPLES["Topology"]
    with fake_world(1), ProcessGroupRegistry(Topology()):
        assert run(topology, {"Topology": Topology}, "Topology") == 2
        with pytest.raises(AssertionError, match=r"Topology: topology\.peers"):
            run(topology.replace("(4, 5, 6, 7)", "(4, 5, 6)"), {"Topology": Topology}, "Topology")


@pytest.mark.parametrize("package", PACKAGES)
def test_documented_arguments_of_exported_names_exist(package: str) -> None:
    wrong = []
    for name in dir_of(package):
        found = getattr(import_module(package), name)
        try:
            parameters = {*inspect.signature(found).parameters}
        except (TypeError, ValueError):  # a type alias
            continue
        if parameters <= {"args", "kwargs", "options", "self"}:
            continue
        section = re.search(r"^Args:\n((?:    .*\n|\n)+)", inspect.cleandoc(found.__doc__ or "") + "\n", re.MULTILINE)
        entries = re.findall(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*):", section[1] if section else "", re.MULTILINE)
        wrong += [
            f"{name}: {arg}" for entry in entries for arg in entry.replace("*", "").split(", ") if arg not in parameters
        ]
    assert wrong == []
