"""What was found of each parameter, and of a model: values that all ranks share, as text, as a table, as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from ...parallel.layout.spec import P

Cause = Literal[
    "split, not declared",
    "declared split, but a copy",
    "a sum is missing",
    "counted several times",
    "divided too often",
    "added on every rank",
    "held by others",
    "no gradient comes",
    "copies differ",
    "backward is wrong",
    "forward differs",
]


@dataclass(frozen=True)
class Finding:
    """One parameter whose gradient, as it is declared, is not the derivative of the loss.

    Args:
        name: Of the parameter; with the stage, where stages have others of that name.
        module: That has it.
        declared: None where nothing is.
        inferred: What it is instead; None where no layout makes its gradient right.
        cause: The kind of mistake.
        axes: Along which axes.
        factor: How many times too large the gradient is, where it is only that.
        text: The likely mistake, in words.
    """

    name: str
    module: str
    declared: P | None
    inferred: P | None
    cause: Cause
    axes: tuple[str, ...]
    factor: float | None
    text: str

    def __str__(self) -> str:
        declared = "" if self.declared is None else f"declared {self.declared}, "
        return f"{self.name}: {declared}{self.text}"


@dataclass(frozen=True)
class Proof:
    """What `prove` found, the same on all ranks.

    Args:
        proved: The parameters whose gradients are the derivative of the loss, as declared.
        untold: Those of which nothing can be said: the loss hardly depends on them, or they were left out.
        findings: All others, in forward order.
        where: Which module's backward is wrong, where that could be told.
        forwards: How often the model was run.
    """

    proved: tuple[str, ...]
    untold: tuple[str, ...]
    findings: tuple[Finding, ...]
    where: str | None
    forwards: int

    @property
    def right(self) -> bool:
        """Whether nothing wrong was found."""
        return not self.findings

    def check(self) -> None:
        """Raises AssertionError with all that was found, where something is wrong."""
        if self.findings:
            raise AssertionError(str(self))

    def to_json(self) -> dict[str, Any]:
        """Plain values, specs as text."""
        values = asdict(self)
        for finding, one in zip(values["findings"], self.findings, strict=True):
            finding.update(
                declared=None if one.declared is None else repr(one.declared),
                inferred=None if one.inferred is None else repr(one.inferred),
            )
        return values | {"right": self.right}

    def __str__(self) -> str:
        told = f"{len(self.proved)} parameters are right, in {self.forwards} forwards"
        untold = f"; nothing can be said of {', '.join(self.untold)}" if self.untold else ""
        if self.right:
            return told + untold
        wrong = [str(finding) for finding in self.findings]
        where = [self.where] if self.where else []
        count = "1 parameter is wrong" if len(wrong) == 1 else f"{len(wrong)} parameters are wrong"
        return "\n".join([f"{count}:", *wrong, *where, f"The other {told}{untold}"])
