"""The cut on disk: its bytes, its digest, and what it must not contradict.

A cut may hold 10,000 groups, and a call into msgspec keeps the interpreter to itself, and so the
event loop from going on, also from another thread. So what is done while a run goes on takes
records and groups one by one.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from sc_core.digest import MODULUS, group_digest, payload_digest, record_digest
from sc_core.errors import BundleInconsistent, RestoreError, SaveError
from sc_core.records import Cut, Evaluation, Group, LedgerRecord, owns_group

_decoder = msgspec.msgpack.Decoder(Cut)
_group_decoder = msgspec.msgpack.Decoder(Group)
_record_decoder = msgspec.msgpack.Decoder(LedgerRecord)
_encode = msgspec.msgpack.Encoder().encode
_MANY = ("records", "groups")  #: the fields that grow with the run
_ADDED = ("short_steps", "evaluation")  #: since v1; left out while empty, so old digests stay


def encode_cut(cut: Cut) -> bytes:
    """The cut as msgpack.

    Raises:
        SaveError: a payload, the position or the sampler's state is nothing msgpack can hold.
    """
    whole: dict[str, Any] = {"type": Cut.__struct_config__.tag}
    try:
        for name in Cut.__struct_fields__:
            if name not in _ADDED or getattr(cut, name):
                whole[name] = getattr(cut, name)
        for name in _MANY:
            whole[name] = [msgspec.Raw(_encode(one)) for one in whole[name]]
        return _encode(whole)
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise SaveError(f"the cut can't be encoded as msgpack: {exc}") from exc


def decode_cut(raw: bytes) -> Cut:
    """Read what `encode_cut` wrote, or an older version of it.

    Memory stays within a small multiple of `raw`, and nesting within the interpreter's limit.

    Raises:
        RestoreError: the bytes are no cut that this version understands.
    """
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise RestoreError(f"the cut is unreadable: {exc}") from exc


def digest_of_encoded(raw: bytes) -> str:
    """The `cut_digest` of what `encode_cut` wrote, having decoded all of it again.

    Raises:
        RestoreError: the bytes are no cut that this version understands.
    """
    try:
        fields = msgspec.msgpack.decode(raw, type=dict[str, msgspec.Raw])
        many = {
            name: msgspec.msgpack.decode(fields.pop(name), type=tuple[msgspec.Raw, ...])
            for name in _MANY
        }
        rest = _decoder.decode(_encode(fields))
        groups = records = 0
        for one in many["groups"]:
            groups += group_digest(_group_decoder.decode(one))
        for one in many["records"]:
            records += _record_digest(_record_decoder.decode(one))
    except (KeyError, msgspec.DecodeError, RecursionError) as exc:
        raise RestoreError(f"the cut is unreadable: {exc}") from exc
    sums = (len(many["groups"]), groups % MODULUS), (len(many["records"]), records % MODULUS)
    return _digest(rest, sums)


def cut_digest(
    cut: Cut, *, groups_digest: int | None = None, records_digest: int | None = None
) -> str:
    """SHA-256 over everything in the cut, in hex.

    Groups and records enter as the sums described in `sc_core.digest`. Ledger and index keep
    up those of the groups and of the records that have one (`ledger.index.digest`,
    `ledger.digest`): given them, as of the instant of the cut, only records without a group are
    hashed here. Left out, they are computed from the cut; the result is the same.

    Raises:
        SaveError: as `encode_cut`.
    """
    if groups_digest is None:
        groups_digest = sum(map(group_digest, cut.groups)) % MODULUS
    hashed = [r for r in cut.records if records_digest is None or not owns_group(r)]
    records_digest = ((records_digest or 0) + sum(map(_record_digest, hashed))) % MODULUS
    sums = (len(cut.groups), groups_digest), (len(cut.records), records_digest)
    return _digest(msgspec.structs.replace(cut, records=(), groups=()), sums)


def _digest(rest: Cut, sums: Iterable[tuple[int, int]]) -> str:
    whole = hashlib.sha256(encode_cut(rest))
    for count, total in sums:
        whole.update(count.to_bytes(8, "big") + total.to_bytes(32, "big"))
    return whole.hexdigest()


def _record_digest(record: LedgerRecord) -> int:
    return record_digest(record, payload_digest(record.payload))


def check_cut(cut: Cut) -> None:
    """Refuse a cut whose parts contradict each other.

    Raises:
        BundleInconsistent: naming the first contradiction, with both sides of it.
    """
    _check_records(cut)
    _check_groups(cut)
    _check_rows(cut)
    if cut.evaluation is not None:
        _check_evaluation(cut.evaluation, cut)
    if cut.sampler == "in_order":
        _check_targets(cut)
    for version, short in cut.short_steps.items():
        if version < cut.weight_version or short < 1:
            raise BundleInconsistent(
                f"ledger: the step from weight version {version} goes without {short} groups, and"
                f" the cut is of version {cut.weight_version}"
            )


def _check_records(cut: Cut) -> None:
    last = -1
    for record in cut.records:
        if record.ordinal <= last:
            raise BundleInconsistent(
                f"ledger: the record of prompt {record.ordinal} comes after that of prompt {last};"
                " each prompt has one record, in ascending order"
            )
        last = record.ordinal
        _check_record(record, cut)
    if last >= cut.next_ordinal:
        raise BundleInconsistent(
            f"ledger: prompt {last} has a record, but the next to be pulled is {cut.next_ordinal}"
        )
    trained, dropped = cut.counters.get("trained", 0), cut.counters.get("dropped", 0)
    if len(cut.records) + trained + dropped != cut.next_ordinal:
        raise BundleInconsistent(
            f"ledger: {cut.next_ordinal} prompts have left the source, but {len(cut.records)} are"
            f" live, {trained} were trained and {dropped} dropped"
        )


def _check_record(record: LedgerRecord, cut: Cut) -> None:
    version = record.start_weight_version
    if record.state != "waiting" and (version is None or not record.admitted):
        raise BundleInconsistent(
            f"ledger: prompt {record.ordinal} is {record.state} with start version {version}"
            f" and admitted={record.admitted}"
        )
    if version is not None and not 0 <= version <= cut.weight_version:
        raise BundleInconsistent(
            f"ledger: prompt {record.ordinal} started at weight version {version}, but the cut is"
            f" of version {cut.weight_version}"
        )
    if record.target_step is not None and record.target_step < 0:
        raise BundleInconsistent(
            f"ledger: prompt {record.ordinal} has target step {record.target_step}, below 0"
        )
    if record.finished:
        _check_finished(record, cut)


def _check_finished(record: LedgerRecord, cut: Cut) -> None:
    start = record.start_weight_version
    if start is None or owns_group(record):
        raise BundleInconsistent(
            f"ledger: prompt {record.ordinal} is {record.state} with start version {start} and"
            " keeps finished siblings"
        )
    siblings = [one.sibling for one in record.finished]
    if siblings != sorted(set(siblings)) or not 0 <= siblings[0] <= siblings[-1] < cut.group_size:
        raise BundleInconsistent(
            f"ledger: prompt {record.ordinal} has finished siblings {siblings}; they are distinct,"
            f" ascending and below {cut.group_size}"
        )
    for one in record.finished:
        if not start <= one.end_weight_version <= cut.weight_version:
            raise BundleInconsistent(
                f"ledger: sibling {one.sibling} of prompt {record.ordinal} ended at weight version"
                f" {one.end_weight_version}, not between its group's start at {start} and"
                f" {cut.weight_version}"
            )


def _check_groups(cut: Cut) -> None:
    owners = {r.ordinal: r for r in cut.records if owns_group(r)}
    last = -1
    for group in cut.groups:
        record = owners.pop(group.ordinal, None)
        if record is None:
            raise BundleInconsistent(
                f"index: group {group.group_id} of prompt {group.ordinal} has no committed record"
                " of its own in the ledger"
            )
        mine = (group.group_id, group.start_weight_version, group.target_step)
        its = (record.group_id, record.start_weight_version, record.target_step)
        if mine != its:
            raise BundleInconsistent(
                f"prompt {group.ordinal}: group, start version and target step are {mine} in the"
                f" index and {its} in the ledger"
            )
        if not group.start_weight_version <= group.end_weight_version <= cut.weight_version:
            raise BundleInconsistent(
                f"index: group {group.group_id} was generated from weight version"
                f" {group.start_weight_version} to {group.end_weight_version}, but the cut is of"
                f" version {cut.weight_version}"
            )
        if group.commit_seq <= last:
            raise BundleInconsistent(
                f"index: group {group.group_id} with commit number {group.commit_seq} comes after"
                f" number {last}"
            )
        last = group.commit_seq
    for ordinal, record in owners.items():
        raise BundleInconsistent(
            f"ledger: prompt {ordinal} is {record.state}, but the index does not have its group"
            f" {record.group_id}"
        )


def _check_rows(cut: Cut) -> None:
    owner: dict[str, str] = {}
    for record in cut.records:
        for one in record.finished:
            if one.sample_id in owner:
                raise BundleInconsistent(
                    f"ledger: row {one.sample_id} belongs to {owner[one.sample_id]} and to prompt"
                    f" {record.ordinal}"
                )
            owner[one.sample_id] = f"prompt {record.ordinal}"
    for group in cut.groups:
        if len(group.sample_ids) != cut.group_size:
            raise BundleInconsistent(
                f"index: group {group.group_id} has {len(group.sample_ids)} rows, not"
                f" {cut.group_size}"
            )
        if group.masked:
            _check_masked(group)
        for row in group.sample_ids:
            if row in owner:
                raise BundleInconsistent(
                    f"index: row {row} belongs to {owner[row]} and to group {group.group_id}"
                )
            owner[row] = f"group {group.group_id}"
    for row in cut.suspects:
        if row in owner:
            raise BundleInconsistent(
                f"row {row} is to be cleared as suspect, but belongs to {owner[row]}"
            )


def _check_masked(group: Group) -> None:
    masked, siblings = list(group.masked), len(group.sample_ids)
    if masked != sorted(set(masked)) or not 0 <= masked[0] <= masked[-1] < siblings:
        raise BundleInconsistent(
            f"index: group {group.group_id} has masked siblings {masked}; they are distinct,"
            f" ascending and below {siblings}"
        )


def _check_evaluation(evaluation: Evaluation, cut: Cut) -> None:
    version, unfinished = evaluation.weight_version, evaluation.summary is None
    if not 0 <= version <= cut.weight_version or (unfinished and version < cut.weight_version):
        raise BundleInconsistent(
            f"evaluation: it is {'under way' if unfinished else 'finished'} at weight version"
            f" {version}, but the cut is of version {cut.weight_version}"
        )
    numbers = sorted(result.number for result in evaluation.results)
    if len(set(numbers)) < len(numbers) or not all(0 <= n < evaluation.prompts for n in numbers):
        raise BundleInconsistent(
            f"evaluation: it has results of the prompts {numbers}; they are distinct and below"
            f" {evaluation.prompts}"
        )


def _check_targets(cut: Cut) -> None:
    live: Iterable[int] = (
        r.target_step for r in cut.records if r.admitted and r.target_step is not None
    )
    for target, count in sorted(Counter(live).items()):
        if count > cut.prompts_per_step:
            raise BundleInconsistent(
                f"in_order: {count} live groups have target step {target}, and a step takes"
                f" {cut.prompts_per_step}"
            )
