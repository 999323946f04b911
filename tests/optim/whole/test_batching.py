"""Full-tensor optimizers that step many tensors with one call, as on a GPU, here on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from cases import slice_of
from meshstep.optim import CAME, LAMB, LARS, SOAP, Adafactor, Muon, ParallelOptimizer, Shampoo, StableAdamW
from meshstep.optim.whole import batching
from meshstep.optim.whole import muon as of_muon
from meshstep.optim.whole.muon import newton_schulz
from meshstep.optim.whole.shampoo_soap import eigh, inverse_root, renewed
from meshstep.parallel import P, ProcessGroupRegistry, Topology, blocks, declare
from planted import Part
from torch import Tensor, nn
from whole_runs import STATES, WHOLE_LAYOUTS, Make, alone, copies_differ, largest_error, muon, trained
from world import World


@contextmanager
def batched(together: bool = True) -> Iterator[None]:
    """Step tensors together, or one after the other, on any device."""
    with mock.patch.object(batching, "batches_on", return_value=together):
        yield


SHAPES = {
    "up": (6, 4),
    "down": (4, 6),
    "other": (6, 4),
    "stack": (3, 4, 4),
    "embed": (7, 4),
    "bias": (5,),
    "kernel": (3, 2, 2, 4),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Muon": lambda params: Muon(params, lr=0.1, ns_dtype=None, adamw={"lr": 0.05}),
    "Muon, not nesterov, eps, match_rms_adamw": lambda params: Muon(
        params, lr=0.1, ns_dtype=None, nesterov=False, eps=1e-7, adjust_lr_fn="match_rms_adamw"
    ),
    "Muon, blocks of two scales": lambda params: Muon(params, lr=0.1, ns_dtype=None, blocks={"other": [2, 4]}),
    "Muon, a tensor as learning rate": lambda params: Muon(
        params, lr=torch.tensor(0.1, dtype=torch.float64), ns_dtype=None
    ),
    "LAMB": lambda params: LAMB(params, lr=0.1),
    "LAMB, no bias correction": lambda params: LAMB(params, lr=0.1, bias_correction=False),
    "LAMB, some adapted": lambda params: LAMB(two_groups(params, weight_decay=0.0), lr=0.1),
    "LAMB, always adapted": lambda params: LAMB(two_groups(params, weight_decay=0.0), lr=0.1, always_adapt=True),
    "LARS": lambda params: LARS(two_groups(params, weight_decay=0.0), momentum=0.9, weight_decay=0.1),
    "LARS, nesterov": lambda params: LARS(params, momentum=0.9, nesterov=True, always_adapt=True),
    "LARS without momentum": lambda params: LARS(params, weight_decay=0.1),
    "SOAP": lambda params: SOAP(params, lr=0.1, weight_decay=0.1, factor_dtype=torch.float64),
    "SOAP, new bases": lambda params: SOAP(
        two_groups(params, shampoo_beta=0.7), lr=0.1, precondition_frequency=1, factor_dtype=torch.float64
    ),
    "SOAP, some sides": lambda params: SOAP(
        two_groups(params, max_precond_dim=3),
        lr=0.1,
        precondition_frequency=2,
        max_precond_dim=4,
        factor_dtype=torch.float64,
    ),
    "SOAP, learning rate 0": lambda params: SOAP(params, lr=0.0, factor_dtype=torch.float64),
    "Shampoo": lambda params: Shampoo(params, lr=0.1, weight_decay=0.1, factor_dtype=torch.float64),
    "Shampoo, sgd": lambda params: Shampoo(params, lr=0.1, grafting="sgd", factor_dtype=torch.float64),
    "Shampoo, averages": lambda params: Shampoo(
        two_groups(params, precondition_frequency=2), lr=0.1, betas=(0.8, 0.9), epsilon=1e-6, factor_dtype=torch.float64
    ),
    "Shampoo, some sides": lambda params: Shampoo(
        two_groups(params, max_preconditioner_dim=3),
        lr=0.1,
        max_preconditioner_dim=4,
        epsilon=1e-6,
        factor_dtype=torch.float64,
    ),
    "StableAdamW": lambda params: StableAdamW(params, lr=0.1),
    "Adafactor": lambda params: Adafactor(params, lr=0.1),
    "Adafactor, eps, decay": lambda params: Adafactor(
        two_groups(params, eps=(0.5, 10.0), weight_decay=0.3), lr=0.5, beta2_decay=-0.3, d=2.0
    ),
    "Adafactor, a tensor as learning rate": lambda params: Adafactor(
        params, lr=torch.tensor(0.1, dtype=torch.float64), weight_decay=0.3
    ),
    "Adafactor, learning rate 0": lambda params: Adafactor(params, lr=0.0),
    "CAME": lambda params: CAME(params, lr=0.01),
    "CAME, eps, decay": lambda params: CAME(
        two_groups(params, eps=(0.1, 0.2), betas=(0.5, 0.6, 0.7)), lr=0.01, clip_threshold=0.5, weight_decay=0.3
    ),
    "CAME, a tensor as learning rate": lambda params: CAME(params, lr=torch.tensor(0.01, dtype=torch.float64)),
}


def two_groups(params: Any, **options: Any) -> list[dict[str, Any]]:
    named = list(params)
    return [{"params": named[:3]}, {"params": named[3:], **options}]


def model_of(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()}


def stepped(
    make: Callable[[Any], torch.optim.Optimizer],
    together: bool,
    dtype: torch.dtype = torch.float64,
    scale: float | None = None,
    without: str = "",
    skipped: tuple[int, ...] = (),
    stop: int = 4,
) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """Return parameters and optimizer after some steps, with all tensors stepped together or one after the other.

    Args:
        scale: The gradients are multiplied by it, and the optimizer must divide them. None: 1.
        without: Name of a parameter without gradients.
        skipped: Indices of steps with non-finite gradients and ``found_inf``.
        stop: Number of steps.
    """
    params = model_of(dtype)
    inner: Any = make(params.items())
    with batched(together):
        for step in range(stop):
            generator = torch.Generator().manual_seed(step)
            inner.found_inf = torch.tensor(float(step in skipped))
            inner.grad_scale = None if scale is None else torch.tensor(scale)
            for name, param in params.items():
                gradient = torch.randn(param.shape, generator=generator).to(dtype) * (scale or 1.0)
                param.grad = None if name == without else gradient * (torch.nan if step in skipped else 1.0)
            inner.step()
    return params, inner


def far(some: dict[str, nn.Parameter], others: dict[str, nn.Parameter]) -> float:
    return max(float((some[name].detach() - others[name].detach()).abs().max()) for name in some)


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_batched_step_matches_steps_of_single_tensors(name: str) -> None:
    for without in ("", "other", "embed"):
        (one, single), (many, together) = (stepped(OPTIMIZERS[name], kind, without=without) for kind in (False, True))
        assert far(one, many) <= 1e-12
        for param, same in zip(one.values(), many.values(), strict=True):
            assert single.state[param].keys() == together.state[same].keys()
            for key, value in single.state[param].items():
                torch.testing.assert_close(together.state[same][key], value, rtol=1e-12, atol=1e-14)


CHUNKED = [
    "Adafactor",
    "Adafactor, eps, decay",
    "CAME",
    "CAME, eps, decay",
    "LAMB",
    "LAMB, some adapted",
    "LARS",
    "SOAP",
]


@pytest.mark.parametrize("name", [*CHUNKED, "Shampoo", "StableAdamW"])
@pytest.mark.parametrize("numel", [1, 50])
def test_batched_step_in_chunks_matches_steps_of_single_tensors(name: str, numel: int) -> None:
    one, _ = stepped(OPTIMIZERS[name], False)
    with mock.patch.object(batching, "CHUNK", numel):
        many, _ = stepped(OPTIMIZERS[name], True)
    assert far(one, many) <= 1e-12


def test_packed_tensors_stack_equal_sizes_and_multiply_each_tensor_by_its_factor() -> None:
    shapes = [(2, 3), (4,), (3, 2), (), (0, 5)]
    packed = batching.PackedTensors(shapes, torch.float64, torch.device("cpu"))
    sources = [torch.full(shape, float(index + 1)) for index, shape in enumerate(shapes)]
    assert packed.fill(sources) is packed
    assert len(packed.stacks[6]) == 2
    packed.multiply(torch.arange(1.0, 6.0))
    for index, (tensor, source) in enumerate(zip(packed.tensors, sources, strict=True)):
        assert torch.equal(tensor, source.double() * (index + 1))
    assert packed.flat.numel() == 64 * 4


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_batched_step_divides_gradients_by_grad_scale(name: str) -> None:
    one, _ = stepped(OPTIMIZERS[name], False, torch.float32)
    many, _ = stepped(OPTIMIZERS[name], True, torch.float32, scale=1024.0)
    assert far(one, many) <= 1e-4
    unscaled, _ = stepped(OPTIMIZERS[name], False, torch.float32, scale=0.25)
    assert far(unscaled, many) <= 1e-4


@pytest.mark.default_cases(30)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("scale", "dtype"), [(None, torch.float32), (8.0, torch.float32), (None, torch.float64)])
def test_skipped_batched_step_changes_no_values(name: str, scale: float | None, dtype: torch.dtype) -> None:
    before, single = stepped(OPTIMIZERS[name], True, dtype, scale, stop=3)
    after, together = stepped(OPTIMIZERS[name], True, dtype, scale, skipped=(3,), stop=4)
    for param, same in zip(before.values(), after.values(), strict=True):
        assert torch.equal(param, same)
        for key, value in single.state[param].items():
            assert torch.equal(together.state[same][key], value), key
    first, fresh = stepped(OPTIMIZERS[name], True, dtype, scale, skipped=(0,), stop=1)
    assert far(first, model_of(dtype)) == 0
    assert all(not value.any() for state in fresh.state.values() for value in state.values())


@pytest.mark.parametrize("order", [2, 4])
def test_batched_matrix_factorizations_match_factorization_of_each_matrix(order: int) -> None:
    rows = torch.randn(4, 6, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    stack, bases = rows @ rows.mT, torch.linalg.qr(rows[..., :6])[0]
    roots = inverse_root(stack, order, 1e-3)
    turned, orders = renewed(stack, bases)
    for index, matrix in enumerate(stack):
        expected, columns = renewed(matrix, bases[index])
        assert torch.equal(orders[index], columns)
        torch.testing.assert_close(roots[index], inverse_root(matrix, order, 1e-3), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(turned[index], expected, rtol=1e-12, atol=1e-12)
    stack[2, 0, 0] = torch.nan
    values, _ = eigh(stack)
    assert torch.equal(values[2], torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(values[3], eigh(stack[3])[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [SOAP, partial(Shampoo, epsilon=1e-3)], ids=["SOAP", "Shampoo"])
def test_batched_soap_and_shampoo_with_different_options_match_steps_of_single_tensors(make: Any) -> None:
    def of_groups(params: Any) -> torch.optim.Optimizer:
        named = dict(params)
        rest = {"params": [(name, param) for name, param in named.items() if name != "other"], "lr": 0.1}
        other = {"params": [("other", named["other"])], "betas": (0.5, 0.6), "precondition_frequency": 2}
        return make([rest, other], lr=0.1, factor_dtype=torch.float64)  # type: ignore[no-any-return]

    assert far(stepped(of_groups, False)[0], stepped(of_groups, True)[0]) <= 1e-12


def test_batched_muon_with_different_options_matches_steps_of_single_tensors() -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        named = dict(params)
        groups = [
            {"params": [(name, named[name])], "ns_steps": steps, "algorithm": "muon"}
            for name, steps in (("up", 5), ("other", 2), ("down", 5))
        ]
        rest = [(name, named[name]) for name in ("stack", "embed", "bias")]
        return Muon([*groups, {"params": rest}], lr=0.1, ns_dtype=None)

    assert far(stepped(make, False)[0], stepped(make, True)[0]) <= 1e-12


def test_batched_step_of_transposed_parameter_matches_step_of_single_tensor() -> None:
    def run(together: bool) -> Tensor:
        weight = nn.Parameter(torch.arange(24, dtype=torch.float64).view(4, 6).t())
        inner = Muon([("weight", weight)], lr=0.1, ns_dtype=None)
        with batched(together):
            for step in range(3):
                weight.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).double()
                inner.step()
        return weight.detach()

    torch.testing.assert_close(run(True), run(False), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (128, 256), (256, 128)])
def test_batched_newton_schulz_matches_newton_schulz_of_each_matrix(shape: tuple[int, int]) -> None:
    stack = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    stack[1] = 0
    for eps in (0.0, 1e-7):
        expected = torch.stack([newton_schulz(matrix, eps=eps) for matrix in stack])
        torch.testing.assert_close(newton_schulz(stack, eps=eps), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("together", [False, True])
def test_soap_step_counts_are_updated_before_finish_step_copies_them(together: bool) -> None:
    """SOAP copies the counts to the host in `finish_step`. A later write would make the copies invalid, so the next step
    would wait."""
    counts: list[list[float]] = []

    class Recorded(SOAP):
        def finish_step(self, slots: Any) -> None:
            counts.append([float(slot.state["step"]) for slot in slots])
            super().finish_step(slots)

    stepped(lambda params: Recorded(params, factor_dtype=torch.float64), together, stop=2)
    assert counts == [[1.0] * len(SHAPES), [2.0] * len(SHAPES)]


def lamb(params: Any) -> LAMB:
    return LAMB(params, lr=0.05)


def lars(params: Any) -> LARS:
    return LARS(params, momentum=0.9, weight_decay=0.1, nesterov=True)


def stable_adamw(params: Any) -> StableAdamW:
    return StableAdamW(params, lr=0.05)


def adafactor(params: Any) -> Adafactor:
    return Adafactor(params, lr=0.05, weight_decay=0.1)


def came(params: Any) -> CAME:
    return CAME(params, lr=0.05, weight_decay=0.1)


def soap(params: Any) -> SOAP:
    return SOAP(params, lr=0.05, precondition_frequency=2, factor_dtype=torch.float64)


def shampoo(params: Any) -> Shampoo:
    return Shampoo(params, lr=0.05, epsilon=1e-6, factor_dtype=torch.float64)


def trained_together(name: str, make: Make, state: str) -> list[Part]:
    with batched():
        return trained(WHOLE_LAYOUTS[name], make, STATES[state])


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "make", "state"),
    [
        ("data x tensor", muon, "ZeRO-2"),
        ("fused blocks", muon, "whole"),
        ("experts", muon, "ZeRO-1"),
        ("uneven", muon, "offload"),
        ("data x tensor", lamb, "whole"),
        ("data x tensor", lamb, "ZeRO-2"),
        ("sequence", lars, "whole"),
        ("data=3", lars, "ZeRO-1"),
        ("data x tensor", stable_adamw, "ZeRO-2"),
        ("grid", adafactor, "whole"),
        ("data x tensor", adafactor, "ZeRO-2"),
        ("experts", adafactor, "ZeRO-1"),
        ("fused blocks", adafactor, "whole"),
        ("uneven", came, "offload"),
        ("2.5-D", came, "whole"),
        ("data x tensor", came, "ZeRO-2"),
        ("3-D", came, "whole"),
        ("experts", soap, "whole"),
        ("data x tensor", shampoo, "ZeRO-1"),
    ],
)
def test_batched_step_on_ranks_matches_dense_update(world: World, name: str, make: Make, state: str) -> None:
    layout = WHOLE_LAYOUTS[name]
    by_rank = world.run(layout.topology.world_size, trained_together, name, make, state)
    assert largest_error(by_rank, alone(layout, make)) <= 1e-12
    assert copies_differ(by_rank) == []


EQUAL = {
    "rows": P("tensor"),
    "more_rows": P("tensor"),
    "blocks_of_rows": P(blocks("tensor", 2)),
    "columns": P(None, "tensor"),
    "whole": P(),
    "other": P(),
}


def full_of(name: str, step: int) -> Tensor:
    """Return the gradient of a full tensor in a step; the initial value for step -1."""
    generator = torch.Generator().manual_seed(100 * list(EQUAL).index(name) + step + 1)
    return torch.randn(8, 6, generator=generator, dtype=torch.float64)


def steps_of_equal_shapes(make: Make, state: str, together: bool = True) -> dict[str, Tensor]:
    """Return the shards of full tensors of one shape after some steps, with keys of name and region."""
    topology = Topology(data=2, tensor=2)
    with ProcessGroupRegistry(topology) as registry, batched(together), mock.patch.object(batching, "CHUNK", 100):

        def shard(name: str, step: int) -> Tensor:
            return slice_of(full_of(name, step), EQUAL[name], topology, registry.global_rank).clone()

        model = nn.ParameterDict({name: nn.Parameter(shard(name, -1)) for name in EQUAL})
        declare(model, EQUAL)
        optimizer = ParallelOptimizer(make(model.named_parameters()), registry, **STATES[state])
        for step in range(3):
            with optimizer.window():
                for name, param in model.items():
                    param.grad = shard(name, step)
            optimizer.step()
        return {f"{one.name} {one.region}": one.tensor.detach().clone() for one in optimizer.stepped_tensors()}


@pytest.mark.default_cases(4)
@pytest.mark.parametrize("make", [adafactor, came, lamb, lars, stable_adamw, muon, soap, shampoo])
@pytest.mark.parametrize("state", ["whole", "ZeRO-1"])
def test_batched_step_of_equal_shapes_in_different_layouts_matches_steps_of_single_tensors(
    world: World, make: Make, state: str
) -> None:
    found = world.run(4, steps_of_equal_shapes, make, state)
    expected = world.run(4, steps_of_equal_shapes, make, state, False)
    replicas: dict[str, Tensor] = {}
    for own, same in zip(found, expected, strict=True):
        assert own.keys() == same.keys()
        for key, value in own.items():
            torch.testing.assert_close(value, same[key], rtol=1e-12, atol=1e-12)
            assert torch.equal(replicas.setdefault(key, value), value), key


def test_batched_parallel_optimizer_step_with_clipping_matches_steps_of_single_tensors() -> None:
    def run(together: bool) -> list[Tensor]:
        with batched(together):
            model = nn.ParameterDict(model_of(torch.float32))
            declare(model, {"*": P()})
            optimizer = ParallelOptimizer(
                OPTIMIZERS["Muon"](model.named_parameters()), ProcessGroupRegistry(Topology()), max_norm=0.1
            )
            for step in range(3):
                generator = torch.Generator().manual_seed(step)
                optimizer.zero_grad()
                terms = [(param * torch.randn(param.shape, generator=generator)).sum() for param in model.values()]
                optimizer.backward(torch.stack(terms).sum())
                optimizer.step()
            return [param.detach() for param in model.values()]

    for one, many in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(many, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("sum_order", "dims"), [("any", 3), ("fixed", 2)])
def test_muon_orthogonalizes_matrices_in_batches_except_with_fixed_sum_order(sum_order: Any, dims: int) -> None:
    found = set[int]()

    def recorded(matrix: Tensor, *options: Any) -> Tensor:
        found.add(matrix.dim())
        return newton_schulz(matrix, *options)

    with batched(), mock.patch.object(of_muon, "newton_schulz", recorded):
        model = nn.ParameterDict(model_of(torch.float32))
        declare(model, {"*": P()})
        optimizer = ParallelOptimizer(
            OPTIMIZERS["Muon"](model.named_parameters()),
            ProcessGroupRegistry(Topology()),
            sum_order=sum_order,
            accumulation_steps=1,
        )
        optimizer.backward(torch.stack([param.square().sum() for param in model.values()]).sum())
        optimizer.step()
    assert found == {dims}
