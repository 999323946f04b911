"""Third-party optimizers that `whole` wraps, and meshstep's SOAP, compared with one process and pytorch_optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("pytorch_optimizer", reason="needs pytorch_optimizer, of the extra `interop`")
pytest.importorskip("timm", reason="needs timm, of the extra `interop`")

from meshstep.optim import SOAP
from meshstep.optim.whole import whole
from torch import nn
from whole_optimizers import MAKE, NOT_REACHED, RIGHT_ON_PIECES, apart, of
from whole_runs import step_both
from world import World


def test_soap_matches_pytorch_optimizer_implementation() -> None:
    theirs_of: Callable[..., Any] = __import__("pytorch_optimizer").SOAP
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in ((6, 10), (12, 4), (7,), (3, 4, 2, 2))]
    theirs = [nn.Parameter(param.detach().clone()) for param in ours]
    one, other = SOAP(ours, precondition_frequency=3), theirs_of(theirs, precondition_frequency=3)
    for _ in range(10):
        step_both(one, ours, other, theirs)
    for param, same in zip(ours, theirs, strict=True):
        torch.testing.assert_close(param, same, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", list(MAKE))
def test_third_party_optimizer_wrapped_in_whole_matches_single_process(world: World, kind: str) -> None:
    assert apart(world, kind, "wrapped") <= 1e-6


@pytest.mark.parametrize("kind", [kind for kind in MAKE if kind not in (*RIGHT_ON_PIECES, *NOT_REACHED)])
def test_unwrapped_full_tensor_optimizer_on_shards_differs_from_one_process(world: World, kind: str) -> None:
    assert apart(world, kind, "on pieces") > 1e-5


@pytest.mark.parametrize(
    ("package", "name", "says"),
    [
        ("timm.optim", "Lamb", "max_grad_norm=1.0 clips by the norm of all"),
        ("pytorch_optimizer", "Prodigy", "from all parameters together"),
        ("pytorch_optimizer", "DAdaptAdam", "from all parameters together"),
        ("pytorch_optimizer", "SPlus", r"has the methods train\(\) and eval\(\)"),
    ],
)
def test_whole_wrapper_rejects_optimizers_that_combine_tensors_or_switch_weights(
    package: str, name: str, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        whole(of(package, name)([nn.Parameter(torch.randn(4, 4))]))
