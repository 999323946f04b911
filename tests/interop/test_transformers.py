"""Models of Transformers that its plans shard, compared with the unsharded model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import P, annotate, registry_of, spec_of
from torch import Tensor, nn
from transformers_models import Mesh, loaded, loss_of, made, sgd, tokens_of, weights_of
from world import World

pytest.importorskip("transformers", reason="needs transformers (the extra 'interop')")

Trained = tuple[list[float], dict[str, Tensor]]
MESHES = [(1, 2), (2, 2)]
STEPS = 3


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A function that returns the path of the float64 checkpoint of a model."""

    def path_of(kind: str) -> str:
        path = tmp_path_factory.getbasetemp() / f"transformers-{kind}"
        if not path.exists():
            made(kind).double().save_pretrained(path)
        return str(path)

    return path_of


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, fused=True)


def split_run(
    path: str,
    mesh: Mesh,
    dtype: torch.dtype = torch.float64,
    make: Any = sgd,
    micro: int = 1,
    **options: Any,
) -> Trained:
    model = loaded(path, mesh, dtype)
    optimizer = ParallelOptimizer.for_model(model, make(model), max_norm=0.8, **options)
    registry, norms = optimizer.registry, []
    rows = slice(registry.rank("fsdp"), None, mesh[0])
    for step in range(STEPS):
        stats = None
        for part in tokens_of(step).chunk(micro):
            optimizer.backward(loss_of(model, part[rows]))
            stats = optimizer.step()
            optimizer.zero_grad()
        assert stats is not None
        norms.append(float(stats.total_norm))
    weights = weights_of(model)
    registry.close()
    return norms, weights


def run_recipe(path: str) -> int:
    """Run the first snippet of docs/integrations/TRANSFORMERS.md and a step; return the world size of its registry."""
    page = (Path(__file__).parents[2] / "docs" / "integrations" / "TRANSFORMERS.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {"path": path}
    exec(compile(code, "TRANSFORMERS.md", "exec"), names)
    model, optimizer = names["model"], names["optimizer"]
    with optimizer.registry as registry:
        optimizer.backward(loss_of(model, tokens_of(0)[registry.rank("fsdp") :: 2]))
        assert not bool(optimizer.step().skipped)
        return int(registry.topology.world_size)


def test_transformers_page_recipe_steps_on_four_ranks(world: World, saved: Callable[[str], str]) -> None:
    assert world.run(4, run_recipe, saved("llama")) == [4] * 4


def whole_run(path: str, make: Any = sgd) -> Trained:
    model = loaded(path, None)
    optimizer, norms = make(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, tokens_of(step)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.8)))
        optimizer.step()
    return norms, weights_of(model)


def assert_equal(found: Trained, expected: Trained, tolerance: float) -> None:
    assert min(expected[0]) > 0.8, "every step should clip"
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    for name, weight in expected[1].items():
        torch.testing.assert_close(found[1][name], weight, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_sharded_transformers_model_trains_like_unsharded_model(
    world: World, saved: Callable[[str], str], kind: str, mesh: Mesh
) -> None:
    path = saved(kind)
    expected = whole_run(path)
    for found in world.run(mesh[0] * mesh[1], split_run, path, mesh):
        assert_equal(found, expected, 1e-12)


# (2, 1, 2) must be last: a later case with an equal mesh would get its groups from torch's cache, although they belong to a
# destroyed default group.
@pytest.mark.parametrize("mesh", [(4, 1, 2), (2, 2, 2), (2, 2, 4), (2, 1, 2)])
def test_transformers_experts_on_a_separate_mesh_train_like_unsharded_model(
    world: World, saved: Callable[[str], str], mesh: Mesh
) -> None:
    """Dense layers are sharded over fsdp x tp.

    Experts are sharded over ep, and fully sharded over efsdp=2 or over one rank.
    """
    path = saved("qwen3_moe")
    expected = whole_run(path)
    for found in world.run(mesh[0] * mesh[1], split_run, path, mesh):
        assert_equal(found, expected, 1e-12)


def in_modes(path: str, mesh: Mesh) -> list[Trained]:
    return [
        split_run(path, mesh, torch.float32),
        split_run(path, mesh, torch.bfloat16, precision="bf16"),
    ]


@pytest.mark.parametrize("mesh", MESHES)
def test_sharded_model_in_float32_or_bfloat16_trains_like_unsharded_float64_model(
    world: World, saved: Callable[[str], str], mesh: Mesh
) -> None:
    path = saved("qwen3")
    expected = whole_run(path)
    for fp32, bf16 in world.run(mesh[0] * mesh[1], in_modes, path, mesh):
        assert_equal(fp32, expected, 1e-4)
        assert_equal(bf16, expected, 5e-2)


# Accumulation ------------------------------------------------------------------------------------------------------------


def accumulated(path: str, mesh: Mesh) -> Trained:
    return split_run(path, mesh, micro=2, accumulation_steps=2)


@pytest.mark.parametrize("mesh", MESHES)
def test_accumulation_is_exact_for_norm_layers_with_partial_gradients(
    world: World, saved: Callable[[str], str], mesh: Mesh
) -> None:
    path = saved("qwen3")
    expected = whole_run(path)
    for found in world.run(mesh[0] * mesh[1], accumulated, path, mesh):
        assert_equal(found, expected, 1e-12)


def stock_gradients(path: str, ours: bool) -> tuple[float, float]:
    """Return the error of the reduced, accumulated gradient of a q_norm, and the norm of the unsharded gradient."""
    model, whole = loaded(path, (1, 2)), loaded(path, None)
    name = "model.layers.0.self_attn.q_norm.weight"
    found, expected = dict(model.named_parameters())[name], dict(whole.named_parameters())[name]
    registry = registry_of(model) if ours else None
    for step in range(2):
        loss_of(model, tokens_of(step)).backward()
        loss_of(whole, tokens_of(step)).backward()
    assert found.grad is not None and expected.grad is not None  # noqa: PT018
    if registry is not None:
        torch.distributed.all_reduce(found.grad, group=registry.group("tp"))
        assert spec_of(found) == P(partial="tp")
        registry.close()
    return float((found.grad - expected.grad).norm()), float(expected.grad.norm())


def test_registry_of_call_removes_transformers_hook_that_reduces_gradients_twice(
    world: World, saved: Callable[[str], str]
) -> None:
    path = saved("qwen3")
    for error, norm in world.run(2, stock_gradients, path, False):
        assert error > 0.1 * norm, "the hook of Transformers should give a wrong gradient"
    for error, norm in world.run(2, stock_gradients, path, True):
        assert error < 1e-12 * norm


# Trainer -----------------------------------------------------------------------------------------------------------------


def trained(path: str, max_grad_norm: float, directory: str, port: int, ours: dict[str, float] | None) -> Trained | str:
    """Train on fsdp=2 with the Trainer; ``ours``: options of the `ParallelOptimizer`, None for the stock Trainer.

    Return norms and weights, or the error.
    """
    from transformers import Trainer, TrainingArguments, default_data_collator

    rank = torch.distributed.get_rank()
    size = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": torch.distributed.get_world_size(), "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in size.items()} | {"MASTER_ADDR": "localhost"})
    model = loaded(path, (2, 1), torch.float32)
    arguments = TrainingArguments(
        directory,
        use_cpu=True,
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=max_grad_norm,
        lr_scheduler_type="constant",
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        train_sampling_strategy="sequential",
    )
    optimizer: Any = adamw(model) if ours is None else ParallelOptimizer.for_model(model, adamw(model), **ours)
    rows = [{"input_ids": row, "labels": row} for step in range(3) for row in tokens_of(step, 8)]
    trainer = Trainer(
        model, arguments, train_dataset=rows, data_collator=default_data_collator, optimizers=(optimizer, None)
    )
    try:
        trainer.train()
        assert trainer.model_wrapped is model, "the Trainer wrapped the model"
        norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
        return norms, weights_of(model)
    except ValueError as error:
        return str(error)
    finally:
        if ours is not None:
            optimizer.registry.close()


def test_trainer_with_parallel_optimizer_trains_like_stock_trainer(
    world: World, saved: Callable[[str], str], tmp_path: Path
) -> None:
    """The Trainer has ``max_grad_norm=0`` and ``optimizers=(ParallelOptimizer.for_model(..., max_norm=0.8), None)``."""
    path, arguments = saved("qwen3"), (str(tmp_path), 29555)
    stock = world.run(2, trained, path, 0.8, *arguments, None)
    for found, expected in zip(world.run(2, trained, path, 0.0, *arguments, {"max_norm": 0.8}), stock, strict=True):
        assert not isinstance(found, str), found
        assert not isinstance(expected, str), expected
        assert_equal(found, expected, 1e-5)


def test_trainer_with_its_own_clipping_raises_a_clear_error(
    world: World, saved: Callable[[str], str], tmp_path: Path
) -> None:
    for found in world.run(2, trained, saved("qwen3"), 1.0, str(tmp_path), 29556, {}):
        assert "call meshstep.optim.take_over_clipping(trainer, optimizer), or write" in str(found)
        assert "TrainingArguments(max_grad_norm=0)" in str(found)


# Rejected models ---------------------------------------------------------------------------------------------------------


def refused(path: str) -> list[str]:
    found = []
    model = loaded(path, (1, 2))
    attention = model.model.layers[1].self_attn
    inner = attention.k_norm.forward
    attention.k_norm.forward = lambda x: inner(x)
    with pytest.raises(ValueError, match="contains no model that from_pretrained has sharded") as unsharded:
        registry_of(made("qwen3"))
    found.append(str(unsharded.value))
    with pytest.raises(ValueError, match="in the tensor-parallel plan, but") as patched:
        ParallelOptimizer.for_model(model, sgd(model))
    found.append(str(patched.value))
    assert "forward" in vars(attention.q_norm), "for_model changed a model before it raised"
    return found


def test_unsharded_models_and_models_with_replaced_forward_are_rejected(
    world: World, saved: Callable[[str], str]
) -> None:
    for whole, wrapped in world.run(2, refused, saved("qwen3")):
        assert "Qwen3ForCausalLM contains no model that from_pretrained has sharded; load it with" in whole
        assert (
            "model.layers.1.self_attn.k_norm is 'replicated_with_grad_allreduce' in the tensor-parallel plan" in wrapped
        )


def declared_before(path: str) -> str:
    model = loaded(path, (1, 2))
    norm = model.model.layers[1].self_attn.k_norm
    annotate(norm.weight, P())
    with pytest.raises(ValueError, match="is declared") as error:
        registry_of(model)
    assert "forward" in vars(norm), "registry_of changed a model before it raised"
    annotate(norm.weight, P(partial="tp"))
    registry_of(model).close()
    return str(error.value)


def test_norm_layer_declared_without_its_partial_axis_is_rejected(world: World, saved: Callable[[str], str]) -> None:
    for message in world.run(2, declared_before, saved("qwen3")):
        assert "self_attn.k_norm.weight is declared P(), but its gradient is partial over 'tp'" in message
