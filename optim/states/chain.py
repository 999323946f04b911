"""The chain of what stands in for parameters: it alone knows the order, the nesting, and which piece is what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...amp.master_weights import label_of
from ...parallel.layout.pieces import Region
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..kernels.memory import PLAIN, resolve_
from ..norm.entries import ParameterEntry
from ..norm.plan import ReductionPlan
from ..step.call_guard import own_calls
from .link import AnyWindow, Link
from .pieces import Held, Piece, held_in, params_of, replaced
from .watcher import Watcher


class Chain:
    """Links, installed over an optimizer's param groups, which are changed in place.

    Args:
        optimizer: It may have stepped already.
        links: From the model's side on.
        registry: The groups.

    Attributes:
        held: What stands at each position of the param groups.
        given: The model's parameters, some of which this rank may have no piece of: name, parameter, whether it was
            trained.
        kinds: The dtype and device that each of them had when it was given.
        frozen: Those of them that were frozen between their group's and a later group's addition.
        bringing: The links that have gradients to `bring`, from the model's side on.
        catching_up: Those that `catch_up`.
        watchers: Who looks on; `watch` says who.
        around_update: What is around an update: the links' `step`, of the one next to the optimizer first, and watchers.
    Collectives: those of the links.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, links: Sequence[Link], registry: ProcessGroupRegistry) -> None:
        self.optimizer, self.links, self.registry = optimizer, list(links), registry
        self.watchers: list[Watcher] = []
        self.held: list[Held] = []
        self.given: list[tuple[str, Tensor, bool]] = []
        self.frozen: list[Tensor] = []
        self.kinds: list[tuple[torch.dtype, torch.device]] = []
        self._add(optimizer.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group to the optimizer, and the stand-ins of its parameters; nothing changes where it raises."""
        before, given, frozen = len(self.optimizer.param_groups), self.given[:], self.frozen[:]
        with own_calls:
            self.optimizer.add_param_group(param_group)
        try:
            self._add(self.optimizer.param_groups[-1:])
        except Exception:
            del self.optimizer.param_groups[before:]
            self.given, self.frozen = given, frozen
            del self.kinds[len(given) :]
            raise

    def _add(self, groups: list[dict[str, Any]]) -> None:
        held = held_in(groups, first=len(self.given))
        for param in (h.param for h in held if type(h.param) in PLAIN and h.param.is_neg()):
            resolve_(param)  # links read memory: pieces are views of it
        # The plan is agreed anew, without what has been frozen since: that is frozen for good.
        self.frozen += [param for _, param, trained in self.given if trained and not param.requires_grad]
        self.given = [(name, param, trained and param.requires_grad) for name, param, trained in self.given]
        self.given += [(h.name, h.param, h.param.requires_grad) for h in held]
        self.kinds += [(h.param.dtype, h.param.device) for h in held]
        for link in self.links:
            held = self._install(link, groups, held)
        self.held += held
        self.bringing, self.catching_up = self._those_with("bring"), self._those_with("catch_up")
        stepping = self._those_with("step", "publish")[::-1]
        for index, link in enumerate(stepping):
            link.in_parts = all(inner.divisible for inner in stepping[:index])
        self._stepping = [link.step for link in stepping]
        self.watch(self.watchers)

    def explain(self, error: Exception) -> None:
        """Raise RuntimeError from ``error`` if any parameter was converted, which explains the error."""
        if (text := self.converted()) and text != str(error):
            raise RuntimeError(text) from error

    def converted(self) -> str | None:
        """Return the error of the first parameter that has another dtype or device than when it was given."""
        for (name, param, _), (dtype, device) in zip(self.given, self.kinds, strict=True):
            if param.dtype != dtype or param.device != device:
                was, now = (dtype, param.dtype) if param.dtype != dtype else (device, param.device)
                return (
                    f"{name} was {was} when the optimizer was made, and is {now} now: convert and move the model before "
                    "ParallelOptimizer is made, or make the optimizer anew"
                )
        return None

    def watch(self, watchers: Sequence[Watcher]) -> None:
        """These look on from now on, and no others."""
        self.watchers = list(watchers)
        self.around_update = [*self._stepping, *(watcher.update for watcher in self.watchers)]

    def _those_with(self, *methods: str) -> list[Link]:
        """The links that do something there: a step should not pass through the others."""
        return [
            link
            for link in self.links
            if not link.idle and any(getattr(type(link), name) is not getattr(Link, name) for name in methods)
        ]

    def _install(self, link: Link, groups: list[dict[str, Any]], held: list[Held]) -> list[Held]:
        tensors = params_of(groups)
        stand_ins = link.install(self.optimizer, held, tensors)
        for tensor, targets in stand_ins.items():
            link.move_state(self.optimizer, tensor, targets)
        for group in groups:
            group.update(replaced(group, lambda tensor: [new for new, _ in stand_ins.get(tensor, [(tensor, 0)])]))
        return [
            replace(h, param=new if link.is_local else h.param, offset=h.offset + offset, path=(*h.path, tensor))
            for h, tensor in zip(held, tensors, strict=True)
            for new, offset in stand_ins.get(tensor, [(tensor, 0)])
        ]

    # What is stepped --------------------------------------------------------------------------------------------------

    @property
    def stepped(self) -> list[Tensor]:
        """All that the optimizer steps, in the order of its param groups."""
        return params_of(self.optimizer.param_groups)

    def values(self) -> list[Tensor]:
        """What is stepped, with all of its bits: copies, where a link keeps some of them apart."""
        links = self._those_with("master_of")
        return [
            next((master for link in links if (master := link.master_of(tensor)) is not None), tensor)
            for tensor in self.stepped
        ]

    @property
    def leaves(self) -> list[Tensor]:
        """What the optimizer was given at each position, for which backward makes gradients."""
        return [h.path[0] for h in self.held]

    @property
    def model_params(self) -> list[Tensor]:
        """The model's (local) parameter at each position."""
        return [h.param for h in self.held]

    def pieces(self, entries: Sequence[ParameterEntry]) -> list[Piece]:
        """The same, with what each is of the model.

        Args:
            entries: Of the model's parameters, by index.
        """
        pairs = zip(self.held, self.stepped, strict=True)
        return [
            Piece(h.name, h.param, tensor, h.offset, self._region(h, tensor, entries[h.index])) for h, tensor in pairs
        ]

    def _region(self, held: Held, tensor: Tensor, entry: ParameterEntry) -> Region | None:
        if entry.full_shape is None:
            return None
        where = self.registry.topology, self.registry.coordinate
        try:
            shard = Region.of_shard(entry.full_shape, entry.shape, entry.spec, *where, entry.name)
        except ValueError:  # pieces of unequal sizes, of which nobody has said how they are cut
            return None
        return shard.run(held.offset, tensor.numel())

    def measured(self) -> list[Tensor]:
        """The tensors whose gradients are completed, measured, clipped and stepped with, in the optimizer's order."""
        return [self._before(h, tensor, lambda link, given: link.holds_back(given)) for h, tensor in self._both()]

    def compared(self) -> list[Tensor]:
        """The tensors whose values must be equal on all ranks that hold copies, in the same order."""
        return [self._before(h, tensor, lambda link, given: link.differs) for h, tensor in self._both()]

    def _both(self) -> Iterator[tuple[Held, Tensor]]:
        return zip(self.held, self.stepped, strict=True)

    def _before(self, held: Held, tensor: Tensor, stops: Callable[[Link, Tensor], bool]) -> Tensor:
        """What the first link was given at which to stop, else what is stepped."""
        found = (given for link, given in zip(self.links, held.path, strict=True) if stops(link, given))
        return next(found, tensor)

    def derive(self, plan: ReductionPlan) -> ReductionPlan:
        """The plan of what is `measured`, from that of the model's parameters; no collective."""
        measured = self.measured()
        entries = tuple(plan.entries[h.index] for h in self.held)
        slots = tuple(plan.parameter_slots[h.index] for h in self.held) if plan.parameter_slots else ()
        plan = replace(plan, entries=entries, parameter_slots=slots)
        for link in self.links:
            plan = link.derive(plan, self.held, measured)
        return plan

    def states(self) -> list[dict[str, Tensor]]:
        """The tensors of the optimizer's state of what is stepped, and what links keep of it; by name, in that order."""
        state, links = self.optimizer.state, self._those_with("kept")
        return [
            {key: value for key, value in state.get(tensor, {}).items() if isinstance(value, Tensor)}
            | {key: value for link in links for key, value in link.kept(tensor).items()}
            for tensor in self.stepped
        ]

    # The step --------------------------------------------------------------------------------------------------------

    @property
    def around_backward(self) -> list[Callable[[AnyWindow], AbstractContextManager[None]]]:
        """What every rank enters around the backward of one micro-batch, with the window."""
        return [link.micro_batch for link in self._those_with("micro_batch")]

    def has_copies(self) -> bool:
        """Return True if on this rank a stand-in has memory of its own."""
        return any(link.has_copies() for link in self.links)

    @torch.no_grad()
    def find_overwritten(self) -> str | None:
        """Return the name of the first parameter whose values the next step would undo. Host synchronization: yes."""
        for link in self.links:
            tensor = link.find_overwritten()
            if tensor is not None:
                names = (h.name for h in self.held if any(tensor is given for given in h.path))
                return next(names, None) or label_of(tensor)
        return None

    def clear(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        with own_calls:
            self.optimizer.zero_grad(set_to_none)
            for link in self.links:
                link.clear(set_to_none)

    # Saving ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What must be saved beside the optimizer's own state."""
        return {key: value for link in self.links for key, value in link.state_dict().items()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if it is of states that were sharded in another way."""
        for link in self.links:
            link.check_state(state)
        if "shards" in state and "shards" not in self.state_dict():
            raise other_layout(state["shards"], None)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it on this rank; `publish` must follow, on all.

        Raises:
            ValueError: It does not fit; nothing is changed.
        """
        self.check_state(state)
        for link in self.links:
            link.load_state_dict(state)

    def publish(self) -> None:
        """Bring the stepped weights into the model on all ranks, after they were loaded."""
        for link in reversed(self.links):
            link.publish()


def other_layout(saved: Mapping[str, Any] | None, own: Mapping[str, Any] | None) -> ValueError:
    """The error that optimizer states were saved in another layout than they have here (None: whole)."""
    layouts = [
        f"sharded over {cut['axis']}={cut['size']} in {len(cut['pieces'])} pieces" if cut else "whole"
        for cut in (saved, own)
    ]
    return ValueError(
        f"the state was saved with optimizer states {layouts[0]}, but here they are {layouts[1]}; a state fits the same "
        "model, topology, rank and states= (save_checkpoint and load_checkpoint reshard)"
    )
