"""Small, valid bundles for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sc_core.bundle import BundleStore, Staged
from sc_core.cut import cut_digest
from sc_core.disk import LOCAL
from sc_core.manifest import MANIFEST, FileSeal, open_manifest, seal_manifest
from sc_core.records import Cut, Group, LedgerRecord, group_id, sample_ids

NOW = 1_700_000_000.0
FILES = {
    "policy/weights.bin": b"weights of step ",
    "policy/tokenizer/vocab.json": b"tokens of step ",
    "data_plane/metadata.json": b"metadata of step ",
    "data_plane/storage/su_0.bin": b"rows of step ",
}
WRITTEN = [
    *FILES,
    "train_dataloader.msgpack",
    "replay_buffer_metadata.msgpack",
    "training_info.json",
    "config.yaml",
    "MANIFEST.json",
]


def make_cut(step: int = 4, incarnation: str = "first", payload: Any = "what is 2 + 3?") -> Cut:
    """Two prompts per step were trained; one is waiting, one in flight, one committed."""
    done = 2 * step
    committed = group_id(done + 2, 0)
    live = {"admitted": True, "start_weight_version": step}
    return Cut(
        incarnation=incarnation,
        event_seq=10 * step,
        step=step,
        weight_version=step,
        group_size=2,
        prompts_per_step=2,
        next_ordinal=done + 3,
        position={"epoch": 0, "at": done + 3},
        source_fingerprint="prompts-v1",
        records=(
            LedgerRecord(ordinal=done, payload=payload),
            LedgerRecord(ordinal=done + 1, payload=payload, state="in_flight", **live),
            LedgerRecord(ordinal=done + 2, payload=payload, state="committed", **live),
        ),
        groups=(
            Group(
                group_id=committed,
                ordinal=done + 2,
                sample_ids=sample_ids(committed, 2),
                start_weight_version=step,
                end_weight_version=step,
                commit_seq=done + 2,
            ),
        ),
        sampler="windowed",
        counters={"trained": done, "dropped": 0},
    )


def fill(store: BundleStore, step: int, incarnation: str = "first") -> Staged:
    """Stage a step and write what trainer and data plane would."""
    staged = store.stage(step)
    store.disk.make_dir(staged.data_plane_dir)
    store.disk.make_dir(staged.data_plane_dir / "storage")
    store.disk.make_dir(staged.policy_dir / "tokenizer")
    for name, content in FILES.items():
        store.disk.write(staged.path / name, content + f"{step} {incarnation}".encode())
    return staged


def save(
    store: BundleStore,
    step: int,
    incarnation: str = "first",
    metrics: Mapping[str, float] | None = None,
) -> Path:
    """Write and publish one bundle."""
    staged = fill(store, step, incarnation)
    cut = make_cut(step, incarnation)
    settings = {"grpo": {"seed": 0}}
    return store.publish(
        staged, cut=cut, digest=cut_digest(cut), config=settings, metrics=metrics or {}
    )


def reseal(bundle: Path, key: bytes | None = None, **changes: Any) -> None:
    """Make the manifest of an altered bundle agree with its files again, as an attacker could."""
    old = open_manifest((bundle / MANIFEST).read_bytes(), None, bundle.name)
    if "files" not in changes:
        changes["files"] = {
            file.relative_to(bundle).as_posix(): FileSeal(*LOCAL.sha256(file))
            for file in bundle.rglob("*")
            if file.is_file() and file.name != MANIFEST
        }
    manifest = msgspec.structs.replace(old, **changes)
    (bundle / MANIFEST).write_bytes(seal_manifest(manifest, key))
