"""The end of a process that still holds a group: gloo's threads must be done before the interpreter is.

A thread that has run a collective lets go of its tensors afterwards, for which it may need the interpreter; where that has
ended meanwhile, torch ends the process with "terminate called without an active exception" (SIGABRT), after all work was
done. Whoever holds no group when it is destroyed is safe, since torch then waits for the threads; but a script's registry,
optimizer or layers, which hold groups, mostly live as long as the script.
"""

from __future__ import annotations

import atexit
import time
from functools import cache

MOMENT = 0.05  # seconds; a thread that waits for the interpreter gets it as soon as nobody has it


@cache
def let_threads_finish() -> None:
    """Give the interpreter away for a `MOMENT` when the process ends. A second call does nothing more."""
    atexit.register(time.sleep, MOMENT)
