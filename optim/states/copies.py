"""Copies of a whole optimizer: for `copy.deepcopy`, and for pickle.

What stands in for parameters shares their memory, hangs on their hooks and talks over groups, so it isn't copied. It is
made anew over copies of the parameters, by the same arguments, and then loads the state.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ...parallel.layout.annotation import Annotation, annotation_of, attach
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..step.call_guard import guard_calls, remove_guard
from ..step.several import SAID_OF_IT
from .pieces import params_of

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


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
        remove_guard(plain)
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
    optimizer: Any = make(recipe.plain, recipe.registry, **recipe.options)
    optimizer.load_state_dict(recipe.state)
    return optimizer  # type: ignore[no-any-return]


class Copied:
    """An optimizer that can be copied, and pickled."""

    optimizer: torch.optim.Optimizer
    registry: ProcessGroupRegistry
    on_nonfinite: Any
    _groups: list[list[tuple[str | None, Tensor]]]
    _setup: Any

    def state_dict(self) -> dict[str, Any]:
        """All that a new process needs to go on."""
        raise NotImplementedError

    def _recipe(self) -> Recipe:
        options = self._setup.options | {"on_nonfinite": self.on_nonfinite}
        return Recipe.of(self.optimizer, self._groups, self.registry, options, self.state_dict())

    def __copy__(self) -> Self:
        """As torch's: the same parameters, param groups, state and window, and no hooks."""
        new = object.__new__(type(self))
        new.__dict__.update({key: value for key, value in self.__dict__.items() if key != "step"})
        hooks: dict[str, Any] = {
            "_optimizer_step_pre_hooks": OrderedDict(),
            "_optimizer_step_post_hooks": OrderedDict(),
        }
        new.__dict__.update(hooks)
        guard_calls(new.optimizer, new)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """As torch's: of copies of the parameters, without hooks and gradients. Raises, collectives: as the constructor."""
        commit = self._setup.measure.commit
        memo[id(commit)] = commit  # its owner is no part of the optimizer
        return rebuilt(type(self), copy.deepcopy(self._recipe(), memo))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle: as a deep copy. Read in a process of another world, it needs a world of that size."""
        return rebuilt, (type(self), self._recipe())
