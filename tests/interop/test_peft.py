"""LoRA on sharded models of Transformers, compared with PEFT, and PEFT's own adapters and files."""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from meshstep.optim import ParallelOptimizer, load_checkpoint, save_checkpoint
from meshstep.parallel import (
    ProcessGroupRegistry,
    Topology,
    add_lora,
    declare_adapters,
    full_shape,
    load_adapter,
    registry_of,
    save_adapter,
    shard,
    spec_of,
    unshard,
)
from meshstep.parallel.interop.local_parameters import local_tensor
from meshstep.testing import prove
from torch import Tensor, nn
from transformers_models import Mesh, loaded, loss_of, made, tokens_of
from world import World

pytest.importorskip("transformers", reason="needs transformers (the extra 'interop')")
pytest.importorskip("peft", reason="needs peft (the extra 'interop')")

Weights = dict[str, Tensor]
MESHES = [(1, 2), (2, 2)]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
R, ALPHA, STEPS, MAX_NORM = 2, 4.0, 4, 0.01


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A function that returns the path of the float64 checkpoint of a model."""

    def path_of(kind: str) -> str:
        path = tmp_path_factory.getbasetemp() / f"peft-{kind}"
        if not path.exists():
            made(kind).double().save_pretrained(path)
        return str(path)

    return path_of


def with_peft(model: nn.Module, targets: list[str], **options: Any) -> nn.Module:
    peft: Any = importlib.import_module("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=R, lora_alpha=int(ALPHA), target_modules=targets, **options)
        adapted: nn.Module = peft.get_peft_model(model, config)
        return adapted


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def plain(name: str) -> str:
    """Return the name of a factor without PEFT's additions."""
    name = name.replace("lora_embedding_", "lora_")
    for text in ("base_model.model.", ".default", ".weight"):
        name = name.replace(text, "")
    return name


def randomized(shape: tuple[int, ...], name: str) -> Tensor:
    seed = sum(map(ord, plain(name)))
    return 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def own_run(path: str, mesh: Mesh, targets: list[str], **options: Any) -> tuple[list[float], Weights]:
    """Train LoRA of meshstep, and return norms and full adapter weights."""
    model = loaded(path, mesh)
    with registry_of(model) as registry:
        adapters = add_lora(model, targets, R, ALPHA, registry, **options)
        set_random(adapters)
        return run(model, registry, mesh)


def set_random(adapters: Any) -> None:
    """Set both factors to random values, which are the same full tensors on every layout."""
    for name, adapter in adapters.items():
        layout = adapter._layout
        fulls = {"lora_A": (R, layout.in_features), "lora_B": (layout.out_features, R)}
        for factor, shape in fulls.items():
            param = getattr(adapter, factor)
            full = randomized(shape, f"{name}.{factor}")
            param.data.copy_(shard(full, spec_of(param), layout.registry))


def run(
    model: nn.Module, registry: Any, mesh: Mesh, steps: Sequence[int] = range(STEPS), folder: str = ""
) -> tuple[list[float], Weights]:
    """Train for ``steps``, from the checkpoint in ``folder`` if they do not begin at 0, and save a checkpoint there."""
    optimizer = ParallelOptimizer(adamw(model), registry, max_norm=MAX_NORM)
    norms = []
    if steps[0]:
        load_checkpoint(folder, model, optimizer, trainable_only=True)
    for step in steps:
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, tokens_of(step)[registry.rank("fsdp") :: mesh[0]]))
        norms.append(float(optimizer.step().total_norm))
    if folder:
        save_checkpoint(folder, model, optimizer, trainable_only=True)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    specs = {name: spec_of(param, registry.topology) for name, param in trained.items()}
    return norms, {plain(name): unshard(local_tensor(trained[name]), spec, registry) for name, spec in specs.items()}


def train_by_torch(model: nn.Module) -> list[float]:
    """Train an unsharded model with torch's clipping, and return the norms."""
    optimizer, norms = adamw(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, tokens_of(step)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    return norms


def peft_run(path: str, targets: list[str], **options: Any) -> tuple[list[float], Weights]:
    """Train PEFT's LoRA on the unsharded model with torch."""
    model = with_peft(loaded(path, None), targets, **options)
    for name, param in model.named_parameters():
        if "lora_A" in name or "lora_B" in name or "lora_embedding" in name:
            param.data.copy_(randomized(tuple(param.shape), name))
    norms = train_by_torch(model)
    return norms, {plain(name): param.detach() for name, param in model.named_parameters() if param.requires_grad}


def assert_equal(found: tuple[list[float], Weights], expected: tuple[list[float], Weights]) -> None:
    assert min(expected[0]) > MAX_NORM, "every step should clip"
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert found[1].keys() == expected[1].keys()
    for name, weight in expected[1].items():
        torch.testing.assert_close(found[1][name], weight, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rslora", "dora"])
def test_lora_on_sharded_transformers_trains_like_peft(
    world: World, saved: Callable[[str], str], kind: str, options: dict[str, Any], mesh: Mesh
) -> None:
    path = saved(kind)
    expected = peft_run(path, ALL, **options)
    for found in world.run(mesh[0] * mesh[1], own_run_with, path, mesh, ALL, options):
        assert_equal(found, expected)


def own_run_with(path: str, mesh: Mesh, targets: list[str], options: dict[str, Any]) -> tuple[list[float], Weights]:
    return own_run(path, mesh, targets, **options)


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_lora_on_sharded_embedding_and_head_trains_like_peft(
    world: World, saved: Callable[[str], str], options: dict[str, Any]
) -> None:
    path, targets = saved("llama"), ["embed_tokens", "lm_head", "o_proj"]
    expected = peft_run(path, targets, **options)
    for found in world.run(2, own_run_with, path, (1, 2), targets, options):
        assert_equal(found, expected)


def part_run(
    path: str, mesh: Mesh, options: dict[str, Any], steps: Sequence[int], folder: str
) -> tuple[list[float], Weights]:
    model = loaded(path, mesh)
    with registry_of(model) as registry:
        set_random(add_lora(model, ALL, R, ALPHA, registry, **options))
        return run(model, registry, mesh, steps, folder)


@pytest.mark.parametrize(
    ("kind", "options", "before", "after"),
    [("llama", {"use_dora": True}, (1, 2), (2, 2)), ("qwen3", {"use_rslora": True}, (2, 2), (1, 2))],
    ids=["llama-dora", "qwen3-rslora"],
)
def test_lora_training_on_transformers_resumes_on_another_layout(
    world: World,
    saved: Callable[[str], str],
    tmp_path: Path,
    kind: str,
    options: dict[str, Any],
    before: Mesh,
    after: Mesh,
) -> None:
    path, folder = saved(kind), str(tmp_path / "saved")
    first, _ = world.run(before[0] * before[1], part_run, path, before, options, range(STEPS // 2), folder)[0]
    expected = peft_run(path, ALL, **options)
    later = range(STEPS // 2, STEPS)
    for norms, weights in world.run(after[0] * after[1], part_run, path, after, options, later, folder):
        assert_equal(([*first, *norms], weights), expected)


# PEFT's own adapters --------------------------------------------------------------------------------------------------


def with_peft_run(path: str, mesh: Mesh, targets: list[str], options: dict[str, Any]) -> Any:
    """Train PEFT's LoRA on the sharded model after `declare_adapters`; return its error if it raises."""
    model = with_peft(loaded(path, mesh), targets, **options)
    with registry_of(model) as registry:
        try:
            declared = declare_adapters(model, registry)
        except ValueError as error:
            return str(error)
        for name in declared:
            param = model.get_parameter(name)
            if "lora_A" in name or "lora_B" in name:
                full = randomized((R, 16) if "lora_A" in name else (param.size(0), R), name)
                value = shard(full, spec_of(param, registry.topology), registry)
                local_tensor(param).data.copy_(value)
        return run(model, registry, mesh)


COLUMNS = ["q_proj", "k_proj", "up_proj"]


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"modules_to_save": ["q_norm", "k_norm"]}])
def test_peft_on_column_parallel_layers_trains_like_unsharded_model(
    world: World, saved: Callable[[str], str], options: dict[str, Any]
) -> None:
    path = saved("qwen3")
    expected = peft_run(path, COLUMNS, **options)
    for found in world.run(2, with_peft_run, path, (1, 2), COLUMNS, options):
        assert not isinstance(found, str), found
        assert_equal(found, expected)


@pytest.mark.parametrize(
    ("mesh", "targets", "text"),
    [
        (
            (1, 2),
            ["q_proj", "o_proj"],
            "o_proj: the 16 input features of this row-parallel layer are sharded over tp=2, ",
        ),
        ((2, 2), ["q_proj"], "lora_B.default.weight has shape (4, 2), but its base layer needs (8, 2)"),
        ((1, 2), ["embed_tokens"], "PEFT's LoRA looks up all ids in this rank's columns of lora_embedding_A"),
        (
            (1, 2),
            ["lm_head"],
            "lm_head: the output features of this layer are sharded over tp=2, but PEFT's lora_B does not",
        ),
    ],
)
def test_declare_adapters_rejects_peft_adapter_with_wrong_forward(
    world: World, saved: Callable[[str], str], mesh: Mesh, targets: list[str], text: str
) -> None:
    for found in world.run(mesh[0] * mesh[1], with_peft_run, saved("llama"), mesh, targets, {}):
        assert text in found
        assert "use LoRA(base, r, alpha) or add_lora of meshstep.parallel for this layer" in found


def test_prove_accepts_dora_of_peft(saved: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference of `prove` must hold the norm of the weight constant, because PEFT computes no gradient through it."""
    model = with_peft(loaded(saved("llama"), None), ["q_proj", "down_proj"], use_dora=True)
    registry = ProcessGroupRegistry(Topology())

    def loss(model: nn.Module) -> Tensor:
        return loss_of(model, tokens_of(0))

    proof = prove(model, loss, registry)
    assert len(proof.proved) == 2 * 2 * 3
    assert proof.is_correct, proof
    monkeypatch.setattr("meshstep.optim.proof.prove.constant_norms", contextlib.nullcontext)
    assert not prove(model, loss, registry).is_correct


# PEFT's files ---------------------------------------------------------------------------------------------------------


def saved_by_us(path: str, mesh: Mesh, targets: list[str], options: dict[str, Any], folder: str) -> Tensor:
    """Save random adapters of a sharded model in PEFT's format, and return the logits."""
    model = loaded(path, mesh)
    with registry_of(model) as registry:
        adapters = add_lora(model, targets, R, ALPHA, registry, **options)
        set_random(adapters)
        save_adapter(folder, model, registry)
        return logits_of(model)


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=tokens_of(0)).logits
    return logits


def loaded_by_us(path: str, mesh: Mesh, targets: list[str], options: dict[str, Any], folder: str) -> Tensor:
    model = loaded(path, mesh)
    with registry_of(model) as registry:
        add_lora(model, targets, R, ALPHA, registry, **options)
        load_adapter(folder, model, registry)
        return logits_of(model)


def loaded_by_peft(path: str, folder: str) -> Tensor:
    peft: Any = importlib.import_module("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT reads an attribute that Transformers has renamed
        return logits_of(peft.PeftModel.from_pretrained(loaded(path, None), folder))


FILES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "all layers": ([*ALL, "embed_tokens", "lm_head"], {}),
    "DoRA": ([*ALL, "embed_tokens", "lm_head"], {"use_dora": True}),
    "rsLoRA": (["o_proj", "up_proj"], {"use_rslora": True}),
}


@pytest.mark.parametrize("case", FILES)
def test_saved_adapter_gives_equal_logits_in_peft_and_on_another_layout(
    world: World, saved: Callable[[str], str], tmp_path: Path, case: str
) -> None:
    path, (targets, options) = saved("llama"), FILES[case]
    folder = str(tmp_path / "adapter")
    logits = world.run(2, saved_by_us, path, (1, 2), targets, options, folder)[0]
    assert not torch.allclose(logits, logits_of(loaded(path, None)), rtol=1e-3)
    torch.testing.assert_close(loaded_by_peft(path, folder), logits, rtol=1e-12, atol=1e-12)
    for found in world.run(4, loaded_by_us, path, (2, 2), targets, options, folder):
        torch.testing.assert_close(found, logits, rtol=1e-12, atol=1e-12)


def test_adapter_saved_by_peft_loads_onto_sharded_model(
    world: World, saved: Callable[[str], str], tmp_path: Path
) -> None:
    path, folder = saved("llama"), str(tmp_path / "adapter")
    model: Any = with_peft(loaded(path, None), ALL)
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data.copy_(randomized(tuple(param.shape), name))
    model.save_pretrained(folder)
    for found in world.run(2, loaded_by_us, path, (1, 2), ALL, {}, folder):
        torch.testing.assert_close(found, logits_of(model), rtol=1e-12, atol=1e-12)


def saved_from_peft(path: str, folder: str) -> Tensor:
    """Save PEFT's adapters, and its copies of the norms, from a sharded model."""
    model = with_peft(loaded(path, (1, 2)), COLUMNS, modules_to_save=["q_norm"])
    with registry_of(model) as registry:
        declare_adapters(model, registry)
        for name, param in model.named_parameters():
            if "lora_B" in name:
                full = randomized((param.size(0), R), name)
                local_tensor(param).data.copy_(shard(full, spec_of(param, registry.topology), registry))
            elif "modules_to_save" in name:
                param.data.mul_(1.5)
        for name, param in model.named_parameters():
            if "lora_A" in name:
                param.data.copy_(randomized((R, 16), name))
        save_adapter(folder, model, registry)
        return logits_of(model)


def test_adapters_of_peft_are_saved_in_full_from_sharded_model(
    world: World, saved: Callable[[str], str], tmp_path: Path
) -> None:
    """PEFT alone would save the shards of one rank only."""
    path, folder = saved("qwen3"), str(tmp_path / "adapter")
    logits = world.run(2, saved_from_peft, path, folder)[0]
    torch.testing.assert_close(loaded_by_peft(path, folder), logits, rtol=1e-12, atol=1e-12)


def refused_files(path: str, folder: str) -> list[str]:
    model = loaded(path, (1, 2))
    with registry_of(model) as registry:
        add_lora(model, ["q_proj"], R, ALPHA, registry)
        save_adapter(folder, model, registry)
        found = []
        for targets, r, alpha in ((["q_proj"], R, 1.0), (["o_proj"], R, ALPHA), (["q_proj"], R + 1, ALPHA)):
            other = loaded(path, (1, 2))
            add_lora(other, targets, r, alpha, registry)
            with pytest.raises(ValueError, match=r".") as error:
                load_adapter(folder, other, registry)
            found.append(str(error.value))
        return found


def test_adapter_file_with_different_alpha_layers_or_lora_rank_is_rejected(
    world: World, saved: Callable[[str], str], tmp_path: Path
) -> None:
    for alpha, layers, r in world.run(2, refused_files, saved("llama"), str(tmp_path / "adapter")):
        assert "q_proj has lora_alpha=1.0, but the saved adapter has lora_alpha=4.0" in alpha
        assert "lacks base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight" in layers
        assert "q_proj has r=3, but the saved adapter has r=2; create the adapters with r=2" in r


# The LoRA recipe of TRANSFORMERS.md -----------------------------------------------------------------------------------


def run_recipe(path: str, folder: str) -> list[str]:
    """Run the snippets about LoRA of docs/integrations/TRANSFORMERS.md and a step; return the trained parameters."""
    page = (Path(__file__).parents[2] / "docs" / "integrations" / "TRANSFORMERS.md").read_text()
    codes = [part.partition("```")[0] for part in page.split("```python\n")[1:4]]
    names: dict[str, Any] = {"path": path}
    exec(compile("\n".join([codes[0].rpartition("\nmodel =")[0], codes[1]]), "TRANSFORMERS.md", "exec"), names)
    model, optimizer = names["model"], names["optimizer"]
    with optimizer.registry as registry:
        optimizer.backward(loss_of(model, tokens_of(0)[registry.rank("fsdp") :: 2]))
        assert not bool(optimizer.step().skipped)
        before = os.getcwd()
        os.chdir(folder)
        exec(compile(codes[2], "TRANSFORMERS.md", "exec"), names)
        os.chdir(before)
        return [name for name, param in model.named_parameters() if param.requires_grad]


def test_transformers_page_lora_recipe_trains_only_the_factors(
    world: World, saved: Callable[[str], str], tmp_path: Path
) -> None:
    for names in world.run(4, run_recipe, saved("llama"), str(tmp_path)):
        assert len(names) == 2 * 4 * 2
        assert all("lora_" in name for name in names)
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


# Several experts in one parameter ---------------------------------------------------------------------------------------

EXPERT_WEIGHTS = ["experts.gate_up_proj", "experts.down_proj"]


def experts_run(path: str, mesh: Mesh, start: str, end: str) -> tuple[list[float], Tensor]:
    """Train adapters of the experts, and save them before and after. Return norms and logits."""
    model = loaded(path, mesh)
    with registry_of(model) as registry:
        add_lora(model, EXPERT_WEIGHTS, R, ALPHA, registry)
        for name, param in model.named_parameters():
            if "lora_B" in name:
                spec = spec_of(param, registry.topology)
                full = randomized(full_shape(tuple(param.shape), spec, registry.topology), name)
                param.data.copy_(shard(full, spec, registry))
        save_adapter(start, model, registry)
        norms, _ = run(model, registry, mesh)
        save_adapter(end, model, registry)
        return norms, logits_of(model)


def peft_experts_run(path: str, folder: str) -> tuple[list[float], Weights]:
    """Train the saved adapters in one process with PEFT; return norms and factors by PEFT's names."""
    peft: Any = importlib.import_module("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT reads an attribute that Transformers has renamed
        model = peft.PeftModel.from_pretrained(loaded(path, None), folder, is_trainable=True)
    norms = train_by_torch(model)
    return norms, {name.replace(".default", ""): param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize("mesh", [(1, 2), (1, 2, 2), (2, 2, 2)], ids=["tp", "ep", "fsdp x ep"])
def test_lora_on_stacked_experts_trains_like_peft(
    world: World, saved: Callable[[str], str], tmp_path: Path, mesh: Mesh
) -> None:
    path, start, end = saved("qwen3_moe"), str(tmp_path / "start"), str(tmp_path / "end")
    found = world.run(mesh[0] * mesh[1], experts_run, path, mesh, start, end)
    expected_norms, expected = peft_experts_run(path, start)
    assert min(expected_norms) > MAX_NORM, "every step should clip"
    trained: Weights = importlib.import_module("safetensors.torch").load_file(f"{end}/adapter_model.safetensors")
    assert len(trained) == 2 * 2 * 2
    for name, weight in trained.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-12, atol=1e-12, msg=name)
    logits = loaded_by_peft(path, end)
    for norms, ours in found:
        assert norms == pytest.approx(expected_norms, rel=1e-12)
        torch.testing.assert_close(ours, logits, rtol=1e-12, atol=1e-12)


def peft_experts_declared(path: str, mesh: Mesh) -> str:
    model = with_peft(loaded(path, mesh), [], target_parameters=EXPERT_WEIGHTS)
    with registry_of(model) as registry, pytest.raises(ValueError, match=r".") as error:
        declare_adapters(model, registry)
    return str(error.value)


def test_declare_adapters_rejects_peft_adapter_of_stacked_experts(world: World, saved: Callable[[str], str]) -> None:
    """The mesh shards by FSDP only: with tensor or expert parallelism, the constructor of PEFT already raises an error."""
    for text in world.run(2, peft_experts_declared, saved("qwen3_moe"), (2, 1)):
        assert "experts.down_proj, a parameter of several experts, is sharded (P(" in text
        assert text.endswith("use add_lora of meshstep.parallel with the name of this parameter")
