"""The comparison of settings between ranks in every step, within the collective that measures the gradient norm.

A fact is a value that must be equal on a set of ranks in a step, such as a learning rate, a clipping threshold, or the
number of micro-batches. Each rank computes an integer hash h of `BITS` bits per fact, and adds one number, the sum over
its facts, to the field ``"agreement"`` of the collective. Of n ranks that must agree on a fact, the first rank
contributes -(n - 1) h, and each other rank contributes h. Equal facts cancel exactly, because all sums are integers
below 2^53. A difference stays undetected with a probability of 2^-28. If the field is not 0, every rank skips the step.
The facts of the last steps stay on the host, for an error that names the differences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...parallel.mesh.agreement import describe, gather_objects
from ...parallel.mesh.registry import ProcessGroupRegistry, is_fake
from ...parallel.mesh.text import named_ranks
from ..clip.base import Clip
from ..clip.rules import ByNorm, ByValue
from ..norm.plan import ParameterEntry, ReductionPlan
from ..norm.plan_agreement import Holders, ParameterIdentity, identities_of
from ..norm.replicas import splitmix64_finalizer

# Hashes of facts that ranks compare, the same in every process --------------------------------------------------------

BITS = 28  # bits per hash; the sum over a million ranks stays below 2^53
MASK = 2**BITS - 1


def hash_of(*fact: object) -> int:
    """Return a hash of ``fact``, an integer below 2^`BITS` = 2^28 that is equal in every process.

    ``fact`` are objects whose `repr` contains their whole value.
    """
    digest = int.from_bytes(blake2b(repr(fact).encode(), digest_size=4).digest(), "little")
    return int(digest & MASK)


# Clipping facts --------------------------------------------------------------------------------------------------------

EXPLICIT = "explicit clipping"


class ClipFacts(NamedTuple):
    """The clipping rules and thresholds of one rank in one step.

    ``explicit`` has the rules of explicit clips in the window, such as `clip_grad_by_norm`, in the order of the calls.
    ``rule``, from the optimizer's ``max_norm``, is not compared if there is an explicit clip. ``thresholds`` has
    ``max_norm`` of each param group; it is empty if ranks have different numbers of groups.
    """

    explicit: tuple[Clip | None, ...] = ()
    rule: Clip | None = None
    thresholds: tuple[object, ...] = ()

    def as_text(self) -> dict[str, str]:
        texts = {EXPLICIT: ", then ".join(map(_call_text, self.explicit)) or "none"}
        if not self.explicit:
            texts["max_norm"] = _rule_text(self.rule)
        return texts | {
            f"max_norm of param group {index}": describe(value) for index, value in enumerate(self.thresholds)
        }


class UsedClip:
    """The clipping rules and thresholds of this rank, and a hash of them, which `read` updates.

    With ``all_groups=False``, ranks may have different param groups: the thresholds of param groups are not compared,
    and `AgreedThresholds.now` raises an error on a rank whose thresholds change.

    Attributes:
        number: A hash below 2^28, equal on ranks with equal clipping.
        facts: The rules and thresholds in ``number``.
        tensors: The thresholds in ``facts`` that are tensors on a device, each with a hash of its position. ``number``
            doesn't depend on their values, because they are compared by `StepAgreement.of_tensors`.
    """

    def __init__(self, rule: Clip | None, all_groups: bool) -> None:
        self._all_groups = all_groups
        self.tensors: list[tuple[Tensor, int]] = []
        self._on_cpu: list[Tensor] = []
        self._values: list[object] = []  # the values of `_on_cpu` from which `number` was computed
        self._of_explicit = self._of_rule = self._of_thresholds = self.number = 0
        self.facts = ClipFacts()
        self.set_rule(rule)

    def set_rule(self, rule: Clip | None) -> None:
        self._of_rule = hash_of("max_norm", _rule_text(rule, reads_devices=False))
        self.facts, self._is_new = self.facts._replace(rule=rule), True

    def read(self, explicit: tuple[Clip | None, ...], param_groups: Sequence[Mapping[str, Any]]) -> bool:
        """Update `facts`, `number` and `tensors`; return True if they were computed anew."""
        if self._on_cpu and [tensor.tolist() for tensor in self._on_cpu] != self._values:  # changed in place
            rule, self.facts = self.facts.rule, ClipFacts()
            self.set_rule(rule)
        before, is_new = self.facts, self._is_new
        if len(explicit) != len(before.explicit) or not all(map(_is_same, explicit, before.explicit)):
            is_new = True
            self._of_explicit = hash_of(EXPLICIT, *[_call_text(rule, reads_devices=False) for rule in explicit])
        thresholds: tuple[object, ...] = before.thresholds
        if self._all_groups:
            thresholds = tuple([group.get("max_norm") for group in param_groups])
            if len(thresholds) != len(before.thresholds) or not all(map(is_, thresholds, before.thresholds)):
                texts = [describe(value, reads_devices=False) for value in thresholds]
                is_new, self._of_thresholds = True, hash_of("max_norm of groups", *texts)
        if is_new:
            self.facts, self._is_new = ClipFacts(explicit, before.rule, thresholds), False
            self.number = ((self._of_explicit if explicit else self._of_rule) + self._of_thresholds) & MASK
            self._find_tensors()
        return is_new

    def _find_tensors(self) -> None:
        """Find the thresholds in `facts` that are tensors: they may be changed in place."""
        explicit, rule, thresholds = self.facts
        tensors = [*_tensors_in((explicit or rule, thresholds))]
        self._on_cpu = [tensor for tensor in tensors if tensor.is_cpu]
        self._values = [tensor.tolist() for tensor in self._on_cpu]
        self.tensors = [(tensor, hash_of("threshold", at)) for at, tensor in enumerate(tensors) if not tensor.is_cpu]


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, Clip):
        for name in getattr(value, "__dataclass_fields__", ()):
            yield from _tensors_in(getattr(value, name))


def _is_same(one: Clip | None, other: Clip | None) -> bool:
    """Return True if two rules are one object, or are both `ByNorm` or both `ByValue` with equal arguments."""
    if one is other:
        return True
    if not isinstance(one, ByNorm | ByValue) or type(one) is not type(other):
        return False
    pairs = ((mine, vars(other).get(name)) for name, mine in vars(one).items())
    return all(mine is known or (type(mine) is type(known) is float and mine == known) for mine, known in pairs)


def _call_text(rule: Clip | None, reads_devices: bool = True) -> str:
    if isinstance(rule, ByValue):
        return f"clip_grad_by_value({describe(rule.clip_value, reads_devices=reads_devices)})"
    if isinstance(rule, ByNorm):
        norm_type = "" if rule.norm_type is None else f", norm_type={describe(rule.norm_type)}"
        return f"clip_grad_by_norm({describe(rule.max_norm, reads_devices=reads_devices)}{norm_type})"
    return f"by max_norm={_rule_text(rule, reads_devices)}"


def _rule_text(rule: Clip | None, reads_devices: bool = True) -> str:
    value = rule.max_norm if isinstance(rule, ByNorm) and rule.norm_type is None else rule
    return describe(value, reads_devices=reads_devices)


# Step agreement -------------------------------------------------------------------------------------------------------

NOT_COMPARED = frozenset({"params", "param_names", "max_norm"})  # the reduction plan and `UsedClip` compare these
MICRO_BATCHES = "the number of micro-batches"
SUM_OF_WEIGHTS = "the sum of weight= of the micro-batches"
GRADIENT = "the gradient of "
MOST = 6  # the maximum number of differences that an error lists
FAILED_STEPS = "the number of calls of step() or of a clip that raised on one rank only"
SINCE = "ranks disagree about a step, which was skipped on all of them"


class ParamFacts(NamedTuple):
    """Indices of one rank's parameters whose state in one step must be equal on other ranks.

    ``frozen`` and ``thawed`` parameters were frozen or unfrozen since param groups were last added or refreshed;
    unfreezing is an error. ``without_gradient`` has parameters in `StepAgreement.replicated`.
    """

    frozen: tuple[int, ...] = ()
    thawed: tuple[int, ...] = ()
    without_gradient: tuple[int, ...] = ()


Settings = Mapping[str, object]
"""The keys and values of a param group. Keys in `NOT_COMPARED`, and objects such as functions, are not compared."""


class ErrorFacts(NamedTuple):
    """The errors of one rank that the next step reports to the other ranks.

    ``now`` is the class name and text of an error that this rank raises at the end of the step; the step is skipped on
    all ranks. ``failed`` is the number of earlier steps and explicit clips in which this rank raised an error at once,
    so that it left out some of their collectives or did not update its weights; it must be equal on all ranks. ``last``
    is the class name and text of the last of these errors.
    """

    now: str | None = None
    failed: int = 0
    last: str = ""


NO_ERRORS = ErrorFacts()


class Facts(NamedTuple):
    """One rank's values in one step that must be equal on other ranks.

    ``weighted`` is True if the micro-batches have weights. ``settings`` has the param groups with parameters on this
    rank, by index. ``weight`` is the sum of the weights; a text if it is a tensor on a device; None: not compared.
    """

    micro_batches: int
    weighted: bool
    settings: Mapping[int, Settings] = {}
    params: ParamFacts = ParamFacts()
    weight: float | str | None = None
    clip: ClipFacts = ClipFacts()
    errors: ErrorFacts = NO_ERRORS


class NamedFacts(NamedTuple):
    """The values in a rank's `Facts` as text, by name, for error messages. Equal names are compared between ranks.

    ``without_gradient`` has one text per parameter without a gradient: its name, and the mesh coordinates that the
    ranks with its replicas have in common. ``error`` is the class name and text of this rank's error in the step.
    """

    facts: Mapping[str, str]
    frozen: tuple[str, ...] = ()
    thawed: tuple[str, ...] = ()
    without_gradient: tuple[str, ...] = ()
    error: str | None = None


class _Class(NamedTuple):
    """A set of ranks that must have equal values of one kind, such as settings of a param group.

    ``coefficient`` is the factor of this rank's hashes: 1 - n on the first of the n ranks, 1 on the others, 0 if n is 1
    or if the process group is a fake. ``label`` is a hash of the ranks and the kind, so that equal values of different
    sets have different hashes.
    """

    coefficient: int
    label: int

    def term(self, *fact: object) -> int:
        """Return this rank's summand for the value ``fact``. The summands of all ranks of the set cancel if they agree."""
        return self.coefficient * hash_of(self.label, fact) if self.coefficient else 0


class _Group:
    """The settings of one param group, such as its learning rate, with a hash, which `read` updates.

    ``tensors`` has the settings that are tensors on a device, each with a hash of its key.
    """

    def __init__(self, index: int, ranks: _Class) -> None:
        self.index, self.ranks = index, ranks
        self.settings: Settings = {}
        self._numbers: dict[str, int] = {}
        self._salts: dict[str, int] = {}
        self._mutable: list[str] = []  # keys of settings that may be changed in place
        self.number, self.tensors = 0, list[tuple[Tensor, int]]()

    def read(self, group: Mapping[str, object]) -> bool:
        """Read the present settings of ``group``, and return True if `number` has changed."""
        before = self.settings
        if len(before) == len(group) and all(map(is_, group.values(), before.values())):
            if not self._mutable:
                return False
            for key in self._mutable:
                self._numbers[key] = self._number_of(key, before[key])
        else:
            self._read_anew(dict(group))
        number = sum(self._numbers.values())
        has_changed, self.number = number != self.number, number
        return has_changed

    def _read_anew(self, settings: Settings) -> None:
        before = self.settings
        finds_tensors = [*settings] != [*before]
        if finds_tensors:
            before, self._numbers = {}, {}
            self._salts = {key: hash_of(self.ranks.label, self.index, key) for key in settings}
        for key, value in settings.items():
            known = before.get(key, _NEW)
            if value is not known:
                self._numbers[key] = self._number_of(key, value)
                finds_tensors |= type(value) is not float or type(known) is not float
        self.settings = settings
        if finds_tensors:
            self._find_tensors()

    def _number_of(self, key: str, value: object) -> int:
        return 0 if key in NOT_COMPARED else _number_of(value, self._salts[key])

    def _find_tensors(self) -> None:
        self._mutable, self.tensors = [], []
        for key, value in self.settings.items():
            items = [value] if isinstance(value, Tensor) else value if isinstance(value, list | tuple) else ()
            if key in NOT_COMPARED:
                continue
            if isinstance(value, list) or any(isinstance(item, Tensor) and item.is_cpu for item in items):
                self._mutable.append(key)
            salt = self._salts[key]
            self.tensors += [(item, salt) for item in items if isinstance(item, Tensor) and not item.is_cpu]


_NEW = object()


def _is_compared(value: object) -> bool:
    return isinstance(value, int | float | str | list | tuple | Tensor | None) or hasattr(value, "item")


def _number_of(value: object, salt: int) -> int:
    """Return a hash of a setting; 0 for tensors on a device and objects that are not compared.

    Equal settings with the same ``salt`` have equal hashes in every process.
    """
    if isinstance(value, int | float):  # with -value, because hash(-1) == hash(-2) in Python
        return hash((salt, value, -value)) & MASK if value == value else salt  # NaN objects have different hashes
    if isinstance(value, Tensor):
        return _number_of(value.tolist(), salt) if value.is_cpu else 0
    if isinstance(value, list | tuple):
        return int(hash((salt, *(_number_of(item, at) for at, item in enumerate(value)))) & MASK)
    if hasattr(value, "item"):  # a NumPy number
        return _number_of(value.item(), salt)
    return hash_of(salt, value) if isinstance(value, str | None) else 0


def _text_of(value: object) -> str:
    if isinstance(value, Tensor) and not value.is_cpu:
        return f"{describe(value)} (a tensor on {value.device.type})"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text_of, value))})"
    if hasattr(value, "item") and not isinstance(value, Tensor):  # a NumPy number
        value = value.item()
    return describe(value)


class StepAgreement:
    """The comparison of micro-batches, hyper-parameters, clipping, frozen parameters and missing gradients in every step.

    Args:
        plan: The plan of the model's parameters, compared over all ranks (`norm.plan_agreement.agree`).
        optimizer: A param group is compared between the ranks of a pipeline stage that have parameters in the group.
        groups: For each rank, the indices of its param groups that have parameters.
        rule: The optimizer's clipping rule. None: it does not clip.
        all_groups: True if every rank has all param groups, so that their ``max_norm`` can be compared.
        left_out: Names of the frozen parameters that the optimizer left out. In `ParamFacts`, their indices follow the
            indices of the plan's parameters.

    Attributes:
        sent: The values that the last result of `number` or `number_of_errors` was computed from.
        replicated: A dict from the index of a trained parameter to the model axes larger than 1 over which it is
            replicated and its gradient is not partial. Each rank along these axes computes the full gradient.
            Parameters without such axes are not in the dict. Empty until `set_replicas` is called.
        used_clip: The compared clipping rules and thresholds.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        registry: ProcessGroupRegistry,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[frozenset[int]],
        rule: Clip | None,
        all_groups: bool,
        left_out: Sequence[str],
    ) -> None:
        self.plan, self.registry, self.optimizer, self._left_out = plan, registry, optimizer, left_out
        self._is_fake = is_fake()  # a fake process group has no other ranks to compare with
        topology, rank = registry.topology, registry.global_rank
        within = [axis for axis in topology.axes if axis not in topology.pipe_axes]
        stage = registry.ranks(*within) if within else (rank,)
        self._stage = self._class_of(stage, "stage")
        model = topology.model_axes
        self._sharers = self._class_of(registry.ranks(*model) if model else (rank,), "sharers")
        members = {index: [other for other in stage if index in groups[other]] for index in sorted(groups[rank])}
        self._groups = [_Group(index, self._class_of(ranks, "group")) for index, ranks in members.items()]
        self._world = self._class_of(range(topology.world_size), "world")
        self.used_clip = UsedClip(rule, all_groups)
        self._of_groups = self._of_params = self._of_window = self._of_errors = self._sum = 0
        self._errors = NO_ERRORS
        self._window: tuple[int, bool, float | str | None] | None = None
        self._settings: Mapping[int, Settings] = {}
        self._params = ParamFacts()
        self.replicated: dict[int, tuple[str, ...]] = {}
        self.sent = Facts(0, False)

    def _class_of(self, ranks: Sequence[int], kind: str) -> _Class:
        """Return the set of ``ranks`` (ascending, including this rank) with this rank's coefficient."""
        size, is_first = 1 if self._is_fake else len(ranks), self.registry.global_rank == ranks[0]
        return _Class(0 if size == 1 else 1 - size if is_first else 1, hash_of(kind, tuple(ranks)))

    def set_replicas(self, entries: Iterable[ParameterEntry]) -> None:
        """Set `replicated` from the plan's entries, with specs that include the partial axes of DTensor gradients."""
        topology, self.replicated = self.plan.topology, {}
        for index, entry in enumerate(entries):
            model = [axis for axis in entry.spec.replica_axes(topology) if axis in topology.model_axes]
            axes = tuple(axis for axis in model if axis not in entry.spec.partial and topology.size(axis) > 1)
            if entry.trained and axes:
                self.replicated[index] = axes

    # Summands of the collective ---------------------------------------------------------------------------------------

    def number(
        self,
        micro_batches: int,
        weight: float | Tensor | None,
        params: ParamFacts,
        explicit: tuple[Clip | None, ...] = (),
        errors: ErrorFacts = NO_ERRORS,
    ) -> int:
        """Return this rank's summand, an integer. The sum over all ranks is 0 if all compared values are equal.

        A parameter in ``params.thawed`` makes the sum differ from 0, because no step updates it. So does
        ``errors.now``. Settings that are tensors on a device are compared by `of_tensors` instead. ``weight`` is the
        sum of the micro-batches' weights; None: they have no weights.
        """
        param_groups, changed = self.optimizer.param_groups, False
        for group in self._groups:
            if group.read(param_groups[group.index] if group.index < len(param_groups) else {}):
                changed = True
        weighted = weight is not None
        shared_weight = self._shared_weight(weight)
        same_window = (micro_batches, weighted, shared_weight) == self._window
        same_clip = not self.used_clip.read(explicit, param_groups)
        if not changed and same_window and same_clip and params == self._params and errors == self._errors:
            return self._sum
        if changed:
            by_class: dict[_Class, int] = {}
            for group in self._groups:
                by_class[group.ranks] = by_class.get(group.ranks, 0) + group.number
            self._of_groups = sum(ranks.coefficient * (number & MASK) for ranks, number in by_class.items())
            self._settings = {group.index: group.settings for group in self._groups}
        if not same_window:
            self._window = micro_batches, weighted, shared_weight
            # With weights, data ranks may have different numbers of micro-batches.
            numbers = self._sharers.term(micro_batches, _number_of(shared_weight, 0)) if weighted else 0
            self._of_window = numbers + self._stage.term(weighted, 0 if weighted else micro_batches)
        if params != self._params:
            self._params = params
            self._of_params = self._frozen_number(params.frozen) + self._missing_number(params.without_gradient)
            self._of_params += sum(hash_of("thawed", index) | 1 for index in params.thawed)
        clip = self.used_clip.facts
        self.sent = Facts(micro_batches, weighted, self._settings, params, shared_weight, clip, errors)
        of_clip = self._world.coefficient * self.used_clip.number
        self._sum = self._of_window + self._of_groups + self._of_params + of_clip + self._errors_number(errors)
        return self._sum

    def number_of_errors(self, errors: ErrorFacts) -> int:
        """Return the result of `number` for a rank that can't read its settings, as ``errors.now`` describes."""
        self.sent = Facts(0, False, errors=errors)
        return self._errors_number(errors)

    def _errors_number(self, errors: ErrorFacts) -> int:
        if errors != self._errors:
            self._errors = errors
            self._of_errors = self._world.term(FAILED_STEPS, errors.failed) if errors.failed else 0
            self._of_errors += 0 if errors.now is None else hash_of("error", errors.now) | 1
        return self._of_errors

    def _shared_weight(self, weight: float | Tensor | None) -> float | str | None:
        """Return ``weight`` as it is compared between the ranks along the model axes, which must have equal weights.

        For a tensor on a device, return a text with the device type. None: nothing is compared.
        """
        if weight is None or not self._sharers.coefficient:
            return None
        if not isinstance(weight, Tensor):
            return weight
        return float(weight) if weight.is_cpu else f"a tensor on {weight.device.type}"

    def _frozen_number(self, frozen: Sequence[int]) -> int:
        """Return the summand of the result of `number` for the parameters with indices ``frozen``; 0 if none."""
        names: dict[Holders, list[str | int]] = {}
        for index in frozen:
            holders, name = self._identities[index].key
            names.setdefault(holders, []).append(name)
        topology, number = self.plan.topology, 0
        for holders, of_holders in names.items():
            ranks = [rank for rank in range(topology.world_size) if holders.include(topology.coordinate(rank))]
            number += self._class_of(ranks, "frozen").term(*of_holders)
        return number

    def _missing_number(self, without_gradient: Sequence[int]) -> int:
        """Return the summand of the result of `number` for replicated parameters without gradients; 0 if there are none."""
        names: dict[tuple[str, ...], list[str | int]] = {}
        for index in without_gradient:
            names.setdefault(self.replicated[index], []).append(self._identities[index].key[1])
        classes = ((self._class_of(self.registry.ranks(*axes), "gradients"), of) for axes, of in names.items())
        return sum(ranks.term(*of) for ranks, of in classes)

    @cached_property
    def _identities(self) -> list[ParameterIdentity]:
        return identities_of(self.plan)

    def of_tensors(self, device: torch.device) -> Tensor | None:
        """Return this rank's summand for settings and thresholds in device tensors, 0-dim float64; None if there are none.

        Call it after `number`, to whose result it must be added. Host synchronization: none if the tensors are on
        ``device``.
        """
        terms = [
            ranks.coefficient * _hashed(value, salt).to(device, non_blocking=True)
            for ranks, tensors in [
                (self._world, self.used_clip.tensors),
                *((of.ranks, of.tensors) for of in self._groups),
            ]
            for value, salt in tensors
        ]
        return torch.stack(terms).sum() if terms else None

    # Error messages --------------------------------------------------------------------------------------------------

    def _named(self, facts: Facts | None) -> NamedFacts:
        """Return the values in ``facts`` as text, by name. None: the values in `sent`.

        Host synchronization: for tensors on a device.
        """
        facts = self.sent if facts is None else facts
        if facts.errors.now is not None:
            return NamedFacts({}, error=facts.errors.now)
        topology, coordinate = self.registry.topology, self.registry.coordinate
        stage = [coordinate[axis] for axis in topology.pipe_axes]
        where = f" of pipeline stage {stage}" if topology.size(*topology.pipe_axes) > 1 else ""
        at = ", ".join(f"{axis}={coordinate[axis]}" for axis in topology.data_axes)
        facts_by_name = {f"weight= of backward{where}": "given" if facts.weighted else "not given"}
        facts_by_name[f"{MICRO_BATCHES}{where}{f' at {at}' if facts.weighted and at else ''}"] = str(
            facts.micro_batches
        )
        if facts.weight is not None:
            facts_by_name[f"{SUM_OF_WEIGHTS}{where}{f' at {at}' if at else ''}"] = describe(facts.weight)
        facts_by_name |= facts.clip.as_text()
        facts_by_name[FAILED_STEPS] = _failed_text(facts.errors)
        for index, settings in facts.settings.items():
            facts_by_name[f"param group {index}{where}"] = "present" if settings else "missing"
            for key, value in settings.items():
                if key not in NOT_COMPARED and _is_compared(value):
                    facts_by_name[f"{key} of param group {index}{where}"] = _text_of(value)
        if facts.params == ParamFacts():
            return NamedFacts(facts_by_name)
        names = [*(identity.name for identity in self._identities), *self._left_out]
        frozen, thawed, without = facts.params
        return NamedFacts(facts_by_name, _at(names, frozen), _at(names, thawed), tuple(map(self._gradient_of, without)))

    def _gradient_of(self, index: int) -> str:
        """Return a text that names the gradient of a parameter in `replicated`, equal on the ranks that compare it."""
        topology, coordinate = self.registry.topology, self.registry.coordinate
        others = (axis for axis in topology.axes if axis not in self.replicated[index] and topology.size(axis) > 1)
        at = ", ".join(f"{axis}={coordinate[axis]}" for axis in others)
        return f"{GRADIENT}{self._identities[index].name}{f' at {at}' if at else ''}"

    def error(self, facts: Facts | None = None, since: str = SINCE) -> RuntimeError:
        """Return an error that lists the values that differ between ranks. Every rank must call it; all errors are equal.

        ``facts`` are this rank's values in the step in which ranks disagreed; None: the values in `sent`. ``since`` is
        the first part of the message: the effect on the step.

        Collectives: an object all-gather; at most one more if a parameter is frozen or has no gradient.
        Host synchronization: yes.
        """
        return RuntimeError(f"{since}: {self._text_of(gather_objects(self._named(facts), self.registry))}")

    def _text_of(self, by_rank: Sequence[NamedFacts]) -> str:
        """Return the text of an error: the values that differ between ranks, and advice.

        Collectives: an object all-gather if a parameter is frozen or has no gradient, except if a parameter was unfrozen or
            a rank raised an error.
        """
        raised = [(rank, of_rank.error) for rank, of_rank in enumerate(by_rank) if of_rank.error is not None]
        if raised:
            return f"rank {raised[0][0]} raised {raised[0][1]}"
        thawed = [(name, rank) for rank, of_rank in enumerate(by_rank) for name in of_rank.thawed]
        if thawed:
            name, ranks = thawed[0][0], sorted({rank for other, rank in thawed if other == thawed[0][0]})
            return thawed_text(name, f" on {named_ranks(ranks)}")
        found = [*_different(of_rank.facts for of_rank in by_rank)]
        if any(name.startswith(MICRO_BATCHES) for name, _ in found):  # the cause of the different sums of weights
            found = [(name, text) for name, text in found if not name.startswith(SUM_OF_WEIGHTS)]
        frozen = {name for of_rank in by_rank for name in of_rank.frozen}
        missing = {text for of_rank in by_rank for text in of_rank.without_gradient}
        if frozen or missing:
            own = by_rank[self.registry.global_rank]
            names = (identity.name for identity in self._identities if identity.name in frozen)
            held = {f"requires_grad of {name}": str(name not in own.frozen) for name in names}
            for text in map(self._gradient_of, self.replicated):
                if text in missing:
                    held[text] = "missing" if text in own.without_gradient else "present"
            found += _different(gather_objects(held, self.registry))
        if not found:
            return UNNAMED
        more = f"; and {len(found) - MOST} more" if len(found) > MOST else ""
        lines = "; ".join(text for _, text in found[:MOST]) + more
        starts = {next((start for start in ADVICE if name.startswith(start)), "") for name, _ in found}
        return f"{lines}. {' '.join(ADVICE[start] for start in ADVICE if start in starts)}"


# Key: prefix of the name of a compared setting (`fact`). Value: advice for the error.
ADVICE = {
    MICRO_BATCHES: (
        "Every rank must call backward equally often before step(): call backward(None) on a rank without samples, or, "
        "for the mean over all samples, give weight= on every rank, and call backward(None, weight=0) on a rank without "
        "samples. A rank misses a backward if it skips a batch after an error, or if its loader is shorter."
    ),
    SUM_OF_WEIGHTS: (
        "Give the same weight= on all ranks that see the same samples, such as tensor-parallel ranks: a number on all of "
        "them, or a tensor on all of them."
    ),
    "max_norm": (
        "Set optimizer.max_norm, and max_norm of the param groups, to the same value on every rank, between the same two "
        "steps."
    ),
    EXPLICIT: (
        "Call clip_grads, clip_grad_by_norm or clip_grad_by_value on every rank, with the same threshold. If a rank "
        "computes the threshold from its own loss or gradients, all-reduce it first."
    ),
    "weight=": "Give every rank's backward a weight, or none: backward(None, weight=0) on a rank without samples.",
    GRADIENT: (
        "These ranks hold replicas of the parameter, and each must compute its whole gradient, or the replicas diverge: "
        "use the parameter on all of them, or on none of them. If each rank computes a part of the gradient, declare that: "
        "P(partial=...) with the axis."
    ),
    FAILED_STEPS: (
        "After such an error, ranks may have different weights or be in different steps, so all later steps are skipped: "
        "remove the cause of the error, and continue from a checkpoint."
    ),
    "param group": "Add and remove param groups on every rank, by add_param_group of the ParallelOptimizer.",
    "requires_grad": "Call requires_grad_ on every rank that holds the parameter, between the same two steps.",
    "": (
        "Give all ranks the same hyper-parameters: a rank that sets them from local values, such as a "
        "ReduceLROnPlateau with its own loss, diverges from other ranks. All-reduce the metric before you pass it to "
        "the schedule."
    ),
}
UNNAMED = (
    "the setting that differed, such as a learning rate or a threshold in a tensor, is equal on all ranks again. "
    + ADVICE[""]
)


def thawed_text(name: str, where: str = "") -> str:
    return (
        f"{name} was frozen when the optimizer was made or last refreshed, and is not now{where}, so no step would update "
        "the parameter: after requires_grad_(True), call optimizer.refresh() on every rank, between two steps. If there "
        "are gradients, call optimizer.zero_grad() before refresh() (with accumulation_steps, in the `except` block of "
        "this error)"
    )


def _failed_text(errors: ErrorFacts) -> str:
    return f"{errors.failed} (the last: {errors.last})" if errors.failed else "0"


def _at(names: Sequence[str], indices: Iterable[int]) -> tuple[str, ...]:
    return tuple(names[index] for index in indices)


def _different(by_rank: Iterable[Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) for each value that differs between ranks. Ranks without a value of this name are ignored."""
    ranks: dict[str, dict[str, list[int]]] = {}
    for rank, facts in enumerate(by_rank):
        for name, value in facts.items():
            ranks.setdefault(name, {}).setdefault(value, []).append(rank)
    for name, values in ranks.items():
        if len(values) > 1:
            yield name, f"{name} is " + " and ".join(f"{value} on {named_ranks(of)}" for value, of in values.items())


def _hashed(tensor: Tensor, salt: int) -> Tensor:
    """Return a hash of a tensor's bits and ``salt``: an integer below 2^28, 0-dim float64 on the tensor's device."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)
    words = tensor.detach().reshape(-1).view(integers).to(torch.int64)
    mixed = splitmix64_finalizer(words + salt)
    total: Tensor = (mixed if words.numel() == 1 else splitmix64_finalizer(mixed.cumsum(0))).sum()
    return torch.bitwise_and(total, MASK).double()
