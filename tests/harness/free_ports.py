from __future__ import annotations

import random
import socket
from contextlib import suppress

LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


def free_port(family: socket.AddressFamily = socket.AF_INET) -> str:
    """Return a port outside the ephemeral range, so that it stays free until it is used: ranks bind ephemeral ports."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with suppress(OSError), socket.socket(family) as one:
            one.bind((LOOPBACK[family], port))
            return str(port)
