"""Each precision mode compared with the table of dtypes; preserved properties of the model; errors."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import pytest
import torch
from meshstep.amp import (
    ApexFp16,
    Bf16,
    ConstantLossScale,
    DynamicLossScale,
    Fp32,
    MasterWeights,
    NaiveFp16,
    Precision,
    TorchFp16,
    precision_of,
)
from meshstep.amp.casting import cast_floating
from meshstep.parallel import P, annotate, spec_of
from precision_table import BF16, F16, F32, F64, TABLE, Net, batch, expected_dtypes, floating
from torch import Tensor, nn
from torch.nn import functional as F

MODES = pytest.mark.parametrize("mode", TABLE)


@MODES
def test_prepared_model_has_the_documented_dtypes(mode: str) -> None:
    precision, row = TABLE[mode]
    torch.manual_seed(1)
    model = Net()
    assert precision.prepare(model) is model
    assert floating(model.state_dict()) == expected_dtypes(row, model)
    assert model.state_dict()["bn.num_batches_tracked"].dtype == torch.int64

    x, tokens = batch()
    out = model(x, tokens=tokens)
    assert model.seen == [row.inside]
    assert out["logits"].dtype == row.outputs
    assert out["tokens"] is not None
    assert out["tokens"].dtype == torch.int64

    loss = precision.prepare_criterion(F.cross_entropy)(out["logits"], tokens)
    assert loss.dtype == F32
    loss.backward()
    for param in model.parameters():
        assert param.grad is not None
        assert param.grad.dtype == param.dtype

    exported = precision.export_state_dict(model)
    assert exported.keys() == model.state_dict().keys()
    if row.exported == F32:
        assert set(floating(exported).values()) == {F32}
    else:
        assert floating(exported) == expected_dtypes(row, model)


@MODES
def test_masters_and_main_grads_are_float32(mode: str) -> None:
    precision, row = TABLE[mode]
    model = precision.prepare(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert precision.masters == row.masters
    if not precision.masters:
        return
    masters = MasterWeights(optimizer)
    x, tokens = batch()
    model(x, tokens)["logits"].float().square().sum().backward()
    masters.collect()
    for param in optimizer.param_groups[0]["params"]:
        assert (param.dtype, param.grad.dtype) == (F32, F32)
    kept = [param for param in model.parameters() if param.dtype == F32]
    assert len(masters.pairs) == len(list(model.parameters())) - len(kept)
    assert bool(kept) == (row.batch_norm == F32)


@MODES
def test_precision_mode_has_the_documented_initial_loss_scale(mode: str) -> None:
    precision, row = TABLE[mode]
    scale = precision.make_loss_scale("cpu")
    assert (None if scale is None else float(scale.scale)) == row.scale


def good_steps(scale: DynamicLossScale, count: int) -> float:
    for _ in range(count):
        scale.update(torch.zeros(()))
    return float(scale.scale)


@pytest.mark.parametrize(
    ("precision", "interval", "hysteresis"),
    [(TorchFp16(), 2000, 1), (NaiveFp16(), 1000, 2), (ApexFp16("O1"), 2000, 1), (ApexFp16("O2"), 2000, 1)],
)
def test_precision_mode_sets_growth_interval_and_hysteresis_of_loss_scale(
    precision: Precision, interval: int, hysteresis: int
) -> None:
    scale = precision.make_loss_scale("cpu")
    assert isinstance(scale, DynamicLossScale)
    assert good_steps(scale, interval - 1) == 2.0**16
    assert good_steps(scale, 1) == 2.0**17
    for _ in range(hysteresis - 1):
        scale.update(torch.ones(()))
        assert float(scale.scale) == 2.0**17
    scale.update(torch.ones(()))
    assert float(scale.scale) == 2.0**16


def test_loss_scale_of_apex_mode_is_capped_but_of_torch_mode_is_not() -> None:
    for precision, cap in ((ApexFp16(), 2.0**24), (TorchFp16(), 2.0**25)):
        scale = precision.make_loss_scale("cpu")
        assert isinstance(scale, DynamicLossScale)
        scale.scale.fill_(2.0**24)
        assert good_steps(scale, 2000) == cap
    constant = ApexFp16("O2", loss_scale=64.0).make_loss_scale()
    assert isinstance(constant, ConstantLossScale)
    assert isinstance(ApexFp16("O0", loss_scale="dynamic").make_loss_scale(), DynamicLossScale)


@MODES
@pytest.mark.parametrize("built", [F16, BF16])
def test_prepare_gives_half_precision_model_the_dtypes_of_the_mode(mode: str, built: torch.dtype) -> None:
    precision, row = TABLE[mode]
    model = Net().to(built)
    original = {name: param.detach().clone() for name, param in model.named_parameters()}
    precision.prepare(model)
    assert floating(model.state_dict()) == expected_dtypes(row, model)
    x, tokens = batch(built)
    assert model(x, tokens)["logits"].dtype == row.outputs
    if precision.masters:
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
        MasterWeights(optimizer)
        for name, param in zip(
            optimizer.param_groups[0]["param_names"], optimizer.param_groups[0]["params"], strict=True
        ):
            in_mode = original[name].to(row.batch_norm if name.startswith("bn.") else row.params)
            assert torch.equal(param, in_mode.float()), "a master must equal the half-precision weight"


@MODES
def test_prepare_keeps_parameter_objects_specs_and_gradients(mode: str) -> None:
    model = Net()
    annotate(model.head.weight, P("tensor", None), "head")
    params, keys = dict(model.named_parameters()), list(model.state_dict())
    grads = {name: torch.full_like(param, 2.0) for name, param in params.items()}
    for name, param in params.items():
        param.grad = grads[name]
    TABLE[mode][0].prepare(model)
    assert type(model) is Net
    assert all(param is params[name] for name, param in model.named_parameters())
    assert model.head.weight is model.embed.weight
    assert spec_of(model.head.weight) == P("tensor", None)
    assert list(model.state_dict()) == keys
    assert all(p.grad is not None and p.grad.dtype == p.dtype and bool((p.grad == 2).all()) for p in params.values())


@MODES
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copy_of_prepared_model_uses_its_own_weights(mode: str, clone: Callable[[Net], Net]) -> None:
    precision, row = TABLE[mode]
    model = Net()
    precision.prepare(model)
    other = clone(model)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    x, tokens = batch()
    assert other(x, tokens)["logits"].dtype == row.outputs
    assert not other(x, tokens)["logits"].any()
    assert model(x, tokens)["logits"].any()


def test_output_hook_of_a_model_pickled_by_version_0_3_0_loads() -> None:
    made = b"ccopy_reg\n_reconstructor\n(cmeshstep.amp.casting\nCastOutputs\nc__builtin__\nobject\nNtR"
    hook = pickle.loads(made + b"(dVdtype\nctorch\nfloat32\nsb.")
    assert hook(nn.Identity(), (), torch.ones(2, dtype=torch.float16)).dtype is torch.float32
    model = pickle.loads(pickle.dumps(NaiveFp16().prepare(nn.Linear(2, 2))))
    assert [*model._forward_hooks.values()] == [hook]


@MODES
def test_preparing_a_model_twice_raises(mode: str) -> None:
    model = TABLE[mode][0].prepare(Net())
    before = floating(model.state_dict())
    write = "use the model as it is" if TABLE[mode][0].name == "bf16" else "build a new model for 'bf16'"
    with pytest.raises(ValueError, match=rf"Net has already been prepared for '\w+', .*only once; {write}"):
        Bf16().prepare(model)
    with pytest.raises(ValueError, match=r"^1 has already been prepared"):
        NaiveFp16().prepare(nn.Sequential(nn.Linear(2, 2), model))
    assert floating(model.state_dict()) == before


def test_prepare_casts_frozen_parameters_and_fp32_mode_keeps_float64() -> None:
    model = Net().double()
    Fp32().prepare(model)
    assert set(floating(model.state_dict()).values()) == {F64}, "fp32 must cast half types and leave float64 unchanged"
    assert model(*batch(F64))["logits"].dtype == F64
    frozen = nn.Linear(3, 3).requires_grad_(False)
    Bf16().prepare(frozen)
    assert (frozen.weight.dtype, frozen.weight.requires_grad) == (BF16, False)
    ApexFp16("O0").prepare(other := Net().double())
    assert other(*batch(F64))["logits"].dtype == F32


class Pair(NamedTuple):
    first: Tensor
    second: Any


@dataclass
class Other:
    tensor: Tensor


def test_cast_floating_casts_only_float_tensors_in_nested_values() -> None:
    real, whole, boolean = torch.ones(2), torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.bool)
    other = Other(real)
    value = {
        "pair": Pair(real, [real.double(), whole]),
        "ordered": OrderedDict(b=(boolean, "text", None, 3), a=real.to(torch.complex64)),
        "other": other,
    }
    result = cast_floating(value, BF16)
    assert isinstance(result["pair"], Pair)
    assert [result["pair"].first.dtype, *(t.dtype for t in result["pair"].second)] == [BF16, BF16, torch.int32]
    assert isinstance(result["ordered"], OrderedDict)
    assert result["ordered"]["b"] == (boolean, "text", None, 3)
    assert result["ordered"]["a"].dtype == torch.complex64
    assert result["other"] is other
    assert value["pair"].first is real, "a container of the caller was modified"  # type: ignore[attr-defined]


def test_autocast_ends_if_forward_raises() -> None:
    class Interrupted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert torch.is_autocast_enabled("cpu")
            raise KeyboardInterrupt

    model = TorchFp16().prepare(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1))
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("as_module", [True, False])
def test_prepared_criterion_has_autocast_and_dtypes_of_the_mode(as_module: bool) -> None:
    seen: list[tuple[bool, torch.dtype]] = []

    def function(x: Tensor, *, weight: Tensor) -> Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), weight.dtype))
        return (x * weight).sum()

    class Module(nn.Module):
        def forward(self, x: Tensor, *, weight: Tensor) -> Tensor:
            return function(x, weight=weight)

    for precision, expected in (
        (TorchFp16(), (True, BF16)),
        (ApexFp16("O1"), (True, BF16)),
        (Bf16(), (False, F32)),
        (NaiveFp16(), (False, BF16)),
        (ApexFp16("O2"), (False, BF16)),
        (Fp32(), (False, BF16)),
    ):
        criterion = Module() if as_module else function
        prepared = precision.prepare_criterion(criterion)
        assert not as_module or prepared is criterion
        prepared(torch.ones(2), weight=torch.ones(2, dtype=BF16))
        assert seen.pop() == expected, precision


@pytest.mark.parametrize("mode", ["bf16", "naive", "naive bn", "O2", "O3", "O3 bn"])
@pytest.mark.parametrize(("norm", "dims"), [(nn.BatchNorm1d, 1), (nn.BatchNorm2d, 2), (nn.BatchNorm3d, 3)])
def test_half_precision_batch_norm_on_cpu_matches_float64(
    mode: str, norm: Callable[[int], nn.Module], dims: int
) -> None:
    precision, row = TABLE[mode]
    torch.manual_seed(2)
    model, x = norm(3), torch.randn(8, 3, *([4] * dims))
    dense = copy.deepcopy(model).double()
    precision.prepare(model)
    loss, dense_loss = model(x).float().pow(3).mean(), dense(x.double()).pow(3).mean()
    loss.backward()
    dense_loss.backward()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.double(), dense.state_dict()[name].double(), rtol=0.02, atol=0.02)
    for param, expected in zip(model.parameters(), dense.parameters(), strict=True):
        assert param.grad is not None
        torch.testing.assert_close(param.grad.double(), expected.grad, rtol=0.05, atol=0.02)
    model.eval()
    assert model(x).dtype == row.outputs


def test_exported_state_dict_loads_into_float32_and_prepared_models() -> None:
    precision, model = ApexFp16("O2"), Net()
    precision.prepare(model)
    exported = precision.export_state_dict(model)
    assert exported["head.weight"] is exported["embed.weight"]
    assert not any(value.requires_grad for value in exported.values())
    fresh = Net()
    fresh.load_state_dict(exported)
    assert torch.equal(fresh.conv.weight, model.conv.weight.float())
    saved = model.conv.weight.detach().clone()
    model.load_state_dict(exported)
    assert torch.equal(model.conv.weight, saved), "float16 must survive the conversion to float32 and back"


def test_optimizer_made_before_prepare_updates_the_prepared_model() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    Bf16().prepare(model)
    masters = MasterWeights(optimizer)
    masters.zero_grad()
    before = model.weight.detach().clone()
    model(torch.ones(2, 4)).sum().backward()
    masters.collect()
    masters.step(optimizer.step)
    assert not torch.equal(model.weight, before)
    assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {F32}


def test_prepare_rejects_ddp_model_if_the_mode_casts_it(world: Any) -> None:
    world.run(2, prepare_in_ddp)


def prepare_in_ddp() -> None:
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"call prepare\(\) of the mode, or boost\(\), before you wrap the model"):
        Bf16().prepare(wrapped)
    assert wrapped.module.weight.dtype == F32
    TorchFp16().prepare(wrapped)
    assert wrapped(torch.ones(2, 3)).dtype == F16


class Nameless(Precision):
    def _prepare(self, model: nn.Module, registry: Any) -> None:
        pass


def test_precision_of_accepts_names_and_modes() -> None:
    for name, mode in (("fp32", Fp32), ("fp16", TorchFp16), ("bf16", Bf16), ("fp16_naive", NaiveFp16)):
        assert precision_of(name) == mode()
    assert precision_of("fp16_apex") == ApexFp16(opt_level="O2")
    assert precision_of("fp8").name == "fp8"
    policy = Bf16(stochastic_rounding=True)
    assert precision_of(policy) is policy
    with pytest.raises(
        TypeError, match="the precision mode class Nameless has no attribute 'name'; write in the class: name = '"
    ):
        precision_of(Nameless())
    with pytest.raises(
        ValueError, match="precision='half' is not a precision mode; choose from 'fp32', 'fp16', 'bf16'"
    ):
        precision_of("half")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TorchFp16(growth_factor=1.0), "growth_factor=1.0"),
        (lambda: NaiveFp16(hysteresis=0), "hysteresis=0"),
        (lambda: ApexFp16("O4"), "opt_level='O4' is not an opt level; choose from O0, O1, O2, O3"),  # type: ignore[arg-type]
        (lambda: ApexFp16("O1", keep_batchnorm_fp32=True), "has no effect in O1"),
        (lambda: ApexFp16("O0", keep_batchnorm_fp32=False), "has no effect in O0"),
        (lambda: ApexFp16("O2", loss_scale=cast(Any, "static")), "loss_scale='static'"),
        (lambda: ApexFp16("O2", loss_scale=-1.0), "value=-1.0"),
    ],
)
def test_precision_modes_reject_bad_arguments_on_construction(make: Callable[[], Precision], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
