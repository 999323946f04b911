"""Steps with Triton kernels in the interpreter, compared with torch and the dense model."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import pytest
import torch
from interpreted import Interpreted, kernels, why_no_triton
from kernel_formulas import Adam
from kernel_steps import CHANGES, MAKE, SHAPES, changed, close, gradients, model_of, of
from loops import using
from meshstep.optim import ParallelOptimizer, use_kernels
from meshstep.optim.kernels import choice
from meshstep.optim.kernels.choice import Kernels
from meshstep.optim.step.update import steps_on_device
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import Tensor, nn

needs_triton = pytest.mark.skipif(bool(why_no_triton()), reason=why_no_triton())
KERNELS: tuple[Kernels, ...] = ("triton", "torch")
Stepped = tuple[dict[str, Any], list[Tensor]]


class Rows:
    """Counts the tensors that are stepped, and the powers that are computed, inside the context."""

    def __enter__(self) -> Rows:
        self.stepped = self.measured = 0
        update, powers = type(kernels()).update, type(kernels()).powers

        def counted_update(own: Any, kind: Any, parts: Any, *args: Any) -> None:
            self.stepped += sum(len(part.columns.numels) for part in parts)
            update(own, kind, parts, *args)

        def counted_powers(own: Any, tensors: Any, norm_type: float) -> Any:
            self.measured += len(tensors)
            return powers(own, tensors, norm_type)

        self._patched = mock.patch.multiple(type(kernels()), update=counted_update, powers=counted_powers)
        self._patched.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._patched.__exit__(*error)


def steps(name: str) -> tuple[Stepped, int, bool]:
    """Run five steps; one is skipped, and one gradient is missing in one step.

    Return states and parameters, the number of stepped tensors, and whether the optimizer steps on the device.
    """
    model = model_of()
    optimizer = of(model, MAKE[name])
    with Rows() as rows:
        for step in range(5):
            gradients(model, step)
            if step == 2:
                model[1].grad = None
            if step == 3:
                model[0].grad[1, 1] = torch.nan
            before = [(param.grad, None if param.grad is None else param.grad.clone()) for param in model]
            optimizer.step()
            for grad, kept in before:
                if grad is not None and kept is not None and step != 3 and rows.stepped:
                    assert torch.equal(grad, kept), "the step changed a gradient"
    state = optimizer.optimizer.state_dict(), [param.detach() for param in model]
    return state, rows.stepped, steps_on_device(optimizer.optimizer)


def by_both(name: str) -> tuple[Stepped, Stepped, int, bool]:
    found, rows, on_device = steps(name)
    with using("torch"):
        expected, none, _ = steps(name) if on_device else (found, 0, False)
    assert none == 0
    return found, expected, rows, on_device


@pytest.mark.default_cases(1)
@needs_triton
@pytest.mark.parametrize("name", MAKE)
def test_triton_step_gives_states_and_weights_of_torch(interpreted: Interpreted, name: str) -> None:
    """Keys, dtypes and shapes are equal, and values up to rounding."""
    found, expected, rows, on_device = interpreted(by_both, name)
    # torch makes the first step with dampening; torch 2.11's Adagrad has no `grad_scale` and `found_inf`.
    assert rows >= 4 * len(SHAPES) - 1 or not on_device
    assert found[0]["state"].keys() == expected[0]["state"].keys()
    close(found, expected)


@needs_triton
@pytest.mark.parametrize("change", CHANGES)
def test_triton_update_matches_torch_after_optimizer_changes_between_steps(
    interpreted: Interpreted, change: str
) -> None:
    """The step caches tables of addresses, which it must not use after such a change."""
    found, expected = interpreted(changed, change, KERNELS)
    close(found, expected)


# On two ranks -----------------------------------------------------------------------------------------------------------

RULE = Adam(0.02, 0.8, 0.95, eps=1e-4, weight_decay=0.1)
FULL, STEPS, CLIP = {"bias": (40,), "weight": (6, 40)}, 4, 3.0
TOPOLOGIES = {"data=2": Topology(data=2), "tensor=2": Topology(tensor=2)}


def full(name: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * seed + len(name))
    return torch.randn(FULL[name], generator=generator)


def on_ranks(where: str, precision: Any) -> tuple[dict[str, Tensor], list[float], int, int]:
    """Return the weights that this rank's optimizer steps (in bf16 the master weights) after some steps, one of them
    skipped; the norms; and the numbers of tensors that the kernels stepped and measured."""
    with ProcessGroupRegistry(TOPOLOGIES[where]) as registry, Rows() as rows:
        split = registry.size("tensor") if where == "tensor=2" else 1
        rank = registry.rank("tensor") if split > 1 else 0
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32

        def piece(tensor: Tensor, name: str) -> Tensor:
            return tensor.chunk(split, 1)[rank].contiguous() if name == "weight" else tensor

        model = nn.ParameterDict({name: nn.Parameter(piece(full(name, 1), name).to(dtype)) for name in FULL})
        declare(model, {"weight": P(None, "tensor") if split > 1 else P(), "bias": P()})
        inner = torch.optim.AdamW(
            model.parameters(), lr=RULE.lr, betas=(0.8, 0.95), eps=RULE.eps, weight_decay=RULE.weight_decay, fused=True
        )
        optimizer = ParallelOptimizer(inner, registry, max_norm=CLIP, precision=precision)
        norms = []
        for step in range(STEPS):
            optimizer.zero_grad()
            for name, param in model.items():
                own = gradient(name, step, registry.rank("data") if where == "data=2" else None)
                param.grad = piece(own, name).clone()  # bfloat16 parameters have float32 gradients
                if step == 1 and name == "bias":
                    param.grad[3] = torch.inf
            stats = optimizer.step()
            assert stats is not None
            norms.append(float(stats.total_norm))
        masters = [param for group in optimizer.optimizer.param_groups for param in group["params"]]
        found = {name: master.detach().clone() for name, master in zip(FULL, masters, strict=True)}
        if precision == "bf16":
            assert all(torch.equal(model[name].detach(), found[name].bfloat16()) for name in FULL)
        return found, norms, rows.stepped, rows.measured


def gradient(name: str, step: int, data_rank: int | None) -> Tensor:
    """Return the gradient of a data rank, or the mean. All values are exact in bfloat16, also means of two."""
    parts = [full(name, 100 + 10 * step + rank).mul(8).round().div(8) for rank in (0, 1)]
    return sum(parts, torch.zeros(())) / 2 if data_rank is None else parts[data_rank]


def dense(precision: str) -> tuple[dict[str, Tensor], list[float]]:
    """Train the dense model in float64. Return final parameters and norms."""
    values = {
        name: full(name, 1).to(torch.bfloat16 if precision == "bf16" else torch.float32).double() for name in FULL
    }
    states = {name: [torch.zeros(shape).double() for _ in range(2)] for name, shape in FULL.items()}
    norms, taken = [], 0
    for step in range(STEPS):
        grads = {name: gradient(name, step, None).double() for name in FULL}
        norm = float(torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt())
        norms.append(norm)
        if step == 1:
            continue
        taken += 1
        for name, value in values.items():
            RULE.step(value, grads[name] * min(1.0, CLIP / (norm + 1e-6)), states[name], taken)
    return values, norms


@pytest.mark.default_cases(1)
@needs_triton
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("where", TOPOLOGIES)
def test_triton_step_on_two_ranks_matches_dense_model(interpreted: Interpreted, where: str, precision: str) -> None:
    """The run has reduction, norm, clipping, and a skipped step with inf gradients; with bf16 also master weights."""
    ranks = interpreted.run(2, on_ranks, where, precision)
    values, norms = dense(precision)
    for _, measured, stepped, powers in ranks:
        assert (stepped, powers > 0) == (2 * STEPS, True)
        assert measured[1] == torch.inf
        del measured[1]
        assert measured == pytest.approx([norm for step, norm in enumerate(norms) if step != 1], rel=1e-6)
    weights = [found["weight"] for found, *_ in ranks]
    whole = torch.cat(weights, 1) if where == "tensor=2" else weights[0]
    torch.testing.assert_close(whole.double(), values["weight"], rtol=1e-5, atol=1e-6)
    for found, *_ in ranks:
        torch.testing.assert_close(found["bias"].double(), values["bias"], rtol=1e-5, atol=1e-6)
        assert torch.equal(found["bias"], ranks[0][0]["bias"])


def with_other_kernels(here: Kernels) -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = model_of()
        with using(here if registry.global_rank == 1 else "triton"):
            try:
                of_ranks = torch.optim.AdamW(list(model), fused=True)
                ParallelOptimizer(of_ranks, registry)
            except ValueError as error:
                return str(error)
            return "made"


@needs_triton
def test_different_kernels_on_ranks_raise_on_every_rank(interpreted: Interpreted) -> None:
    for said in interpreted.run(2, with_other_kernels, "torch"):
        assert (
            "kernels (use_kernels or MESHSTEP_KERNELS) is 'triton, interpreted' on rank 0 and 'torch' on rank 1" in said
        )
    assert interpreted.run(2, with_other_kernels, "triton") == ["made"] * 2


# Unavailable kernels --------------------------------------------------------------------------------------------------


@needs_triton
def test_triton_without_interpreter_does_not_step_cpu_tensors() -> None:
    with using("auto"):
        on_cpu = choice.kernels_here()
    with using("triton"), mock.patch.object(choice, "_loaded", return_value=mock.Mock(interpreted=False)):
        assert choice.kernels_here() == f"triton, on a CPU {on_cpu}"
        assert (choice.chosen.native is None) == (on_cpu == "torch")


def test_selecting_triton_kernels_without_package_raises() -> None:
    missing = dict.fromkeys(("triton", "meshstep.optim.kernels.triton"))
    before = choice.kernels_chosen()
    choice._loaded.cache_clear()
    with mock.patch.dict(sys.modules, missing), pytest.raises(ImportError) as error:
        use_kernels("triton")
    choice._loaded.cache_clear()
    assert "kernels='triton' needs the package triton, which can't be imported" in str(error.value)
    assert "give 'auto' or 'torch'" in str(error.value)
    assert choice.kernels_chosen() == before
