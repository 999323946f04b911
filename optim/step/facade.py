"""What other code expects of a torch optimizer, passed on to a wrapped one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch


class OptimizerFacade(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` whose param groups, state and defaults are those of ``self.optimizer``.

    Schedulers, ``isinstance`` checks and step hooks work on it; hooks run around the whole `step`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Not super().__init__: the wrapped optimizer has the parameters and the state.
        self.optimizer = optimizer
        self._optimizer_step_pre_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._optimizer_state_dict_pre_hooks = optimizer._optimizer_state_dict_pre_hooks
        self._optimizer_state_dict_post_hooks = optimizer._optimizer_state_dict_post_hooks
        self._optimizer_load_state_dict_pre_hooks = optimizer._optimizer_load_state_dict_pre_hooks
        self._optimizer_load_state_dict_post_hooks = optimizer._optimizer_load_state_dict_post_hooks
        self._patch_step_function()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's param groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults
