"""A disk in memory that can lose power between any two effects."""

from __future__ import annotations

import errno
import hashlib
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from sc_core.disk import DiskLock, Kind
from sc_core.errors import RunInUse

Hook = Callable[[str, Path], None]


class Crashed(BaseException):
    """The power went. No `except Exception` survives it, and the disk takes no more calls."""


class _File:
    __slots__ = ("data", "durable", "shared")

    def __init__(self, data: bytes = b"") -> None:
        self.data = data
        self.durable = b""  #: what a power cut can't take
        self.shared = False  #: other users may write to it


class _Dir:
    __slots__ = ("durable", "names", "shared")

    def __init__(self) -> None:
        self.names: dict[str, _Node] = {}
        self.durable: dict[str, _Node] = {}
        self.shared = False


_Node: TypeAlias = "_File | _Dir"


class _Change:
    """Names that one effect gave and took away, together. None stands for taken away."""

    def __init__(self, *names: tuple[_Dir, str, _Node | None]) -> None:
        self.names = names


class MemoryDisk:
    """A `Disk` without a disk, and what a crash may do to it.

    A file's content is durable once it was synced, a name once its directory was. What is not
    may be lost or reordered at a crash, and unsynced content torn; a rename or an exchange
    stays one step. `effects` counts what changes the disk; deleting a tree is one effect per
    file and directory. Reads see everything written, as a page cache does.

    `crash_at` raises `Crashed` in the midst of that effect, counted from 1. `hook(effect, path)`
    is called before each one, and what it raises is what the effect raises; `done(effect, path)`
    after each. All paths are absolute; the root exists. There are no symbolic links.
    """

    def __init__(
        self,
        *,
        crash_at: int | None = None,
        exchanges: bool = True,
        free: int = 1 << 40,
        hook: Hook | None = None,
        done: Hook | None = None,
    ) -> None:
        self.effects = 0
        self.crash_at = crash_at
        self.crashed = False
        self.exchanges = exchanges  #: whether `exchange` is known here
        self.free = free  #: bytes
        self.hook = hook
        self.done = done
        self._root = _Dir()
        self._pending: list[_Change] = []
        self._holders: dict[Path, _MemoryLock] = {}

    def after_crash(self, seed: int) -> MemoryDisk:
        """What a restart finds if the power went now; each seed is one way it may have gone."""
        rng = random.Random(seed)
        found = MemoryDisk(exchanges=self.exchanges, free=self.free)
        copies: dict[int, _Node] = {}
        durable: dict[int, dict[str, _Node]] = {}
        for change in self._survivors(rng):
            for directory, name, node in change.names:
                names = durable.setdefault(id(directory), dict(directory.durable))
                names.pop(name, None)
                if node is not None:
                    names[name] = node

        def copy(node: _Node) -> _Node:
            if id(node) in copies:
                return copies[id(node)]
            if isinstance(node, _File):
                file = _File(_torn(node, rng))
                file.durable, file.shared = file.data, node.shared
                copies[id(node)] = file
                return file
            directory = _Dir()
            copies[id(node)] = directory
            names = durable.get(id(node), node.durable)
            directory.names = {name: copy(inner) for name, inner in sorted(names.items())}
            directory.durable = dict(directory.names)
            directory.shared = node.shared
            return directory

        root = copy(self._root)
        assert isinstance(root, _Dir)
        found._root = root
        return found

    def after_kill(self, *, torn: Path | None = None, seed: int = 0) -> MemoryDisk:
        """What a restart finds if the process, not the power, went now: everything written.

        What was not synced is still at the mercy of a power cut later on. Of `torn`, a file that
        was being written, only a beginning has come to be.
        """
        found = MemoryDisk(exchanges=self.exchanges, free=self.free)
        copies: dict[int, _Node] = {}

        def copy(node: _Node) -> _Node:
            if id(node) in copies:
                return copies[id(node)]
            if isinstance(node, _File):
                file = copies[id(node)] = _File(node.data)
                file.durable, file.shared = node.durable, node.shared
                return file
            directory = copies[id(node)] = _Dir()
            directory.names = {name: copy(inner) for name, inner in node.names.items()}
            directory.durable = {name: copy(inner) for name, inner in node.durable.items()}
            directory.shared = node.shared
            return directory

        root = copy(self._root)
        assert isinstance(root, _Dir)
        found._root = root
        for change in self._pending:
            names = [(copy(where), name, node and copy(node)) for where, name, node in change.names]
            found._pending.append(_Change(*names))  # type: ignore[arg-type]
        if torn is not None:
            file = found._file(torn)
            file.data = file.data[: random.Random(seed).randrange(len(file.data) + 1)]
        return found

    def state(self) -> bytes:
        """A digest of all that this disk holds, and of what a power cut could take away."""
        numbers: dict[int, int] = {}
        digest = hashlib.sha256()

        def enter(node: _Node) -> int:
            number = numbers.get(id(node))
            if number is not None:
                return number
            number = numbers[id(node)] = len(numbers)
            if isinstance(node, _File):
                durable = node.durable if node.durable is not node.data else None
                parts: object = (number, node.shared, len(node.data), durable)
                digest.update(node.data)
            else:
                names = [(name, enter(node.names[name])) for name in sorted(node.names)]
                kept = [(name, enter(node.durable[name])) for name in sorted(node.durable)]
                parts = (number, node.shared, names, kept)
            digest.update(repr(parts).encode())
            return number

        enter(self._root)
        for change in self._pending:
            names = [
                (enter(where), name, node and enter(node)) for where, name, node in change.names
            ]
            digest.update(repr(names).encode())
        return digest.digest()

    def _survivors(self, rng: random.Random) -> list[_Change]:
        pending = self._pending
        match rng.randrange(4):
            case 0:
                return []
            case 1:
                return pending[: rng.randint(0, len(pending))]
            case 2:
                return list(pending)
            case _:
                return [change for change in pending if rng.random() < 0.5]

    # effects --------------------------------------------------------------------------

    def make_dir(self, path: Path, mode: int = 0o700) -> None:
        directory = self._vacant(path)
        made = _Dir()
        made.shared = bool(mode & 0o022)
        self._effect("make_dir", path, lambda: self._change((directory, path.name, made)))

    def write(self, path: Path, data: bytes) -> None:
        directory = self._dir(path.parent)
        file = directory.names.get(path.name)
        if isinstance(file, _Dir):
            raise _error(errno.EISDIR, path)
        if len(data) > self.free:
            raise _error(errno.ENOSPC, path)

        def apply() -> None:
            if file is None:
                self._change((directory, path.name, _File(data)))
            else:
                file.data = data

        self._effect("write", path, apply)

    def sync(self, path: Path) -> None:
        file = self._file(path)

        def apply() -> None:
            file.durable = file.data

        self._effect("sync", path, apply, done_at_crash=False)

    def sync_dir(self, path: Path) -> None:
        directory = self._dir(path)

        def apply() -> None:
            mine = [c for c in self._pending if any(one[0] is directory for one in c.names)]
            for change in mine:
                self._pending.remove(change)
                for inside, name, node in change.names:
                    inside.durable.pop(name, None)
                    if node is not None:
                        inside.durable[name] = node

        self._effect("sync_dir", path, apply, done_at_crash=False)

    def rename(self, a: Path, b: Path) -> None:
        old, new = self._dir(a.parent), self._dir(b.parent)
        node, there = self._node(a), new.names.get(b.name)
        if isinstance(there, _Dir) and (there.names or not isinstance(node, _Dir)):
            raise _error(errno.ENOTEMPTY, b)
        if isinstance(there, _File) and isinstance(node, _Dir):
            raise _error(errno.ENOTDIR, b)
        self._effect("rename", a, lambda: self._change((old, a.name, None), (new, b.name, node)))

    def exchange(self, a: Path, b: Path) -> bool:
        if not self.exchanges:
            return False
        one, other = self._node(a), self._node(b)
        left, right = self._dir(a.parent), self._dir(b.parent)
        self._effect(
            "exchange", a, lambda: self._change((left, a.name, other), (right, b.name, one))
        )
        return True

    def make_private(self, path: Path) -> None:
        node = self._node(path)
        if node.shared:

            def apply() -> None:
                node.shared = False

            self._effect("make_private", path, apply)

    def remove_tree(self, path: Path) -> None:
        self._alive()
        directory = self._dir(path.parent)
        node = directory.names.get(path.name)
        if node is None:
            return
        if isinstance(node, _Dir):
            for name in sorted(node.names):
                self.remove_tree(path / name)
        self._effect("remove", path, lambda: self._change((directory, path.name, None)))

    def lock(self, path: Path) -> DiskLock:
        if path in self._holders:
            raise RunInUse(str(path.parent), "another holder of this disk")
        if path.name not in self._dir(path.parent).names:
            self.write(path, b"")
        lock = _MemoryLock(self, path, self._file(path))
        self._holders[path] = lock
        return lock

    # reads ----------------------------------------------------------------------------

    def real(self, path: Path) -> Path:
        return path

    def read(self, path: Path, at_most: int) -> bytes:
        data = self._file(path).data
        if len(data) > at_most:
            raise _error(errno.EFBIG, path)
        return data

    def entries(self, path: Path) -> Mapping[str, Kind]:
        names = self._dir(path).names
        return {n: "dir" if isinstance(names[n], _Dir) else "file" for n in sorted(names)}

    def size(self, path: Path) -> int:
        return len(self._file(path).data)

    def sha256(self, path: Path) -> tuple[int, str]:
        data = self._file(path).data
        return len(data), hashlib.sha256(data).hexdigest()

    def free_bytes(self, path: Path) -> int:
        self._node(path)
        return self.free

    def is_private(self, path: Path) -> bool:
        return not self._node(path).shared

    # machinery ------------------------------------------------------------------------

    def _alive(self) -> None:
        if self.crashed:
            raise Crashed("this disk has lost power: go on with after_crash()")

    def _effect(
        self, name: str, path: Path, apply: Callable[[], None], *, done_at_crash: bool = True
    ) -> None:
        self._alive()
        if self.hook is not None:
            self.hook(name, path)
        self.effects += 1
        if self.effects == self.crash_at:
            self.crashed = True
            if done_at_crash:  # not durable yet: whether it happened is up to the seed
                apply()
            raise Crashed(f"at effect {self.effects}: {name} {path}")
        apply()
        if self.done is not None:
            self.done(name, path)

    def _change(self, *names: tuple[_Dir, str, _Node | None]) -> None:
        for directory, name, node in names:
            directory.names.pop(name, None)
            if node is not None:
                directory.names[name] = node
        self._pending.append(_Change(*names))

    def _node(self, path: Path) -> _Node:
        self._alive()
        node: _Node = self._root
        for name in path.parts[1:]:
            if not isinstance(node, _Dir):
                raise _error(errno.ENOTDIR, path)
            if name not in node.names:
                raise _error(errno.ENOENT, path)
            node = node.names[name]
        return node

    def _dir(self, path: Path) -> _Dir:
        node = self._node(path)
        if not isinstance(node, _Dir):
            raise _error(errno.ENOTDIR, path)
        return node

    def _file(self, path: Path) -> _File:
        node = self._node(path)
        if not isinstance(node, _File):
            raise _error(errno.EISDIR, path)
        return node

    def _vacant(self, path: Path) -> _Dir:
        directory = self._dir(path.parent)
        if path.name in directory.names or path == path.parent:
            raise _error(errno.EEXIST, path)
        return directory


class _MemoryLock:
    def __init__(self, disk: MemoryDisk, path: Path, file: _File) -> None:
        self._disk, self._path, self._locked = disk, path, file

    def is_held(self) -> bool:
        mine = self._disk._holders.get(self._path) is self
        return (
            mine and self._disk._dir(self._path.parent).names.get(self._path.name) is self._locked
        )

    def release(self) -> None:
        if self._disk._holders.get(self._path) is self:
            del self._disk._holders[self._path]


def _torn(file: _File, rng: random.Random) -> bytes:
    new = file.data
    if new == file.durable:
        return new
    at = rng.randint(0, len(new))
    return rng.choice([new, file.durable, new[:at], new[:at] + bytes(len(new) - at)])


def _error(code: int, path: Path) -> OSError:
    return OSError(code, os.strerror(code), str(path))
