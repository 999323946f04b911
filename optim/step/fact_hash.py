"""Hashes of facts that ranks compare, the same in every process."""

from __future__ import annotations

from hashlib import blake2b

BITS = 28  # of a hash: a million ranks add up to less than 2^53
MASK = 2**BITS - 1


def hash_of(*fact: object) -> int:
    """Return a number below 2^`BITS` that is the same in every process. Args: fact: Printed, it says all."""
    digest = int.from_bytes(blake2b(repr(fact).encode(), digest_size=4).digest(), "little")
    return int(digest & MASK)
