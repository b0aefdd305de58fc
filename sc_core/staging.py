"""Fills a `tmp_step_N` and seals it: every file hashed, durable, and out of others' reach."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from sc_core.cut import check_cut, digest_of_encoded, encode_cut
from sc_core.disk import Disk
from sc_core.errors import RestoreError, SaveError
from sc_core.manifest import (
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
    FileSeal,
    Manifest,
    cut_nests_too_deeply,
    nests_too_deeply,
    saved_position,
    seal_manifest,
    training_info,
)
from sc_core.records import Cut

_HINTS = {
    errno.ENOSPC: "free some space on that file system",
    errno.EDQUOT: "the quota is used up: free some space",
    errno.EACCES: "let this user write there",
    errno.EPERM: "let this user write there",
    errno.EROFS: "the file system is read-only: choose another directory",
    errno.ENOTDIR: "a file is in the way: move it away",
    errno.ELOOP: "a symbolic link is in the way: move it away",
}


class Staged:
    """A `tmp_step_N` being filled. Nothing ever reads it under that name."""

    def __init__(
        self, path: Path, step: int, *, disk: Disk, key: bytes | None, now: Callable[[], float]
    ) -> None:
        self.path = path
        self.step = step
        self.policy_dir = path / POLICY  #: exists; for the trainer
        self.data_plane_dir = path / DATA_PLANE  #: does not: the data plane makes it
        self._disk = disk
        self._key = key
        self._now = now
        self._manifest: Manifest | None = None
        self._spent = False

    def spend(self) -> None:
        """Nothing may be written here any more: the path may now be that of another bundle."""
        self._spent = True

    def write_cut(
        self,
        *,
        cut: Cut,
        digest: str,
        config: Mapping[str, Any],
        metrics: Mapping[str, float],
        ft_only: bool = False,
    ) -> None:
        """Write the four files that tell of the cut. Repeating it is fine.

        Raises:
            SaveError: the cut is of another step or does not have that digest, or it could be
                written but not read again: too large or too deeply nested.
        """
        if self._spent:
            raise SaveError(f"{self.path} was published already: stage the step again")
        if cut.step != self.step:
            raise SaveError(f"{self.path} was staged for step {self.step}, not {cut.step}")
        if cut_nests_too_deeply(cut) or nests_too_deeply(config):
            raise SaveError(
                "a payload, the position, the sampler's state or the settings have more than"
                f" {MAX_NESTING} containers inside one another; flatten it"
            )
        encoded = encode_cut(cut)
        try:
            check_cut(cut)
            actual = digest_of_encoded(encoded)
        except RestoreError as exc:
            raise SaveError(f"the cut of step {cut.step} could not be read back: {exc}") from exc
        if actual != digest:
            raise SaveError(
                f"the cut of step {cut.step} has digest {actual}, not {digest}: something in it was"
                " changed where it lay, maybe a prompt's payload by a rollout worker, or the"
                " position by its source; they must work on copies"
            )
        numbers = {name: float(value) for name, value in metrics.items()}
        info = training_info(cut, created=self._now(), metrics=numbers, ft_only=ft_only)
        self._manifest = None
        with saving("writing", self.path):
            self._write(CUT, encoded)
            self._write(POSITION, msgspec.msgpack.encode(saved_position(cut)))
            self._write(INFO, _json(info))
            self._write(CONFIG, _json(config))
        self._manifest = Manifest(
            step=cut.step, weight_version=cut.weight_version, cut_digest=digest, files={}
        )

    def seal(self) -> int:
        """Hash every file into `MANIFEST.json`, written last, and make all of it durable.

        Returns the size of the sealed files, in bytes. Takes the right to write from other
        users on the way. Repeating it is fine.

        Raises:
            SaveError: something is no regular file, or belongs to another user, or
                `write_cut` has not been called.
        """
        if self._manifest is None or self._spent:
            raise SaveError(f"{self.path} has no cut yet: call write_cut() first")
        files: dict[str, FileSeal] = {}
        with saving("sealing", self.path):
            if self._disk.entries(self.path).get(DATA_PLANE) != "dir":
                raise SaveError(f"{self.data_plane_dir} is missing: the data plane saved nothing")
            self._seal_directory(self.path, "", files)
            if not any(name.startswith(f"{POLICY}/") for name in files):
                raise SaveError(f"{self.policy_dir} is empty: the trainer saved nothing")
            manifest = msgspec.structs.replace(self._manifest, files=files)
            self._write(MANIFEST, seal_manifest(manifest, self._key))
            self._disk.sync(self.path / MANIFEST)
            self._disk.sync_dir(self.path)
        return manifest.total_bytes

    def _seal_directory(self, path: Path, inside: str, files: dict[str, FileSeal]) -> None:
        if inside.count("/") > MAX_PATH_DEPTH:
            raise SaveError(f"{path} is more than {MAX_PATH_DEPTH} directories deep")
        self._make_private(path)
        for name, kind in self._disk.entries(path).items():
            one, relative = path / name, f"{inside}{name}"
            if relative == MANIFEST:
                continue  # of an earlier attempt
            if kind == "dir":
                self._seal_directory(one, f"{relative}/", files)
            elif kind != "file":
                raise SaveError(
                    f"{one} is {'a symbolic link' if kind == 'link' else 'no regular file'};"
                    " a bundle holds regular files and directories only"
                )
            elif not name.isprintable():
                raise SaveError(f"{str(one)!r}: a bundle holds files with printable names only")
            else:
                self._make_private(one)
                self._disk.sync(one)
                files[relative] = FileSeal(*self._disk.sha256(one))
        if len(files) > MAX_FILES:
            raise SaveError(f"{self.path} has more than {MAX_FILES} files")
        self._disk.sync_dir(path)

    def _make_private(self, path: Path) -> None:
        self._disk.make_private(path)
        if not self._disk.is_private(path):
            raise SaveError(f"{path} belongs to another user, who could change it; chown it")

    def _write(self, name: str, data: bytes) -> None:
        if len(data) > AT_MOST_BYTES[name]:
            raise SaveError(
                f"{name} would have {len(data):,} bytes and at most {AT_MOST_BYTES[name]:,} are"
                " read back; keep prompts as keys instead of payloads, or buffer fewer"
            )
        self._disk.write(self.path / name, data)


def _json(value: Any) -> bytes:
    # Settings are there to be looked at: a type that JSON lacks must not cost a checkpoint.
    return msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2) + b"\n"


@contextmanager
def saving(what: str, path: Path) -> Iterator[None]:
    """Turn an `OSError` into a `SaveError` that says what failed, where, and what to do."""
    try:
        yield
    except OSError as exc:
        hint = _HINTS.get(exc.errno or 0, "look at that disk, then save again")
        at = exc.filename or path
        raise SaveError(f"{what} {path} failed at {at}: {exc.strerror or exc}; {hint}") from exc
