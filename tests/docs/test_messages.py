"""Errors speak with one voice: what was given, what is needed, what to write.

`python tests/harness/messages.py` prints all of them from the source, to be read as a text. This keeps what a machine can
see: that each says what to do, or what there is to choose from, and that none scolds or shouts.
"""

from __future__ import annotations

import ast
import re

import pytest
from messages import Message, found_in, messages

# What tells somebody what to do.
TELLS = re.compile(
    r"\b(give|write|call|make|create|take|use|set|declare|load|build|leave|say|name|start|prove|put|keep|apply|move|choose|ask|hand"
    r"|return|cut|wrap|unfreeze|freeze|redistribute|continue|prepare|shard|pad|step|initialise|turn|pass|rename|split|add|check"
    r"|do|lay|let|run|train|finish|begin|define|save|boost|skip|clear|look|seed|see|pip|clip|go|wait)\b",
    re.IGNORECASE,
)
# ... or what there is.
THERE_IS = re.compile(
    r"\b(needs?|must|its|it has|there are|goes? from|go from|isn't|belongs to|fits|below|the axes are|only members)\b"
    r"|\{.*(ADVICE|advice|SAY_SO|WAY_OUT|EARLIER|reasons|problem|where|wrong|told|mismatches|known|there)\b.*\}"
)
BAD = re.compile(
    r"\b(please|invalid|illegal|bad|cannot|failed to|unable|unexpected|oops|sorry)\b|!(?!=)|[^.][.]$", re.IGNORECASE
)
# Parts of another message, or of none: they are quoted, or say what Python itself asks for.
PARTS = {
    "optim/checkpoint/tensors.py",  # in "is damaged, or was tampered with: ..."
    "parallel/mesh/topology.py",  # of a sequence
    "parallel/ranks/interface.py",  # a note on another error
    "optim/proof/command.py",  # of a command line, with the usage above
    "optim/kernels/native.py",
}


def without_advice(found: Message) -> bool:
    """Whether it has words of its own and says neither what to do nor what there is."""
    words = re.sub(r"\{[^}]*\}", "", found.text).split()
    return len(words) > 3 and not (TELLS.search(found.text) or THERE_IS.search(found.text))


def test_they_are_found() -> None:
    assert len(messages()) > 400
    assert {found.error for found in messages()} >= {"ValueError", "TypeError", "RuntimeError", "ReplicaMismatchError"}


def test_each_says_what_to_do_or_what_there_is() -> None:
    assert [found for found in messages() if without_advice(found) and found.file not in PARTS] == []


def test_none_scolds() -> None:
    assert [found for found in messages() if BAD.search(re.sub(r"\{[^}]*\}", "", found.text).replace("...", ""))] == []


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("raise ValueError(f'a size of {size} was found for this axis')", True),
        ("raise ValueError(f'size={size}: give a whole number >= 1')", False),
    ],
)
def test_one_without_advice_would_be_noticed(code: str, wrong: bool) -> None:
    ((line, error, text),) = found_in(ast.parse(code))
    assert without_advice(Message("file.py", line, error, text)) == wrong


def test_parameters_stand_in_braces() -> None:
    code = "raise TypeError(f'{name}={value!r}: ' + ('give one' if one else 'give two'))"
    ((_, error, text),) = found_in(ast.parse(code))
    assert (error, text) == ("TypeError", "{name}={value}: <give one | give two>")
