"""The style of error messages: what is wrong, what was expected, what to write.

`python tests/harness/messages.py` prints all messages from the source for proofreading. These tests check only the
properties that a program can check: a message gives advice or lists the choices, and none uses discouraged words.
Messages of up to three words, and those of the files in `PARTS`, need no advice.
"""

from __future__ import annotations

import ast
import re

import pytest
from messages import Message, found_in, messages

# Verbs that tell the user what to do.
TELLS = re.compile(
    r"\b(give|write|call|make|create|take|use|set|declare|load|build|leave|say|name|start|prove|put|keep|apply|move|choose|ask|hand"
    r"|return|cut|wrap|unfreeze|freeze|redistribute|continue|prepare|shard|pad|step|initialize|turn|pass|rename|split|add|check"
    r"|do|lay|let|run|train|finish|begin|define|save|boost|skip|clear|look|seed|see|pip|clip|go|wait)\b",
    re.IGNORECASE,
)
# Words that say what was expected or what the choices are.
THERE_IS = re.compile(
    r"\b(needs?|must|its|it has|there are|goes? from|go from|isn't|belongs to|fits|below|the axes are|only members)\b"
    r"|\{.*(ADVICE|advice|SAY_SO|WAY_OUT|EARLIER|reasons|problem|where|wrong|told|mismatches|known|there)\b.*\}"
)
BAD = re.compile(
    r"\b(please|invalid|illegal|bad|cannot|failed to|unable|unexpected|oops|sorry)\b|!(?!=)|[^.][.]$", re.IGNORECASE
)
# Files whose errors are parts of another message, or replace a standard error of Python.
PARTS = {
    "optim/checkpoint/tensors.py",  # in "is damaged, or was tampered with: ..."
    "parallel/mesh/topology.py",  # IndexError and ValueError of a sequence, like those of a tuple
    "parallel/ranks/interface.py",  # a note on another error
    "optim/proof/command.py",  # errors of a command line, shown below the usage
    "optim/kernels/native.py",
}


def without_advice(found: Message) -> bool:
    """Return whether a message has words of its own but gives neither advice nor choices."""
    words = re.sub(r"\{[^}]*\}", "", found.text).split()
    return len(words) > 3 and not (TELLS.search(found.text) or THERE_IS.search(found.text))


def test_error_messages_can_be_extracted_from_the_source() -> None:
    assert len(messages()) > 400
    assert {found.error for found in messages()} >= {"ValueError", "TypeError", "RuntimeError", "ReplicaMismatchError"}


def test_error_messages_give_advice_or_choices() -> None:
    assert [found for found in messages() if without_advice(found) and found.file not in PARTS] == []


def test_no_error_message_uses_discouraged_words() -> None:
    assert [found for found in messages() if BAD.search(re.sub(r"\{[^}]*\}", "", found.text).replace("...", ""))] == []


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("raise ValueError(f'a size of {size} was found for this axis')", True),
        ("raise ValueError(f'size={size}: give a whole number >= 1')", False),
    ],
)
def test_error_message_without_advice_is_detected(code: str, wrong: bool) -> None:
    ((line, error, text),) = found_in(ast.parse(code))
    assert without_advice(Message("file.py", line, error, text)) == wrong


def test_extracted_message_shows_f_string_expressions_in_braces() -> None:
    code = "raise TypeError(f'{name}={value!r}: ' + ('give one' if one else 'give two'))"
    ((_, error, text),) = found_in(ast.parse(code))
    assert (error, text) == ("TypeError", "{name}={value}: <give one | give two>")
