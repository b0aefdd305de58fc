"""Digests of records, and their sum: a digest of a multiset that follows every change.

The sum of SHA-256 values modulo 2**256 is AdHash (Bellare and Micciancio, "A New Paradigm for
Collision-Free Hashing: Incrementality at Reduced Cost", EUROCRYPT 1997). It costs one hash to
add or take away a member, whatever the size of the set, and depends on no order.

It tells apart states that differ by accident: a lost, doubled or altered record, a cut paired
with another cut's snapshot. It does not stop somebody who may choose the records: a second set
of the same sum can be found far below 2**128 work (Wagner, "A Generalized Birthday Problem",
CRYPTO 2002). Against that, a bundle's manifest is signed.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from sc_core.records import Group, LedgerRecord, State

MODULUS = 1 << 256
_encode = msgspec.msgpack.Encoder().encode


def group_digest(group: Group) -> int:
    """SHA-256 of the group's msgpack encoding, as a number below `MODULUS`."""
    return int.from_bytes(hashlib.sha256(_encode(group)).digest(), "big")


def payload_digest(payload: Any) -> bytes:
    """SHA-256 of the payload's msgpack encoding: stands for it in `record_digest`.

    Raises:
        TypeError, OverflowError, RecursionError: msgpack can't hold the payload.
    """
    return hashlib.sha256(_encode(payload)).digest()


def record_digest(record: LedgerRecord, payload: bytes) -> int:
    """As `group_digest`, with `payload_digest` in the payload's place.

    A record changes its state several times and its payload never, so a long prompt is hashed
    once. A selected record counts as committed, as it does after a restore.
    """
    state: State = "committed" if record.state == "selected" else record.state
    short = msgspec.structs.replace(record, payload=payload, state=state)
    return int.from_bytes(hashlib.sha256(_encode(short)).digest(), "big")
