"""Writes bundles: stage, seal, publish. A crash at any instant leaves the old one or the new one.

All functions are synchronous; callers on an event loop run them through a runner.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sc_core.disk import LOCAL, Disk, DiskLock
from sc_core.errors import SaveError
from sc_core.manifest import ASIDE, POLICY, STAGED, TRASH, bundle_name, parse_name
from sc_core.records import Cut
from sc_core.staging import Staged as Staged
from sc_core.staging import saving

logger = logging.getLogger(__name__)

LOCK = ".writer.lock"


class BundleStore:
    """The bundles of one run, as their only writer.

    `key` signs manifests (`SC_BUNDLE_KEY`); `now` gives seconds since the epoch.
    """

    def __init__(
        self,
        directory: Path,
        *,
        disk: Disk = LOCAL,
        key: bytes | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.directory = disk.real(directory)
        self.disk = disk
        self.key = key
        self.published: int | None = None  #: step of the last bundle that this store published
        self.expected_bytes = 0  #: of the next bundle: the size of the last one, if it is known
        self._now = now
        self._lock: DiskLock | None = None

    def open(self) -> None:
        """Become the writer: make the directory, lock it, and tidy up after a crash.

        A bundle that was moved aside and never replaced gets its name back. What was staged
        and not published, or half deleted, goes away; foreign names stay. Open the store
        before a restore looks for bundles, so that none of them changes its name afterwards.

        Raises:
            RunInUse: another process writes here.
            SaveError: the directory can't be made or written, or others may write to it.
        """
        if self._lock is not None:
            return
        with saving("opening", self.directory):
            self._make_directories(self.directory)
            if not self.disk.is_private(self.directory):
                raise SaveError(
                    f"{self.directory} can be written by other users, who could then run code"
                    f" when a bundle is loaded; chown it or run: chmod go-w {self.directory}"
                )
            self._lock = self.disk.lock(self.directory / LOCK)
        try:
            self._tidy()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another writer in. Safe to call twice."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def stage(self, step: int) -> Staged:
        """Make an empty `tmp_step_N`; one left by an earlier attempt is removed.

        Raises:
            SaveError: there is no space for another bundle as large as the last one, the
                directory can't be written, or `step_N` exists and is no directory.
        """
        self._check_lock()
        path = self.directory / f"{STAGED}{step}"
        with saving("staging", path):
            free, needed = self.disk.free_bytes(self.directory), self.expected_bytes
            if free < needed:
                raise SaveError(
                    f"{self.directory} has {free:,} bytes free and a bundle needs about"
                    f" {needed:,}; free {needed - free:,} bytes or keep fewer bundles"
                )
            self._target(step)
            if path.name in self.disk.entries(self.directory):
                self.disk.sync_dir(self.directory)  # as in `_tidy`
                self.disk.remove_tree(path)
            self.disk.make_dir(path)
            self.disk.make_dir(path / POLICY)
        return Staged(path, step, disk=self.disk, key=self.key, now=self._now)

    def publish(
        self,
        staged: Staged,
        *,
        cut: Cut,
        digest: str,
        config: Mapping[str, Any],
        metrics: Mapping[str, float],
        ft_only: bool = False,
    ) -> Path:
        """Write the cut, seal, and turn `tmp_step_N` into `step_N`, replacing one that exists.

        Raises:
            SaveError: it is not published; or it is, and a power cut may undo that. Either
                way `step_N`, if it existed, is the old bundle or the new one.
        """
        staged.write_cut(cut=cut, digest=digest, config=config, metrics=metrics, ft_only=ft_only)
        self.expected_bytes = staged.seal()
        self._check_lock()
        final = self.directory / bundle_name(staged.step)
        with saving("publishing", final):
            self._put_in_place(staged, final)
        self.published = staged.step
        try:
            self.disk.remove_tree(staged.path)  # after an exchange, the replaced bundle
            self._remove_aside(staged.step)
        except OSError as exc:
            logger.warning("what %s replaced is left beside it: %s", final, exc)
        return final

    def discard(self, step: int) -> None:
        """Delete `step_N`: first its name, durably, then its files. Follows no link.

        Raises:
            SaveError: it is still there, or the files are, under a name that is never read.
        """
        self._check_lock()
        path, trash = self.directory / bundle_name(step), self.directory / f"{TRASH}{step}"
        with saving("deleting", path):
            self._remove_aside(step)  # else the next start would take it for the bundle
            self.disk.remove_tree(trash)
            self.disk.rename(path, trash)
            self.disk.sync_dir(self.directory)
            self.disk.remove_tree(trash)

    def _put_in_place(self, staged: Staged, final: Path) -> None:
        disk, parent, new = self.disk, self.directory, staged.path
        if not self._target(staged.step):
            disk.rename(new, final)
        elif not disk.exchange(new, final):
            self._remove_aside(staged.step)
            aside = parent / f"{ASIDE}{staged.step}"
            disk.rename(final, aside)
            try:
                disk.rename(new, final)
            except OSError:
                with suppress(OSError):  # else `open` does it
                    disk.rename(aside, final)
                raise
        staged.spend()
        disk.sync_dir(parent)

    def _remove_aside(self, step: int) -> None:
        """Delete what was moved aside, if anything, although `step_N` exists."""
        aside = self.directory / f"{ASIDE}{step}"
        if aside.name in self.disk.entries(self.directory):
            self.disk.remove_tree(aside)
            self.disk.sync_dir(self.directory)

    def _target(self, step: int) -> bool:
        """Whether `step_N` exists."""
        kind = self.disk.entries(self.directory).get(bundle_name(step))
        if kind not in (None, "dir"):
            path = self.directory / bundle_name(step)
            raise SaveError(f"{path} is in the way and is no directory; move it away")
        return kind is not None

    def _tidy(self) -> None:
        with saving("recovering", self.directory):
            names = self.disk.entries(self.directory)
            names_stay = False
            for name, kind in names.items():
                prefix, step = parse_name(name) or ("", 0)
                if kind != "dir" or prefix not in (ASIDE, STAGED, TRASH):
                    continue
                path = self.directory / name
                if prefix == ASIDE and bundle_name(step) not in names:
                    self.disk.rename(path, self.directory / bundle_name(step))
                    logger.warning("%s: recovered after a crash", bundle_name(step))
                    continue
                if not names_stay:
                    # The last process may have ended between a rename and its sync. Were files
                    # to go first, a power cut could leave a bundle its old name without them.
                    self.disk.sync_dir(self.directory)
                    names_stay = True
                try:
                    self.disk.remove_tree(path)
                except OSError as exc:
                    logger.warning("%s is of no use and can't be deleted: %s", path, exc)

    def _make_directories(self, path: Path) -> None:
        missing = []
        while True:
            try:
                self.disk.make_dir(path)
            except FileNotFoundError:
                missing.append(path)
                path = path.parent
            except FileExistsError:
                break
            else:
                self.disk.sync_dir(path.parent)
                break
        for path in reversed(missing):
            self.disk.make_dir(path)
            self.disk.sync_dir(path.parent)

    def _check_lock(self) -> None:
        if self._lock is None:
            raise SaveError(f"{self.directory} is not open for writing: call open() first")
        with saving("checking the lock of", self.directory):
            if not self._lock.is_held():
                raise SaveError(
                    f"the lock file of {self.directory} was replaced, so another process may"
                    " write here too; end one of the two runs"
                )
