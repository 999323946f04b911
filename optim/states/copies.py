"""Copies of a whole optimizer: for `copy.deepcopy`, and for pickle.

What stands in for parameters shares their memory, hangs on their hooks and talks over groups, so it isn't copied. It is
made anew over copies of the parameters, by the same arguments, and then loads the state.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...parallel.layout.annotation import Annotation, annotation_of, attach
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..step.several import SAID_OF_IT
from .pieces import params_of

T = TypeVar("T", bound=torch.optim.Optimizer)


@dataclass(frozen=True)
class Recipe:
    """What an optimizer is made of; copied and pickled as it is.

    Args:
        plain: The wrapped optimizer without state, over the model's parameters.
        annotations: Of these, which copies of parameters lose.
        options: The other arguments.
        state: Its state dict.
    """

    plain: torch.optim.Optimizer
    said: Mapping[str, Any]
    annotations: Sequence[Annotation | None]
    registry: ProcessGroupRegistry
    options: Mapping[str, Any]
    state: dict[str, Any]

    @classmethod
    def of(
        cls,
        wrapped: torch.optim.Optimizer,
        groups: Sequence[Sequence[tuple[str | None, Tensor]]],
        registry: ProcessGroupRegistry,
        options: Mapping[str, Any],
        state: dict[str, Any],
    ) -> Recipe:
        """From an optimizer's parts.

        Args:
            groups: The (name, parameter) pairs of each param group, as they were before anything stood in for them.
        """
        plain = copy.copy(wrapped)
        plain.state, plain.param_groups = defaultdict(dict), []
        for group, named in zip(wrapped.param_groups, groups, strict=True):
            names = {"param_names": [name for name, _ in named]} if "param_names" in group else {}
            plain.param_groups.append({**group, "params": [param for _, param in named], **names})
        said = {name: getattr(wrapped, name) for name in SAID_OF_IT if hasattr(wrapped, name)}
        annotations = [annotation_of(param) for param in params_of(plain.param_groups)]
        return cls(plain, said, annotations, registry, options, state)


def rebuilt(make: Callable[..., T], recipe: Recipe) -> T:
    """The optimizer of a recipe. Raises, collectives: as constructing it, and as loading its state."""
    for param, annotation in zip(params_of(recipe.plain.param_groups), recipe.annotations, strict=True):
        if annotation is not None:
            attach(param, annotation)
    for name, value in recipe.said.items():
        setattr(recipe.plain, name, value)
    optimizer = make(recipe.plain, recipe.registry, **recipe.options)
    optimizer.load_state_dict(recipe.state)
    return optimizer
