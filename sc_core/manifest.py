"""What a bundle looks like on disk: names, limits, and the manifest that vouches for the rest.

step_N/
    policy/                           the trainer's files
    data_plane/                       the data plane's snapshot
    train_dataloader.msgpack          position and fingerprint of the prompt source
    replay_buffer_metadata.msgpack    the cut
    training_info.json                what the bundle is of, for people and retention
    config.yaml                       the run's settings, as JSON (which YAML 1.2 contains)
    MANIFEST.json                     size and SHA-256 of all of these; written last
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from sc_core.errors import BundleDamaged, RestoreError
from sc_core.records import Cut

POLICY = "policy"
DATA_PLANE = "data_plane"
POSITION = "train_dataloader.msgpack"
CUT = "replay_buffer_metadata.msgpack"
INFO = "training_info.json"
CONFIG = "config.yaml"
MANIFEST = "MANIFEST.json"

AT_MOST_BYTES: Mapping[str, int] = {
    CUT: 256 << 20,
    POSITION: 64 << 20,
    INFO: 4 << 20,
    CONFIG: 4 << 20,
    MANIFEST: 64 << 20,
}
"""Files that are decoded, and the most of each that is read into memory. A save obeys the same
limits. The cut's leaves room for 10,000 live prompts with payloads of 25 kB."""
MAX_FILES = 100_000  #: in one bundle
MAX_PATH_DEPTH = 32  #: directories inside one another
MAX_NESTING = 64  #: containers inside one another, in a payload, a position or the settings

STAGED = "tmp_step_"  #: being written, or left by a crash; never read
ASIDE = "old_step_"  #: replaced by a newer bundle of the same step, unless a crash came between
TRASH = "trash_step_"  #: no longer a bundle; being deleted

_STEP = re.compile(r"((?:tmp_|old_|trash_)?step_)(0|[1-9][0-9]{0,17})")


def bundle_name(step: int) -> str:
    return f"step_{step}"


def parse_name(name: str) -> tuple[str, int] | None:
    """The prefix and step of a name that sc_core gave; None for a foreign one.

    Stricter than `int`, which takes `٣`, `1_0`, ` 7` and `0010` for numbers.
    """
    match = _STEP.fullmatch(name)
    return (match[1], int(match[2])) if match else None


Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  #: JSON has integers of any size


class FileSeal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: Count  #: bytes
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: str = "bundle.v1"
    step: Count
    weight_version: Count
    cut_digest: str
    files: dict[str, FileSeal]  #: by path inside the bundle, with `/`

    @property
    def total_bytes(self) -> int:
        return sum(seal.size for seal in self.files.values())


class TrainingInfo(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = "training_info.v1"
    step: Count
    weight_version: Count
    group_size: Count
    prompts_per_step: Count
    incarnation: str
    event_seq: Count
    created: float  #: seconds since the epoch
    counters: dict[str, Count] = {}
    metrics: dict[str, float | None] = {}  #: of the step; None: not a finite number
    ft_only: bool = False  #: saved to go on from, and for nothing else: `keep_top_k` passes it over


class SavedPosition(msgspec.Struct, frozen=True, kw_only=True, tag="position.v1"):
    position: Any
    fingerprint: str
    next_ordinal: int
    exhausted: bool


def training_info(
    cut: Cut, *, created: float, metrics: Mapping[str, float | None], ft_only: bool
) -> TrainingInfo:
    return TrainingInfo(
        step=cut.step,
        weight_version=cut.weight_version,
        group_size=cut.group_size,
        prompts_per_step=cut.prompts_per_step,
        incarnation=cut.incarnation,
        event_seq=cut.event_seq,
        created=created,
        counters=dict(cut.counters),
        metrics=dict(metrics),
        ft_only=ft_only,
    )


def saved_position(cut: Cut) -> SavedPosition:
    return SavedPosition(
        position=cut.position,
        fingerprint=cut.source_fingerprint,
        next_ordinal=cut.next_ordinal,
        exhausted=cut.exhausted,
    )


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file itself. The manifest is signed and hashed as the bytes that stand here."""

    manifest: msgspec.Raw
    hmac_sha256: str | None
    sha256: str  #: of the manifest followed by the signature


class _Schema(msgspec.Struct, frozen=True):
    schema: str


def seal_manifest(manifest: Manifest, key: bytes | None) -> bytes:
    """The content of `MANIFEST.json`, signed if there is a key."""
    body = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    signature = _sign(body, key) if key is not None else None
    return msgspec.json.encode(_Sealed(msgspec.Raw(body), signature, _digest(body, signature)))


def open_manifest(raw: bytes, key: bytes | None, bundle: str) -> Manifest:
    """Check and decode the content of `MANIFEST.json`.

    Raises:
        BundleDamaged: altered, or not signed by `key` although one is given.
        RestoreError: intact, and of a schema that this version does not read.
    """

    def damaged(reason: str) -> BundleDamaged:
        return BundleDamaged(bundle, MANIFEST, reason)

    try:
        sealed = msgspec.json.decode(raw, type=_Sealed)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise damaged(f"not a manifest: {exc}") from exc
    body = bytes(sealed.manifest)
    if key is not None:
        if sealed.hmac_sha256 is None:
            raise damaged("is not signed, and SC_BUNDLE_KEY asks for a signature")
        if not hmac.compare_digest(sealed.hmac_sha256.encode(), _sign(body, key).encode()):
            raise damaged("its signature does not belong to SC_BUNDLE_KEY")
    same = sealed.sha256 == _digest(body, sealed.hmac_sha256)
    if not same or msgspec.json.encode(sealed) != raw:
        raise damaged("altered: it differs from its own digest")
    try:
        schema = msgspec.json.decode(body, type=_Schema).schema
        if schema != "bundle.v1":
            raise RestoreError(
                f"{bundle} has schema {schema} and this version reads bundle.v1; resume it with"
                " the version that wrote it, or move it away"
            )
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise damaged(f"not a manifest: {exc}") from exc
    try:
        json.loads(body, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as exc:
        raise damaged(f"not a manifest: {exc}") from exc
    return manifest


def _each_once(pairs: Sequence[tuple[str, object]]) -> None:
    """Readers differ on which of two equal names counts, so there must be none."""
    names = {name for name, _ in pairs}
    if len(names) < len(pairs):
        raise ValueError("a name comes twice")


def is_inside(name: str) -> bool:
    """Whether a path from a manifest stays inside the bundle: no `..`, not absolute."""
    return "\0" not in name and all(part not in ("", ".", "..") for part in name.split("/"))


def cut_nests_too_deeply(cut: Cut) -> bool:
    """`nests_too_deeply` for the parts of a cut that may be anything."""
    parts = [cut.position, cut.sampler_state, *(record.payload for record in cut.records)]
    return any(map(nests_too_deeply, parts))


def nests_too_deeply(value: Any) -> bool:
    """Whether plain data has more than `MAX_NESTING` containers inside one another."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        level = [one for one in level if isinstance(one, Mapping | list | tuple)]
        if not level:
            return False
        level = [x for one in level for x in (one.values() if isinstance(one, Mapping) else one)]
    return True


def _digest(body: bytes, signature: str | None) -> str:
    return hashlib.sha256(body + (signature or "").encode()).hexdigest()


def _sign(body: bytes, key: bytes) -> str:
    return hmac.new(key, body, "sha256").hexdigest()
