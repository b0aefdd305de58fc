"""The conservation law, checked on the live ledger: each prompt in one state, and nothing lost."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

from sc_core.counts import Counts
from sc_core.digest import payload_digest, record_digest
from sc_core.errors import Conservation
from sc_core.index import ReplayIndex
from sc_core.records import LedgerRecord, owns_group


def check_counts(
    next_ordinal: int, records: Collection[LedgerRecord], counters: Mapping[str, int]
) -> None:
    """Every ordinal that left the source is live, trained or dropped.

    Raises:
        Conservation: the numbers don't add up, or an ordinal is out of order or doubled.
    """
    trained, dropped = counters["trained"], counters["dropped"]
    if len(records) + trained + dropped != next_ordinal:
        raise Conservation(
            f"{next_ordinal} prompts have left the source, but {len(records)} are live,"
            f" {trained} were trained and {dropped} dropped"
        )
    last = -1
    for record in records:
        if not last < record.ordinal < next_ordinal:
            raise Conservation(
                f"the record of prompt {record.ordinal} comes after that of {last}, and"
                f" {next_ordinal} is the next to be pulled"
            )
        last = record.ordinal


def check_index(records: Collection[LedgerRecord], index: ReplayIndex) -> None:
    """The index has a group exactly for the committed and the selected records.

    Raises:
        Conservation: naming the first prompt of which they disagree.
    """
    owners = 0
    for record in records:
        owner = owns_group(record)
        owners += owner
        group = index.get(record.group_id)
        if (group is not None) is not owner:
            raise Conservation(
                f"prompt {record.ordinal} is {record.state}, and group {record.group_id} is"
                f" {'not ' if group is None else ''}in the index"
            )
        if group is None:
            continue
        if index.is_selected(group.group_id) is not (record.state == "selected"):
            raise Conservation(
                f"prompt {record.ordinal} is {record.state} in the ledger only, not in the index"
            )
        if record.finished:
            raise Conservation(
                f"prompt {record.ordinal} is {record.state} and keeps siblings apart"
            )
        theirs = (group.ordinal, group.start_weight_version, group.target_step)
        mine = (record.ordinal, record.start_weight_version, record.target_step)
        if mine != theirs:
            raise Conservation(
                f"prompt {record.ordinal}: ordinal, start version and target step are {mine} in"
                f" the ledger and {theirs} in the index"
            )
    if len(index) != owners:
        raise Conservation(
            f"the index has {len(index)} groups, and {owners} records are committed or selected"
        )


def check_recount(records: Collection[LedgerRecord], kept: Counts) -> None:
    """What was kept up along the way is what the records add up to.

    Raises:
        Conservation: naming the first count that differs. A digest that does while the rest
            agrees comes from a payload that was changed in memory.
    """
    recount = Counts()
    for record in records:
        digest = record_digest(record, payload_digest(record.payload)) if owns_group(record) else 0
        recount.shift(record, digest, 1)
    for name, counted in vars(recount).items():
        if vars(kept)[name] != counted:
            raise Conservation(
                f"the ledger's {name} is kept as {vars(kept)[name]} and counts {counted}"
            )


def check_places(records: Mapping[int, LedgerRecord], holders: Collection[Hashable]) -> None:
    """Every admitted prompt holds a place, and no prompt that is gone does.

    Raises:
        Conservation: naming the first prompt without a place, or place without a prompt.
    """
    for record in records.values():
        if record.admitted and record.ordinal not in holders:
            raise Conservation(f"prompt {record.ordinal} is {record.state} and holds no place")
    for holder in holders:
        if holder not in records:
            raise Conservation(f"a place is held for {holder!r}, which is no live prompt")
