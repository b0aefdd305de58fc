"""Reads bundles and believes nothing: what comes out has been checked against its manifest.

Nothing is written and nothing is unpickled. Files for the trainer and the data plane are
hashed, not opened; those that are decoded are decoded from the very bytes that were hashed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
from msgspec.structs import asdict

from sc_core.cut import check_cut, cut_digest, decode_cut
from sc_core.disk import LOCAL, Disk
from sc_core.errors import (
    BundleDamaged,
    BundleInconsistent,
    NoValidBundle,
    RestoreError,
    RestoreOrderError,
)
from sc_core.manifest import (
    ASIDE,
    AT_MOST_BYTES,
    CONFIG,
    CUT,
    DATA_PLANE,
    INFO,
    MANIFEST,
    MAX_FILES,
    MAX_NESTING,
    MAX_PATH_DEPTH,
    POLICY,
    POSITION,
    Manifest,
    SavedPosition,
    TrainingInfo,
    cut_nests_too_deeply,
    is_inside,
    nests_too_deeply,
    open_manifest,
    parse_name,
    saved_position,
    training_info,
)
from sc_core.records import Cut

logger = logging.getLogger(__name__)

T = TypeVar("T")
Refused = Callable[[str, RestoreError], None]

_PROOF = object()


class VerifiedBundle:
    """A bundle whose every file is what its manifest says. Only `verify` makes one.

    It is proof for this process: it can be neither copied nor pickled.
    """

    __slots__ = (
        "config",
        "cut",
        "data_plane_dir",
        "digest",
        "info",
        "manifest",
        "path",
        "policy_dir",
        "step",
    )

    path: Path  #: `step_N`, without symbolic links
    step: int  #: finished training steps
    manifest: Manifest  #: size and hash of every file
    cut: Cut  #: the controller's memory
    digest: str  #: of the cut
    info: TrainingInfo  #: metrics, and when and how it was saved
    config: Mapping[str, Any]  #: the settings of the run that wrote it
    policy_dir: Path  #: what `Trainer.load` gets
    data_plane_dir: Path  #: what `BootstrapDataPlane.load_checkpoint` gets

    def __init__(
        self,
        proof: object,
        path: Path,
        manifest: Manifest,
        cut: Cut,
        info: TrainingInfo,
        config: Mapping[str, Any],
    ) -> None:
        if proof is not _PROOF:
            raise RestoreOrderError("a VerifiedBundle comes from verify() or newest_valid() only")
        self.path = path
        self.step = manifest.step
        self.manifest = manifest
        self.cut = cut
        self.digest = manifest.cut_digest
        self.info = info
        self.config = config
        self.policy_dir = path / POLICY
        self.data_plane_dir = path / DATA_PLANE

    def __repr__(self) -> str:
        return f"<VerifiedBundle {self.path} {self.digest[:12]}>"

    def __reduce__(self) -> NoReturn:
        raise RestoreOrderError("a VerifiedBundle proves nothing elsewhere: verify it there")


def candidates(directory: Path, disk: Disk = LOCAL) -> list[Path]:
    """Directories that are named like bundles, newest first.

    One that was moved aside counts if its `step_N` is missing. Anything else is ignored:
    foreign names, files, symbolic links, and what was staged and never published.

    Raises:
        RestoreError: the directory can't be listed. One that does not exist is empty.
    """
    directory = disk.real(directory)
    try:
        kinds = disk.entries(directory)
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise RestoreError(f"{directory} can't be listed: {exc.strerror or exc}") from exc
    found: dict[int, str] = {}
    for name, kind in kinds.items():
        prefix, step = parse_name(name) or ("", 0)
        if kind == "dir" and prefix in ("step_", ASIDE):
            found[step] = name if prefix == "step_" else found.get(step, name)
    return [directory / found[step] for step in sorted(found, reverse=True)]


def newest_valid(
    directory: Path,
    disk: Disk = LOCAL,
    *,
    key: bytes | None = None,
    on_refused: Refused | None = None,
    refused: Mapping[str, RestoreError] = {},
) -> VerifiedBundle | None:
    """The newest bundle that is intact, or None if there is no bundle at all.

    A damaged one is skipped; `on_refused` hears its name and why (the default logs it). So is
    one that the caller has `refused` before, by name and reason.

    Raises:
        NoValidBundle: there are bundles, all damaged; says why for each.
        BundleInconsistent: an intact one contradicts itself.
        RestoreError: an intact one is of a schema that this version does not read.
    """
    reasons = []
    for path in candidates(directory, disk):
        if path.name in refused:
            reasons.append(str(refused[path.name]))
            continue
        try:
            return verify(path, disk, key=key)
        except BundleDamaged as exc:
            reasons.append(str(exc))
            (on_refused or _log_refused)(path.name, exc)
    if reasons:
        raise NoValidBundle(str(directory), reasons)
    return None


def verify(path: Path, disk: Disk = LOCAL, *, key: bytes | None = None) -> VerifiedBundle:
    """Check one bundle from names to digests. Reads all of it once.

    Raises:
        BundleDamaged: a file is missing, extra, altered, unreadable or not as large as it was;
            others may write to it; the manifest is unsigned although there is a `key`.
        BundleInconsistent: all files are intact and two of them contradict each other.
        RestoreError: it is intact and of a schema that this version does not read.
    """
    path = disk.real(path.parent) / path.name if path.name else disk.real(path)
    return _Verification(path, disk, key).run()


class _Verification:
    def __init__(self, path: Path, disk: Disk, key: bytes | None) -> None:
        self._path = path
        self._disk = disk
        self._key = key

    def run(self) -> VerifiedBundle:
        prefix, step = parse_name(self._path.name) or ("", 0)
        if prefix not in ("step_", ASIDE):
            raise self._damaged(".", "it is not named like a bundle, as step_4 is")
        self._check_private(self._path.parent, "..")
        sizes: dict[str, int] = {}
        self._walk(self._path, "", sizes)
        manifest = open_manifest(self._read(MANIFEST, sizes), self._key, self._path.name)
        self._check_files(manifest, sizes)
        raw = {name: self._read(name, sizes) for name in (CUT, POSITION, INFO, CONFIG)}
        for name, seal in manifest.files.items():
            found = sha256(raw[name]).hexdigest() if name in raw else self._sha256(name)
            if found != seal.sha256:
                raise self._damaged(name, "its content has changed")
        # From here on every file is intact: what is wrong now was wrong when it was written.
        for name, (decode_schema, known) in _SCHEMAS.items():
            self._check_schema(name, known, decode_schema(raw[name]))
        cut = self._decode(CUT, raw[CUT], decode_cut)
        position = self._decode(POSITION, raw[POSITION], _decode_position)
        info = self._decode(INFO, raw[INFO], _decode_info)
        config = self._decode(CONFIG, raw[CONFIG], _decode_config)
        self._check_nesting(CUT, cut_nests_too_deeply(cut))
        self._check_nesting(POSITION, nests_too_deeply(position.position))
        self._check_nesting(CONFIG, nests_too_deeply(config))
        self._check_agreement(step, manifest, cut, position, info)
        return VerifiedBundle(_PROOF, self._path, manifest, cut, info, config)

    # files ----------------------------------------------------------------------------

    def _walk(self, path: Path, inside: str, sizes: dict[str, int]) -> None:
        """Note the size of every file; refuse what is not a private file or directory."""
        if inside.count("/") > MAX_PATH_DEPTH:
            raise self._damaged(inside, f"more than {MAX_PATH_DEPTH} directories deep")
        self._check_private(path, inside or ".")
        with self._reading(inside or "."):
            kinds = self._disk.entries(path)
        for name, kind in kinds.items():
            relative = f"{inside}{name}"
            if kind == "dir":
                self._walk(path / name, f"{relative}/", sizes)
            elif kind == "file":
                self._check_private(path / name, relative)
                with self._reading(relative):
                    sizes[relative] = self._disk.size(path / name)
            else:
                what = "a link" if kind == "link" else "a pipe, socket or device"
                raise self._damaged(relative, f"{what} where only files may be")
            if len(sizes) > MAX_FILES + 1:
                raise self._damaged(relative, f"one of more than {MAX_FILES} files")
        if not inside:
            for name in (POLICY, DATA_PLANE):
                if kinds.get(name) != "dir":
                    raise self._damaged(name, "missing")

    def _check_private(self, path: Path, relative: str) -> None:
        with self._reading(relative):
            if not self._disk.is_private(path):
                raise self._damaged(
                    relative, f"other users can change it; chown it, or run: chmod go-w {path}"
                )

    def _check_files(self, manifest: Manifest, sizes: Mapping[str, int]) -> None:
        for name in manifest.files:
            if not is_inside(name):
                raise self._damaged(MANIFEST, f"lists {name!r}, which is not inside the bundle")
        listed = {*manifest.files, MANIFEST}
        for name in sorted(listed - sizes.keys()):
            raise self._damaged(name, "missing")
        for name in sorted(sizes.keys() - listed):
            raise self._damaged(name, f"not listed in {MANIFEST}")
        for name, seal in manifest.files.items():
            if seal.size != sizes[name]:
                raise self._damaged(name, f"has {sizes[name]} bytes and had {seal.size}")

    def _read(self, name: str, sizes: Mapping[str, int]) -> bytes:
        if name not in sizes:
            raise self._damaged(name, "missing")
        with self._reading(name):
            return self._disk.read(self._path / name, AT_MOST_BYTES[name])

    def _sha256(self, name: str) -> str:
        with self._reading(name):
            return self._disk.sha256(self._path / name)[1]

    @contextmanager
    def _reading(self, relative: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as exc:
            raise self._damaged(relative, "missing") from exc
        except OSError as exc:
            raise self._damaged(relative, f"can't be read: {exc.strerror or exc}") from exc

    def _damaged(self, relative: str, reason: str) -> BundleDamaged:
        shown = relative if relative.isprintable() else ascii(relative)
        return BundleDamaged(self._path.name, shown, reason)

    # contents -------------------------------------------------------------------------

    def _decode(self, name: str, raw: bytes, decode: Callable[[bytes], T]) -> T:
        try:
            return decode(raw)
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as exc:
            raise self._damaged(name, f"can't be decoded: {exc}") from exc

    def _check_schema(self, name: str, known: str, found: str) -> None:
        """Refuse a file of another version, which is neither damaged nor to be passed over."""
        family = known.partition(".")[0]
        if found != known and found.partition(".")[0] == family:
            raise RestoreError(
                f"{self._path.name}: {name} has schema {found} and this version reads {known};"
                " resume it with the version that wrote it, or move it away"
            )

    def _check_nesting(self, name: str, too_deep: bool) -> None:
        if too_deep:
            raise self._damaged(name, f"more than {MAX_NESTING} containers inside one another")

    def _check_agreement(
        self, step: int, manifest: Manifest, cut: Cut, position: SavedPosition, info: TrainingInfo
    ) -> None:
        self._agree("step", step, "its name", manifest.step, MANIFEST)
        self._agree("step", manifest.step, MANIFEST, cut.step, CUT)
        version = manifest.weight_version
        self._agree("weight_version", version, MANIFEST, cut.weight_version, CUT)
        self._agree("digest", manifest.cut_digest, MANIFEST, cut_digest(cut), CUT)
        same_info = training_info(
            cut, created=info.created, metrics=info.metrics, ft_only=info.ft_only
        )
        for name, value in asdict(same_info).items():
            self._agree(name, asdict(info)[name], INFO, value, CUT)
        for name, value in asdict(saved_position(cut)).items():
            self._agree(name, asdict(position)[name], POSITION, value, CUT)
        try:
            check_cut(cut)
        except BundleInconsistent as exc:
            raise BundleInconsistent(f"{self._path.name}: {exc}") from exc

    def _agree(self, what: str, a: object, a_file: str, b: object, b_file: str) -> None:
        if msgspec.msgpack.encode(a) != msgspec.msgpack.encode(b):  # nan equals nan here
            raise BundleInconsistent(
                f"{self._path.name}: {what} is {a!s:.80} in {a_file} and {b!s:.80} in {b_file}"
            )


class _Tagged(msgspec.Struct, frozen=True):
    type: str = ""
    schema: str = ""


def _tag_of_msgpack(raw: bytes) -> str:
    try:
        return msgspec.msgpack.decode(raw, type=_Tagged).type
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""  # what is wrong with it shows when it is decoded whole


def _schema_of_json(raw: bytes) -> str:
    try:
        return msgspec.json.decode(raw, type=_Tagged).schema
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


_SCHEMAS: Mapping[str, tuple[Callable[[bytes], str], str]] = {
    CUT: (_tag_of_msgpack, "cut.v1"),
    POSITION: (_tag_of_msgpack, "position.v1"),
    INFO: (_schema_of_json, "training_info.v1"),
}
"""How each file says what it is, and the only answer that this version reads."""


def _decode_position(raw: bytes) -> SavedPosition:
    return msgspec.msgpack.decode(raw, type=SavedPosition)


def _decode_info(raw: bytes) -> TrainingInfo:
    return msgspec.json.decode(raw, type=TrainingInfo)


def _decode_config(raw: bytes) -> dict[str, Any]:
    return msgspec.json.decode(raw, type=dict[str, Any])


def _log_refused(_bundle: str, reason: RestoreError) -> None:
    logger.warning("bundle refused: %s", reason)
