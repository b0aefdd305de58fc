"""Every disk effect of sc_core, behind one Protocol, so that a test can crash between any two.

All calls are synchronous: callers on an event loop run them through a runner. They raise plain
`OSError`; those who know what the file was for turn it into an error of ours.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

from sc_core.errors import RunInUse

Kind = Literal["file", "dir", "link", "other"]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class DiskLock(Protocol):
    """A lock on a file; the end of its holder's process releases it too."""

    def is_held(self) -> bool:
        """Whether the file at the lock's path is still the one that was locked."""

    def release(self) -> None:
        """Let others have it. Safe to call twice; never deletes the file."""


class Disk(Protocol):
    """A file system. What was not synced may be lost, torn or reordered by a power cut."""

    def real(self, path: Path) -> Path:
        """The absolute path without symbolic links; what does not exist stays as given."""

    def make_dir(self, path: Path, mode: int = 0o700) -> None:
        """Raises FileExistsError if anything is there."""

    def write(self, path: Path, data: bytes) -> None:
        """Create or replace the content of a file. Refuses a symbolic link."""

    def read(self, path: Path, at_most: int) -> bytes:
        """The content of a regular file of at most `at_most` bytes.

        Raises:
            OSError: EFBIG for a larger file, ELOOP for a symbolic link, EINVAL for what is
                no regular file.
        """

    def sync(self, path: Path) -> None:
        """Make the content of a file durable."""

    def sync_dir(self, path: Path) -> None:
        """Make the names in a directory durable."""

    def rename(self, a: Path, b: Path) -> None: ...

    def exchange(self, a: Path, b: Path) -> bool:
        """Swap two names in one atomic step; False, with nothing done, where that is unknown."""

    def make_private(self, path: Path) -> None:
        """Take the right to write from everyone but the owner. Refuses a symbolic link."""

    def remove_tree(self, path: Path) -> None:
        """Delete a directory and all in it, following no symbolic link; fine if it is gone."""

    def entries(self, path: Path) -> Mapping[str, Kind]:
        """Names in a directory, sorted, and what they are. `path` itself must be no link."""

    def size(self, path: Path) -> int:
        """In bytes."""

    def sha256(self, path: Path) -> tuple[int, str]:
        """Size in bytes and hex digest of a regular file, in constant memory."""

    def free_bytes(self, path: Path) -> int:
        """What this user may still write to the file system that holds `path`."""

    def is_private(self, path: Path) -> bool:
        """Whether only we (or root) can change it: owner and mode. Never true for a link."""

    def lock(self, path: Path) -> DiskLock:
        """Take the lock on the file `path`, creating it.

        Raises:
            RunInUse: somebody holds it; names the holder.
        """


class LocalDisk:
    """The file system of this machine."""

    def real(self, path: Path) -> Path:
        return Path(os.path.realpath(path))

    def make_dir(self, path: Path, mode: int = 0o700) -> None:
        os.mkdir(path, mode)

    def write(self, path: Path, data: bytes) -> None:
        with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]

    def read(self, path: Path, at_most: int) -> bytes:
        with _opened(path, os.O_RDONLY) as fd:
            size = os.fstat(fd).st_size
            if size <= at_most:
                with open(fd, "rb", closefd=False) as file:
                    data = file.read(size + 1)  # it may be growing; memory is taken up front
                if len(data) <= at_most:
                    return data
            raise OSError(errno.EFBIG, f"more than {at_most} bytes", str(path))

    def sync(self, path: Path) -> None:
        with _opened(path, os.O_RDONLY) as fd:
            os.fsync(fd)

    def sync_dir(self, path: Path) -> None:
        with _opened(path, os.O_RDONLY, "dir") as fd:
            try:
                os.fsync(fd)
            except OSError as exc:  # some network file systems know no fsync of a directory
                if exc.errno not in (errno.EINVAL, errno.ENOTSUP):
                    raise

    def rename(self, a: Path, b: Path) -> None:
        os.rename(a, b)

    def exchange(self, a: Path, b: Path) -> bool:
        try:
            renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
        except AttributeError:  # not Linux, or a C library without it
            return False
        flags = ctypes.c_uint(_RENAME_EXCHANGE)
        if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), flags) == 0:
            return True
        code = ctypes.get_errno()
        if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
            return False
        raise OSError(code, os.strerror(code), str(a), None, str(b))

    def make_private(self, path: Path) -> None:
        with _opened(path, os.O_RDONLY, "file", "dir") as fd:
            mode = stat.S_IMODE(os.fstat(fd).st_mode)
            if mode & 0o022:
                os.fchmod(fd, mode & ~0o022)

    def remove_tree(self, path: Path) -> None:
        try:
            shutil.rmtree(path)  # goes by file descriptors, and refuses a link
        except FileNotFoundError:
            if os.path.lexists(path):
                raise

    def entries(self, path: Path) -> Mapping[str, Kind]:
        with _opened(path, os.O_RDONLY, "dir") as fd, os.scandir(fd) as found:
            return {entry.name: _kind(entry) for entry in sorted(found, key=lambda e: e.name)}

    def size(self, path: Path) -> int:
        return os.lstat(path).st_size

    def sha256(self, path: Path) -> tuple[int, str]:
        with (
            _opened(path, os.O_RDONLY) as fd,
            open(fd, "rb", buffering=0, closefd=False) as file,
        ):
            digest = hashlib.file_digest(file, "sha256")
            return file.tell(), digest.hexdigest()

    def free_bytes(self, path: Path) -> int:
        at = os.statvfs(path)
        return at.f_bavail * at.f_frsize

    def is_private(self, path: Path) -> bool:
        found = os.lstat(path)
        return found.st_uid in (os.geteuid(), 0) and not found.st_mode & 0o022

    def lock(self, path: Path) -> DiskLock:
        return _FileLock(path)


LOCAL = LocalDisk()  #: the file system of this machine


class _FileLock:
    def __init__(self, path: Path) -> None:
        self._path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(fd, 200, 0).decode(errors="replace").strip()
                raise RunInUse(str(path.parent), holder) from None
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except BaseException:
            os.close(fd)
            raise
        self._fd: int | None = fd

    def is_held(self) -> bool:
        if self._fd is None:
            return False
        try:
            there = os.lstat(self._path)
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(self._fd), there)

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)  # lets go of the lock too
            self._fd = None


@contextmanager
def _opened(path: Path, flags: int, *kinds: Kind) -> Iterator[int]:
    # O_NONBLOCK: opening a pipe that someone left here must not wait for its other end
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        found = _kind_of_mode(os.fstat(fd).st_mode)
        if found not in (kinds or ("file",)):
            raise OSError(errno.EINVAL, f"not a regular {(kinds or ('file',))[0]}", str(path))
        yield fd
    finally:
        os.close(fd)


def _kind(entry: os.DirEntry[str]) -> Kind:
    return _kind_of_mode(entry.stat(follow_symlinks=False).st_mode)


def _kind_of_mode(mode: int) -> Kind:
    kinds: dict[int, Kind] = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}
    return kinds.get(stat.S_IFMT(mode), "other")
