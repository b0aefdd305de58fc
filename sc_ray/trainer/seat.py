"""The place of a trainer worker among several, and what it says when others fail."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sc_core import (
    ScError,
)

LOOPBACK = "127.0.0.1"


def worker_name(rank: int) -> str:
    """What a trainer worker is called in errors and logs."""
    return f"trainer-{rank}"


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's place among the others; it crosses to its process."""

    rank: int
    workers: int  #: how many there are
    port: int  #: where they meet
    host: str = LOOPBACK  #: address of the node where that is; loopback if all are on it
    start_s: float = 600.0  #: how long to wait for the others to come up
    call_s: float = 1800.0  #: how long to wait for the others in one exchange


class PeerFailed(ScError, RuntimeError):
    """A call was given up here because it failed on other trainer workers, which raise why."""

    def __init__(self, call: str, workers: Sequence[str]) -> None:
        super().__init__(call, tuple(workers))
        self.call, self.workers = call, tuple(workers)

    def __str__(self) -> str:
        return f"{self.call} failed on {', '.join(self.workers)}"
