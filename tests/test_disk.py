from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sc_core.disk import Disk, LocalDisk
from sc_core.errors import RunInUse
from sc_core.testing.disk import Crashed, MemoryDisk

SEEDS = range(40)


@pytest.fixture(params=["local", "memory"])
def disk(request: pytest.FixtureRequest) -> Disk:
    return LocalDisk() if request.param == "local" else MemoryDisk()


@pytest.fixture
def at(disk: Disk, tmp_path: Path) -> Path:
    """An empty directory on that disk."""
    if isinstance(disk, LocalDisk):
        return tmp_path
    disk.make_dir(Path("/at"))
    return Path("/at")


# what every disk does -------------------------------------------------------------------


def test_a_file_is_read_as_written_and_replaced_whole(disk: Disk, at: Path) -> None:
    disk.write(at / "a", b"a longer content")
    disk.write(at / "a", b"short")
    assert disk.read(at / "a", 5) == b"short"
    assert disk.size(at / "a") == 5
    assert disk.sha256(at / "a") == (5, hashlib.sha256(b"short").hexdigest())
    disk.sync(at / "a")
    disk.sync_dir(at)


def test_reading_more_than_allowed_is_refused(disk: Disk, at: Path) -> None:
    disk.write(at / "a", b"123456")
    with pytest.raises(OSError) as refused:
        disk.read(at / "a", 5)
    assert refused.value.errno == errno.EFBIG


def test_entries_are_sorted_and_say_what_they_are(disk: Disk, at: Path) -> None:
    disk.write(at / "b", b"")
    disk.make_dir(at / "a")
    assert list(disk.entries(at).items()) == [("a", "dir"), ("b", "file")]
    with pytest.raises(OSError):
        disk.entries(at / "b")
    with pytest.raises(FileNotFoundError):
        disk.entries(at / "c")


def test_making_a_directory_needs_a_parent_and_a_free_name(disk: Disk, at: Path) -> None:
    disk.make_dir(at / "a")
    with pytest.raises(FileExistsError):
        disk.make_dir(at / "a")
    with pytest.raises(FileNotFoundError):
        disk.make_dir(at / "b" / "c")
    assert disk.is_private(at / "a")


def test_a_rename_moves_a_directory_but_not_onto_a_full_one(disk: Disk, at: Path) -> None:
    disk.make_dir(at / "a")
    disk.write(at / "a" / "inside", b"a")
    disk.rename(at / "a", at / "b")
    assert disk.read(at / "b" / "inside", 1) == b"a"
    disk.make_dir(at / "c")
    with pytest.raises(OSError) as refused:
        disk.rename(at / "c", at / "b")
    assert refused.value.errno == errno.ENOTEMPTY
    with pytest.raises(FileNotFoundError):
        disk.rename(at / "a", at / "d")


def test_an_exchange_swaps_two_directories(disk: Disk, at: Path) -> None:
    for name in ("a", "b"):
        disk.make_dir(at / name)
        disk.write(at / name / "inside", name.encode())
    if not disk.exchange(at / "a", at / "b"):
        pytest.skip("this file system can't exchange two names")
    assert disk.read(at / "a" / "inside", 1) == b"b"
    assert disk.read(at / "b" / "inside", 1) == b"a"
    with pytest.raises(FileNotFoundError):
        disk.exchange(at / "a", at / "c")


def test_removing_a_tree_takes_all_of_it_and_may_be_repeated(disk: Disk, at: Path) -> None:
    disk.make_dir(at / "a")
    disk.make_dir(at / "a" / "b")
    disk.write(at / "a" / "b" / "c", b"")
    disk.remove_tree(at / "a")
    disk.remove_tree(at / "a")
    assert disk.entries(at) == {}


def test_what_others_may_write_to_becomes_private(disk: Disk, at: Path) -> None:
    disk.make_dir(at / "a", 0o777)
    if isinstance(disk, LocalDisk):
        os.chmod(at / "a", 0o777)  # whatever the umask
    assert not disk.is_private(at / "a")
    disk.make_private(at / "a")
    assert disk.is_private(at / "a")


def test_free_space_is_known(disk: Disk, at: Path) -> None:
    assert disk.free_bytes(at) > 0


def test_a_lock_has_one_holder_until_it_is_released(disk: Disk, at: Path) -> None:
    lock = disk.lock(at / "lock")
    assert lock.is_held()
    with pytest.raises(RunInUse, match=str(at)):
        disk.lock(at / "lock")
    lock.release()
    lock.release()
    assert not lock.is_held()
    assert disk.lock(at / "lock").is_held()


def test_a_lock_whose_file_was_replaced_is_held_no_more(disk: Disk, at: Path) -> None:
    lock = disk.lock(at / "lock")
    disk.write(at / "other", b"")
    disk.rename(at / "other", at / "lock")
    assert not lock.is_held()


# the local disk -------------------------------------------------------------------------

TOUCHES: list[Callable[[LocalDisk, Path], Any]] = [
    lambda disk, path: disk.read(path, 100),
    lambda disk, path: disk.write(path, b"overwritten"),
    lambda disk, path: disk.sync(path),
    lambda disk, path: disk.sha256(path),
    lambda disk, path: disk.make_private(path),
    lambda disk, path: disk.lock(path),
]


@pytest.mark.parametrize("touch", TOUCHES)
def test_no_call_follows_a_link_to_a_file(tmp_path: Path, touch: Any) -> None:
    (tmp_path / "target").write_bytes(b"precious")
    (tmp_path / "target").chmod(0o666)
    (tmp_path / "link").symlink_to("target")
    with pytest.raises(OSError) as refused:
        touch(LocalDisk(), tmp_path / "link")
    assert refused.value.errno == errno.ELOOP
    assert (tmp_path / "target").read_bytes() == b"precious"
    assert (tmp_path / "target").stat().st_mode & 0o777 == 0o666


def test_no_call_follows_a_link_to_a_directory(tmp_path: Path) -> None:
    disk = LocalDisk()
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "inside").touch()
    (tmp_path / "link").symlink_to("target")
    for touch in (disk.entries, disk.sync_dir, disk.remove_tree):
        with pytest.raises(OSError):
            touch(tmp_path / "link")
    assert disk.entries(tmp_path) == {"link": "link", "target": "dir"}
    assert not disk.is_private(tmp_path / "link")
    (tmp_path / "holder").mkdir()
    (tmp_path / "holder" / "link").symlink_to(tmp_path / "target")
    disk.remove_tree(tmp_path / "holder")
    assert (tmp_path / "target" / "inside").exists()


@pytest.mark.parametrize("touch", [TOUCHES[0], TOUCHES[2], TOUCHES[3]])
def test_a_pipe_is_refused_without_waiting_for_its_other_end(tmp_path: Path, touch: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        touch(LocalDisk(), tmp_path / "pipe")
    assert LocalDisk().entries(tmp_path) == {"pipe": "other"}


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_group_and_others_make_a_path_public(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    assert not LocalDisk().is_private(tmp_path)
    tmp_path.chmod(0o755)
    assert LocalDisk().is_private(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_path_of_another_user_is_not_private(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, -1)
    assert not LocalDisk().is_private(tmp_path)


def test_sync_reaches_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    (tmp_path / "file").touch()
    LocalDisk().sync(tmp_path / "file")
    LocalDisk().sync_dir(tmp_path)
    assert synced == [str(tmp_path / "file"), str(tmp_path)]


def test_a_failed_sync_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = errno.EIO

    def fsync(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        LocalDisk().sync(tmp_path / "file")
    with pytest.raises(OSError):
        LocalDisk().sync_dir(tmp_path)
    code = errno.EINVAL
    LocalDisk().sync_dir(tmp_path)  # a file system that knows no such thing
    with pytest.raises(OSError):
        LocalDisk().sync(tmp_path / "file")


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP])
def test_an_exchange_that_is_unknown_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    class Library:
        def __init__(self, *args: Any, **options: Any) -> None: ...

        def renameat2(self, *args: Any) -> int:
            ctypes.set_errno(code)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", Library)
    assert LocalDisk().exchange(tmp_path / "a", tmp_path / "b") is False
    del Library.renameat2
    assert LocalDisk().exchange(tmp_path / "a", tmp_path / "b") is False


def test_the_holder_of_a_lock_is_named_and_its_death_frees_the_lock(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from sc_core.disk import LocalDisk\n"
        "lock = LocalDisk().lock(Path(sys.argv[1])); print('locked', flush=True)\n"
        "sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"locked\n"
        with pytest.raises(RunInUse, match=f"pid {child.pid} on "):
            LocalDisk().lock(tmp_path / "lock")
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert LocalDisk().lock(tmp_path / "lock").is_held()


# the disk that loses power --------------------------------------------------------------


def outcomes(disk: MemoryDisk, look: Callable[[MemoryDisk], Any]) -> set[Any]:
    return {look(disk.after_crash(seed)) for seed in SEEDS}


def names(disk: MemoryDisk) -> tuple[str, ...]:
    return tuple(disk.entries(Path("/")))


def test_unsynced_content_may_be_lost_or_torn() -> None:
    disk = MemoryDisk()
    disk.write(Path("/a"), b"old!")
    disk.sync(Path("/a"))
    disk.sync_dir(Path("/"))
    assert outcomes(disk, lambda found: found.read(Path("/a"), 99)) == {b"old!"}
    disk.write(Path("/a"), b"newer")
    found = outcomes(disk, lambda found: found.read(Path("/a"), 99))
    assert {b"old!", b"newer", b"new"} <= found
    assert any(content.endswith(b"\0") for content in found)
    disk.sync(Path("/a"))
    assert outcomes(disk, lambda found: found.read(Path("/a"), 99)) == {b"newer"}


def test_an_unsynced_name_may_be_lost_although_its_file_was_synced() -> None:
    disk = MemoryDisk()
    disk.write(Path("/a"), b"")
    disk.sync(Path("/a"))
    assert outcomes(disk, names) == {(), ("a",)}
    disk.sync_dir(Path("/"))
    assert outcomes(disk, names) == {("a",)}


def test_unsynced_renames_are_lost_or_reordered_but_never_half_done() -> None:
    disk = MemoryDisk()
    for name in ("a", "b"):
        disk.make_dir(Path("/") / name)
    disk.sync_dir(Path("/"))
    disk.rename(Path("/a"), Path("/a2"))
    disk.rename(Path("/b"), Path("/b2"))
    assert outcomes(disk, names) == {("a", "b"), ("a2", "b"), ("a", "b2"), ("a2", "b2")}
    disk.sync_dir(Path("/"))
    assert outcomes(disk, names) == {("a2", "b2")}


def test_an_exchange_happens_wholly_or_not_at_all() -> None:
    disk = MemoryDisk()
    for name in ("a", "b"):
        disk.make_dir(Path("/") / name)
        disk.make_dir(Path("/") / name / name)
        disk.sync_dir(Path("/") / name)
    disk.sync_dir(Path("/"))
    disk.exchange(Path("/a"), Path("/b"))
    inside = outcomes(disk, lambda found: tuple(found.entries(Path("/a"))))
    assert inside == {("a",), ("b",)}
    assert not MemoryDisk(exchanges=False).exchange(Path("/a"), Path("/b"))


def test_it_dies_at_the_chosen_effect_and_stays_dead() -> None:
    clean = MemoryDisk()
    clean.make_dir(Path("/a"))
    clean.write(Path("/a/b"), b"content")
    clean.sync(Path("/a/b"))
    clean.remove_tree(Path("/a"))
    assert clean.effects == 5  # two of them to remove the file and its directory

    disk = MemoryDisk(crash_at=2)
    disk.make_dir(Path("/a"))
    with pytest.raises(Crashed):
        disk.write(Path("/a/b"), b"content")
    for touch in (disk.entries, disk.sync_dir, disk.remove_tree):
        with pytest.raises(Crashed):
            touch(Path("/a"))
    assert not isinstance(Crashed(), Exception)
    assert disk.effects == 2
    again = disk.after_crash(3)
    again.make_dir(Path("/z"))


def test_one_seed_gives_one_outcome() -> None:
    disk = MemoryDisk()
    for place in range(8):
        disk.write(Path("/") / str(place), bytes(range(place, place + 20)))
    for seed in SEEDS:
        first, second = disk.after_crash(seed), disk.after_crash(seed)
        assert names(first) == names(second)
        for name in names(first):
            assert first.read(Path("/") / name, 99) == second.read(Path("/") / name, 99)
    assert len(outcomes(disk, names)) > 4


def test_the_hook_sees_every_effect_and_can_make_it_fail() -> None:
    seen = []

    def hook(effect: str, path: Path) -> None:
        seen.append((effect, str(path)))
        if effect == "sync":
            raise OSError(errno.EIO, "broken")

    disk = MemoryDisk(hook=hook)
    disk.write(Path("/a"), b"1")
    with pytest.raises(OSError, match="broken"):
        disk.sync(Path("/a"))
    assert seen == [("write", "/a"), ("sync", "/a")]
    assert disk.effects == 1
    with pytest.raises(OSError, match="No space"):
        MemoryDisk(free=3).write(Path("/a"), b"1234")
