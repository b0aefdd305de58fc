"""`Counts`: what the ledger's records add up to, kept up as they come and go."""

from __future__ import annotations

from typing import Literal, get_args

from sc_core.digest import MODULUS
from sc_core.records import LedgerRecord, State


class Tally(dict[int, int]):
    """How many of each number; what there is none of has no entry."""

    def shift(self, key: int, by: int) -> None:
        count = self.get(key, 0) + by
        if count:
            self[key] = count
        else:
            del self[key]


class Counts:
    """A function of the set of records, whatever their history: counting anew gives the same."""

    def __init__(self) -> None:
        self.of_state: dict[State, int] = dict.fromkeys(get_args(State), 0)
        self.live = 0  #: admitted, in any state
        self.unadmitted = 0
        self.of_target = Tally()  #: live ones
        self.uncommitted_of_version = Tally()  #: in flight, or waiting for another attempt
        self.unselected_of_version = Tally()  #: those, and the committed ones
        self.digest = 0  #: of those that own a group

    def shift(self, record: LedgerRecord, digest: int, by: Literal[1, -1]) -> None:
        """Count a record in, or out."""
        self.digest = (self.digest + by * digest) % MODULUS
        self.of_state[record.state] += by
        if record.admitted:
            self.live += by
            if record.target_step is not None:
                self.of_target.shift(record.target_step, by)
        else:
            self.unadmitted += by
        version = record.start_weight_version
        if version is not None and record.state != "selected":
            self.unselected_of_version.shift(version, by)
            if record.state != "committed":
                self.uncommitted_of_version.shift(version, by)
