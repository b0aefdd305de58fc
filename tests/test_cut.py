from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from datetime import UTC
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from sc_core.cut import check_cut, cut_digest, decode_cut, encode_cut
from sc_core.digest import MODULUS, group_digest, payload_digest, record_digest
from sc_core.errors import BundleInconsistent, RestoreError, SaveError
from sc_core.records import Cut, Evaluation, Group, LedgerRecord, group_id, sample_ids

G = 2


def record(ordinal: int, **fields: Any) -> LedgerRecord:
    sound: dict[str, Any] = {"state": "committed", "admitted": True, "start_weight_version": 4}
    return LedgerRecord(ordinal=ordinal, payload=["prompt", ordinal], **(sound | fields))


def group(ordinal: int, **fields: Any) -> Group:
    name = group_id(ordinal, 0)
    sound: dict[str, Any] = {
        "start_weight_version": 4,
        "end_weight_version": 5,
        "commit_seq": ordinal,
        "sample_ids": sample_ids(name, G),
    }
    return Group(group_id=name, ordinal=ordinal, **(sound | fields))


def a_cut(**fields: Any) -> Cut:
    """Version 5: prompts 0 to 2 are gone, 3 waits, 4 is in flight, 5 committed, 6 selected."""
    sound: dict[str, Any] = {
        "incarnation": "one",
        "event_seq": 40,
        "step": 5,
        "weight_version": 5,
        "group_size": G,
        "prompts_per_step": 2,
        "next_ordinal": 7,
        "position": {"epoch": 0, "index": 7},
        "records": (
            record(3, state="waiting", admitted=False, start_weight_version=None),
            record(4, state="in_flight", target_step=6),
            record(5, target_step=5),
            record(6, state="selected", target_step=5),
        ),
        "groups": (group(5, target_step=5), group(6, target_step=5)),
        "sampler": "in_order",
        "suspects": ("4.0_g1",),
        "counters": {"trained": 2, "dropped": 1},
    }
    return Cut(**(sound | fields))


RECORDS, GROUPS = a_cut().records, a_cut().groups


def with_record(at: int, **fields: Any) -> Cut:
    changed = replace(RECORDS[at], **fields)
    return a_cut(records=(*RECORDS[:at], changed, *RECORDS[at + 1 :]))


def with_group(at: int, **fields: Any) -> Cut:
    return a_cut(groups=(*GROUPS[:at], replace(GROUPS[at], **fields), *GROUPS[at + 1 :]))


# bytes


def test_a_cut_survives_the_disk() -> None:
    assert decode_cut(encode_cut(a_cut())) == a_cut()


def test_a_field_added_since_has_its_default() -> None:
    older = msgspec.msgpack.decode(encode_cut(a_cut()))
    assert "short_steps" not in older  # left out, so that bundles from before it keep their digest
    del older["suspects"], older["exhausted"]
    # a default is not written, so a record without the field has the same digest
    assert "finished" not in older["records"][0] and "tokens" not in older["groups"][0]
    assert decode_cut(msgspec.msgpack.encode(older)) == a_cut(suspects=())


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        encode_cut(a_cut())[:-1],
        encode_cut(a_cut()) + b"\x00",
        encode_cut(a_cut()).replace(b"cut.v1", b"cut.v9"),
        encode_cut(a_cut()).replace(b"in_flight", b"in_fleght"),
        msgspec.msgpack.encode({"type": "cut.v1"}),
        pickle.dumps({"type": "cut.v1"}),
        b"\x91" * 1_000_000,
        b"\xdd\xff\xff\xff\xff" * 1000,
    ],
    ids=["empty", "torn", "longer", "tag", "state", "fields", "pickle", "deep", "huge"],
)
def test_what_is_no_cut_is_refused(raw: bytes) -> None:
    with pytest.raises(RestoreError, match="the cut is unreadable: "):
        decode_cut(raw)


@pytest.mark.parametrize("place", [b"\xa8position", b"\xa7payload"])
def test_a_document_too_deep_for_the_stack_is_refused(place: bytes) -> None:
    raw = encode_cut(a_cut(position=None, records=(replace(RECORDS[0], payload=None),)))
    assert raw.count(place + b"\xc0") == 1
    deep = raw.replace(place + b"\xc0", place + b"\x91" * 200_000 + b"\xc0")
    with pytest.raises(RestoreError, match="recursion"):
        decode_cut(deep)


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 100))
def test_any_bytes_give_a_cut_or_a_restore_error(noise: bytes, at: int, gone: int) -> None:
    raw = encode_cut(a_cut())
    try:
        assert isinstance(decode_cut(raw[:at] + noise + raw[at + gone :]), Cut)
    except RestoreError as exc:
        assert "unreadable" in str(exc)


@pytest.mark.parametrize("position", [object(), 1 << 70, "\ud800"], ids=["type", "int", "text"])
def test_a_position_that_msgpack_cannot_hold_is_named(position: Any) -> None:
    for call in (encode_cut, cut_digest):
        with pytest.raises(SaveError, match="can't be encoded as msgpack"):
            call(a_cut(position=position))


# digests


def sha256(value: Any) -> int:
    return int.from_bytes(hashlib.sha256(msgspec.msgpack.encode(value)).digest(), "big")


def test_the_digest_as_documented() -> None:
    cut = a_cut()
    whole = hashlib.sha256(encode_cut(replace(cut, records=(), groups=())))
    records = sum(
        sha256(
            replace(
                r,
                payload=sha256(r.payload).to_bytes(32, "big"),
                state="committed" if r.state == "selected" else r.state,
            )
        )
        for r in cut.records
    )
    for count, total in ((2, sum(map(sha256, cut.groups))), (4, records)):
        whole.update(count.to_bytes(8, "big") + (total % 2**256).to_bytes(32, "big"))
    assert cut_digest(cut) == whole.hexdigest()


def test_the_digest_from_kept_sums_is_that_of_the_cut() -> None:
    cut = a_cut()
    groups = sum(map(group_digest, cut.groups)) % MODULUS
    records = sum(record_digest(r, payload_digest(r.payload)) for r in cut.records[2:]) % MODULUS
    whole = cut_digest(cut)
    assert cut_digest(cut, groups_digest=groups) == whole
    assert cut_digest(cut, records_digest=records) == whole
    assert cut_digest(cut, groups_digest=groups, records_digest=records) == whole
    assert cut_digest(cut, groups_digest=groups + 1) != whole
    assert cut_digest(cut, records_digest=records + 1) != whole


CHANGES: list[dict[str, Any]] = [
    {"incarnation": "two"},
    {"event_seq": 41},
    {"step": 6},
    {"weight_version": 6},
    {"group_size": 3},
    {"prompts_per_step": 3},
    {"next_ordinal": 8},
    {"position": {"epoch": 0, "index": 8}},
    {"exhausted": True},
    {"source_fingerprint": "f"},
    {"records": RECORDS[1:]},
    {"records": (replace(RECORDS[0], payload=["prompt", 0]), *RECORDS[1:])},
    {"records": (replace(RECORDS[0], attempt=1), *RECORDS[1:])},
    {"groups": GROUPS[1:]},
    {"groups": (replace(GROUPS[0], reward=0.5), *GROUPS[1:])},
    {"sampler": "windowed"},
    {"sampler_state": {"cursor": 1}},
    {"suspects": ()},
    {"counters": {"trained": 1, "dropped": 2}},
    {"evaluation": Evaluation(weight_version=5, fingerprint="f", prompts=4)},
    {"short_steps": {6: 1}},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "".join(change))
def test_the_digest_covers(change: dict[str, Any]) -> None:
    assert cut_digest(a_cut(**change)) != cut_digest(a_cut())


def test_every_field_is_covered_by_a_case() -> None:
    assert {name for change in CHANGES for name in change} == set(Cut.__struct_fields__)


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
    | st.binary() | st.datetimes(timezones=st.just(UTC)),
    lambda inner: st.lists(inner) | st.tuples(inner, inner)
    | st.dictionaries(st.text() | st.integers(0, 9), inner),
    max_leaves=8,
)  # fmt: skip


@given(payload=JSON_LIKE, position=JSON_LIKE)
def test_the_digest_is_the_same_after_the_disk(payload: Any, position: Any) -> None:
    cut = a_cut(position=position, records=(replace(RECORDS[0], payload=payload), *RECORDS[1:]))
    assert cut_digest(decode_cut(encode_cut(cut))) == cut_digest(cut)


# contradictions


def test_a_sound_cut_passes() -> None:
    check_cut(a_cut())
    check_cut(a_cut(records=(), groups=(), next_ordinal=3))
    check_cut(a_cut(short_steps={5: 1, 9: 1}))


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (
            lambda: a_cut(records=(*RECORDS, RECORDS[3])),
            "the record of prompt 6 comes after that of prompt 6",
        ),
        (
            lambda: a_cut(records=RECORDS[::-1]),
            "the record of prompt 5 comes after that of prompt 6",
        ),
        (
            lambda: a_cut(next_ordinal=6, counters={"trained": 2}),
            "prompt 6 has a record, but the next to be pulled is 6",
        ),
        (
            lambda: a_cut(counters={"trained": 1, "dropped": 1}),
            "7 prompts have left the source, but 4 are live, 1 were trained and 1 dropped",
        ),
        (
            lambda: with_record(1, start_weight_version=6),
            "prompt 4 started at weight version 6, but the cut is of version 5",
        ),
        (lambda: with_record(1, start_weight_version=-1), "prompt 4 started at weight version -1"),
        (lambda: with_record(1, start_weight_version=None), "in_flight with start version None"),
        (lambda: with_record(2, admitted=False), "prompt 5 is committed with start version 4 and"),
        (lambda: with_record(1, target_step=-1), "prompt 4 has target step -1, below 0"),
        (
            lambda: a_cut(short_steps={4: 1}),
            "step from weight version 4 goes without 1 groups, and the cut is of version 5",
        ),
        (
            lambda: a_cut(short_steps={5: 0}),
            "step from weight version 5 goes without 0 groups, and the cut is of version 5",
        ),
        (
            lambda: with_record(2, state="in_flight"),
            "group 5.0 of prompt 5 has no committed record of its own",
        ),
        (
            lambda: a_cut(groups=(*GROUPS, replace(GROUPS[0], commit_seq=9))),
            "group 5.0 of prompt 5 has no committed record of its own",
        ),
        (
            lambda: a_cut(groups=GROUPS[1:]),
            "prompt 5 is committed, but the index does not have its group 5.0",
        ),
        (
            lambda: with_record(3, state="committed", attempt=1),
            r"prompt 6: group, start version and target step are \('6.0', 4, 5\) in the index"
            r" and \('6.1', 4, 5\) in the ledger",
        ),
        (lambda: with_group(0, start_weight_version=3), r"\('5.0', 3, 5\) in the index and"),
        (lambda: with_group(0, target_step=6), r"\('5.0', 4, 6\) in the index and"),
        (
            lambda: with_group(0, end_weight_version=6),
            "from weight version 4 to 6, but the cut is of version 5",
        ),
        (
            lambda: with_group(0, end_weight_version=3),
            "from weight version 4 to 3, but the cut is of version 5",
        ),
        (
            lambda: with_group(1, commit_seq=5),
            "group 6.0 with commit number 5 comes after number 5",
        ),
        (lambda: a_cut(group_size=8), "group 5.0 has 2 rows, not 8"),
        (lambda: with_group(1, sample_ids=("6.0_g0",)), "group 6.0 has 1 rows, not 2"),
        (
            lambda: with_group(1, sample_ids=("6.0_g0", "5.0_g1")),
            "row 5.0_g1 belongs to group 5.0 and to group 6.0",
        ),
        (
            lambda: with_group(1, sample_ids=("6.0_g0", "6.0_g0")),
            "row 6.0_g0 belongs to group 6.0 and to group 6.0",
        ),
        (
            lambda: a_cut(suspects=("6.0_g1",)),
            "row 6.0_g1 is to be cleared as suspect, but belongs to group 6.0",
        ),
        (
            lambda: with_record(1, target_step=5),
            "in_order: 3 live groups have target step 5, and a step takes 2",
        ),
    ],
)
def test_a_contradiction_is_refused_with_both_sides(cut: Callable[[], Cut], message: str) -> None:
    with pytest.raises(BundleInconsistent, match=message):
        check_cut(cut())


def test_targets_bind_in_order_alone_and_admitted_groups_alone() -> None:
    check_cut(replace(with_record(1, target_step=5), sampler="windowed"))
    unadmitted = {"state": "waiting", "admitted": False, "target_step": 5}
    check_cut(with_record(1, **unadmitted))
    check_cut(with_record(1, target_step=None))  # requeued: it has yet to get one
