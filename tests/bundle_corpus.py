"""Every damage of a bundle that we can think of, for each of its files; and the verdict on it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import socket
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from make_bundles import reseal

from sc_core.disk import LOCAL
from sc_core.errors import NoValidBundle, RestoreError
from sc_core.manifest import AT_MOST_BYTES, CONFIG, MANIFEST, FileSeal, open_manifest
from sc_core.verify import newest_valid, verify

AT_MOST_TRACED = 24 << 20  #: bytes of memory that looking at any of these bundles may take
SPOILT = "older bundles are damaged too"  #: a file beside the copies
AT_MOST_S = 60  #: seconds before looking at one counts as hanging

Damage = Callable[[Path, Path], None]
Verdict = Literal["refused", "harmless"]


class Case(NamedTuple):
    name: str
    mentions: str  #: what the error has to name; a file inside the bundle, for all but a few
    apply: Damage  #: to the newest bundle, given the one before it
    spoils: int = 1  #: bundles; 0: the start itself is refused, for nothing may be guessed


class Hostile:
    """Pickles to something that makes a marker when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def contents(marker: Path) -> dict[str, bytes]:
    """What an attacker may write instead of a file."""
    archive = marker.with_suffix(".zip")
    with zipfile.ZipFile(archive, "w") as torch_file:
        torch_file.writestr("archive/data.pkl", pickle.dumps(Hostile(marker)))
        torch_file.writestr("archive/version", "3")
    deep = 150_000
    return {
        "pickle": pickle.dumps(Hostile(marker)),
        "old-pickle": pickle.dumps(Hostile(marker), protocol=0),
        "torch-file": archive.read_bytes(),
        "deep-json-object": b'{"a":' * deep + b"1" + b"}" * deep,
        "deep-json-list": b"[" * deep + b"]" * deep,
        "deep-msgpack": b"\x91" * deep + b"\xc0",
        "deep-msgpack-map": b"\x81\xa1a" * deep + b"\xc0",
        "huge-array": b"\xdd\xff\xff\xff\xff",
        "huge-map": b"\xdf\xff\xff\xff\xff",
        "huge-string": b"\xdb\xff\xff\xff\xff",
        "huge-bytes": b"\xc6\xff\xff\xff\xff",
        "huge-extension": b"\xc9\xff\xff\xff\xff\x01",
        "huge-inside": b"\x81\xa4type\xdb\xff\xff\xff\xff",
        "huge-number": b'{"step": 1' + b"0" * 5000 + b"}",
        "not-utf-8": b'{"\xff\xfe": 1}',
        "yaml-tag": b"!!python/object/apply:os.mkdir [" + str(marker).encode() + b"]\n",
        "nul-bytes": bytes(1000),
    }


# one file ------------------------------------------------------------------------------


def _rewrite(change: Callable[[bytes], bytes], name: str) -> Damage:
    def apply(bundle: Path, before: Path) -> None:
        file = bundle / name
        file.write_bytes(change(file.read_bytes()))

    return apply


def _instead(make: Callable[[Path], Any], name: str) -> Damage:
    def apply(bundle: Path, before: Path) -> None:
        (bundle / name).unlink()
        make(bundle / name)

    return apply


def _cut(part: float) -> Callable[[bytes], bytes]:
    return lambda raw: raw[: int(len(raw) * part)]


def _flip(part: float, bit: int) -> Callable[[bytes], bytes]:
    def flip(raw: bytes) -> bytes:
        at = int((len(raw) - 1) * part)
        return raw[:at] + bytes([raw[at] ^ (1 << bit)]) + raw[at + 1 :]

    return flip


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(here)


def _swap(name: str) -> Damage:
    def apply(bundle: Path, before: Path) -> None:
        ours, theirs = (bundle / name).read_bytes(), (before / name).read_bytes()
        (bundle / name).write_bytes(theirs)
        (before / name).write_bytes(ours)

    return apply


def _linked(name: str, *, hard: bool = False) -> Damage:
    """The same content, but not in the bundle."""

    def apply(bundle: Path, before: Path) -> None:
        elsewhere = bundle.parent.parent / "elsewhere"
        (bundle / name).rename(elsewhere)
        (bundle / name).symlink_to(elsewhere)

    return apply


def of_file(name: str, same_before: bool, hostile: dict[str, bytes]) -> Iterator[Case]:
    """Damages of one file; `same_before`: the bundle before has it byte by byte."""

    def case(what: str, apply: Damage, mentions: str = name, spoils: int = 1) -> Case:
        return Case(f"{name}: {what}", mentions, apply, spoils)

    yield case("missing", _instead(lambda path: None, name))
    yield case("empty", _rewrite(lambda raw: b"", name))
    for part in (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99):
        yield case(f"cut at {part}", _rewrite(_cut(part), name))
    yield case("last byte lost", _rewrite(lambda raw: raw[:-1], name))
    yield case("first byte lost", _rewrite(lambda raw: raw[1:], name))
    yield case("one byte more", _rewrite(lambda raw: raw + b"\n", name))
    yield case("twice", _rewrite(lambda raw: raw + raw, name))
    yield case("zeroed", _rewrite(lambda raw: bytes(len(raw)), name))
    for part in (0.0, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0):
        for bit in (0, 6):
            yield case(f"bit {bit} flipped at {part}", _rewrite(_flip(part, bit), name))
    copied = _rewrite(lambda raw: raw, name) if same_before else _copied(name)
    # a whole manifest of another step is intact: it is the other files that it does not know
    yield case("copied from another step", copied, "step_" if name == MANIFEST else name)
    yield case(
        "swapped with another step", _swap(name), "step_" if name == MANIFEST else name, spoils=2
    )
    for what, raw in hostile.items():
        yield case(what, _rewrite(_constant(raw), name))
        if name in AT_MOST_BYTES and name != MANIFEST:
            yield case(f"{what}, vouched for", _vouched(name, raw))
    yield case("sparse 64 GiB", lambda bundle, _: os.truncate(bundle / name, 1 << 36))
    yield case("link to the same content", _linked(name))
    yield case("dangling link", _instead(lambda path: path.symlink_to("nowhere"), name))
    yield case("link to itself", _instead(lambda path: path.symlink_to(path.name), name))
    yield case("link to /dev/zero", _instead(lambda path: path.symlink_to("/dev/zero"), name))
    yield case("link to a directory", _instead(lambda path: path.symlink_to("/"), name))
    yield case("pipe", _instead(os.mkfifo, name))
    yield case("socket", _instead(_socket, name))
    yield case("directory", _instead(lambda path: path.mkdir(), name), mentions=name)
    for mode in (0o666, 0o622, 0o620, 0o602):
        yield case(f"mode {mode:o}", _mode(name, mode))


def _constant(raw: bytes) -> Callable[[bytes], bytes]:
    return lambda _: raw


def _copied(name: str) -> Damage:
    return lambda bundle, before: shutil.copyfile(before / name, bundle / name) and None


def _mode(name: str, mode: int) -> Damage:
    return lambda bundle, _: (bundle / name).chmod(mode)


def _vouched(name: str, raw: bytes) -> Damage:
    def apply(bundle: Path, before: Path) -> None:
        (bundle / name).write_bytes(raw)
        reseal(bundle)

    return apply


# directories ---------------------------------------------------------------------------


def of_directory(name: str) -> Iterator[Case]:
    """Damages of one directory inside a bundle, or, with `.`, of the bundle's own."""

    def case(what: str, apply: Damage, mentions: str | None = None) -> Case:
        return Case(f"{name}/: {what}", name if mentions is None else mentions, apply)

    inside = "" if name == "." else f"{name}/"

    def moved(bundle: Path) -> Path:
        return (bundle / name).rename(bundle.parent.parent / "elsewhere")

    def add(file: str, make: Callable[[Path], Any]) -> Damage:
        return lambda bundle, _: make(bundle / name / file)

    for mode in (0o777, 0o720, 0o702):
        yield case(f"mode {mode:o}", _mode(name, mode))
    for what, make in {
        "file": Path.touch,
        "pipe": os.mkfifo,
        "socket": _socket,
        "link": lambda path: path.symlink_to("/etc/passwd"),
        "dangling link": lambda path: path.symlink_to("nowhere"),
    }.items():
        yield case(f"extra {what}", add("extra", make), f"{inside}extra")
    yield case("extra file of odd name", add("a\nb\x1b", Path.touch), f"{inside}a\\nb\\x1b")
    yield case("extra file of no text", lambda b, _: _touch_bytes(b / name), inside)
    yield case("extra directories", add("d", _deep), f"{inside}d/")
    if name == ".":
        return
    yield case("missing", lambda bundle, _: shutil.rmtree(bundle / name))
    yield case("empty", lambda bundle, _: _emptied(bundle / name))
    yield case("file instead", lambda bundle, _: (moved(bundle), (bundle / name).touch()) and None)
    yield case("pipe instead", lambda bundle, _: (moved(bundle), os.mkfifo(bundle / name)) and None)
    yield case(
        "link to the same content",
        lambda bundle, _: (bundle / name).symlink_to(moved(bundle)),
    )
    yield case(
        "link to another step's", lambda bundle, before: _link_over(bundle / name, before / name)
    )


def _touch_bytes(directory: Path) -> None:
    os.close(os.open(os.path.join(os.fsencode(directory), b"\xff\xfe"), os.O_CREAT, 0o600))


def _deep(path: Path) -> None:
    for _ in range(40):
        path.mkdir()
        path = path / "d"


def _emptied(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir(mode=0o700)


def _link_over(path: Path, to: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to(to)


# the manifest --------------------------------------------------------------------------


def of_manifest(some_file: str) -> Iterator[Case]:
    """Manifests that are sealed as they should be, and say what they should not."""

    def case(what: str, spoils: int = 1, mentions: str = MANIFEST, **changes: Any) -> Case:
        return Case(f"manifest: {what}", mentions, lambda b, _: _resealed_with(b, changes), spoils)

    for name in ("../secret", "../../etc/passwd", "policy/../../secret", "/etc/passwd", ".",
                 "..", "./x", "policy//x", "", "/", "policy/", "x\0y"):  # fmt: skip
        yield case(f"lists {name!r}", add_file=name)
    yield case("lists a file that is not there", mentions="nobody", add_file="nobody")
    yield case("lists itself", mentions=MANIFEST, add_file=MANIFEST)
    yield case("leaves out a file", mentions=some_file, drop_file=some_file)
    yield case("says -1 bytes", size=-1)
    for size in (0, 1, 1 << 40, 1 << 62):
        yield case(f"says {size} bytes", mentions=some_file, size=size)
    yield case("another hash", mentions=some_file, sha256="0" * 64)
    yield case("a hash of no form", mentions=some_file, sha256="")
    yield case("another step", spoils=0, mentions="step", step=99)
    yield case("another version", spoils=0, mentions="weight_version", weight_version=99)
    yield case("another digest", spoils=0, mentions="digest", cut_digest="0" * 64)
    for schema in ("bundle.v0", "bundle.v2", ""):
        yield case(f"schema {schema!r}", spoils=0, mentions=f"schema {schema}", schema=schema)
    for what, change in {
        "unknown key": lambda body: body | {"note": "trust me"},
        "no files": lambda body: {k: v for k, v in body.items() if k != "files"},
        "files as a list": lambda body: body | {"files": []},
        "a size in words": lambda body: body | {"files": {some_file: {"size": "1", "sha256": ""}}},
        "step in words": lambda body: body | {"step": "six"},
        "huge step": lambda body: body | {"step": 10**30},
    }.items():
        yield Case(f"manifest: {what}", MANIFEST, _resealed_body(change))
    yield Case("manifest: a name twice", MANIFEST, _name_twice(some_file))


def _resealed_with(bundle: Path, changes: dict[str, Any]) -> None:
    manifest = open_manifest((bundle / MANIFEST).read_bytes(), None, bundle.name)
    files = dict(manifest.files)
    seal = files[CONFIG]
    some_file = next(name for name in files if name != CONFIG and "/" in name)
    if "add_file" in changes:
        files[changes.pop("add_file")] = seal
    if "drop_file" in changes:
        del files[changes.pop("drop_file")]
    for field in ("size", "sha256"):
        if field in changes:
            changed = {field: changes.pop(field)}
            files[some_file] = msgspec.structs.replace(files[some_file], **changed)
    reseal(bundle, files=files, **changes)


def _resealed_body(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Damage:
    def apply(bundle: Path, before: Path) -> None:
        sealed = json.loads((bundle / MANIFEST).read_bytes())
        _seal_raw(bundle, json.dumps(change(sealed["manifest"]), indent=1).encode())

    return apply


def _name_twice(name: str) -> Damage:
    """The same name twice in the JSON object: readers differ on which one counts."""

    def apply(bundle: Path, before: Path) -> None:
        sealed = json.loads((bundle / MANIFEST).read_bytes())
        body = json.dumps(sealed["manifest"]).encode()
        twice = json.dumps(name) + ': {"size": 1, "sha256": "' + "0" * 64 + '"}, '
        _seal_raw(bundle, body.replace(b'"files": {', b'"files": {' + twice.encode()))

    return apply


def _seal_raw(bundle: Path, body: bytes) -> None:
    import hashlib

    digest = hashlib.sha256(body).hexdigest()
    raw = b'{"manifest":' + body + b',"hmac_sha256":null,"sha256":"' + digest.encode() + b'"}'
    (bundle / MANIFEST).write_bytes(raw)


# all of it -----------------------------------------------------------------------------


SHORT = frozenset({"missing", "empty", "cut at 0.5", "last byte lost", "bit 0 flipped at 0.5",
                   "copied from another step", "swapped with another step", "pickle", "torch-file",
                   "sparse 64 GiB", "link to the same content", "pipe", "mode 666"})  # fmt: skip


def corpus(directory: Path, marker: Path, *, short: bool = False) -> Iterator[Case]:
    """Cases for the newest bundle in `directory`, which holds three; `short`: fewer per file."""
    bundle, before = _newest(directory)
    hostile = contents(marker)
    files = sorted(
        file.relative_to(bundle).as_posix() for file in bundle.rglob("*") if file.is_file()
    )
    for name in files:
        theirs = before / name
        same = theirs.is_file() and theirs.read_bytes() == (bundle / name).read_bytes()
        if theirs.is_file():
            for case in of_file(name, same, hostile):
                if not short or case.name.removeprefix(f"{name}: ") in SHORT:
                    yield case
    for path in sorted(bundle.rglob("*")):
        if path.is_dir():
            yield from of_directory(path.relative_to(bundle).as_posix())
    yield from of_directory(".")
    yield from of_manifest(next(name for name in files if "/" in name))


def step_of_newest_valid(directory: Path) -> int | None:
    found = newest_valid(directory, on_refused=lambda name, reason: None)
    return None if found is None else found.step


def judge(
    case: Case,
    pristine: Path,
    scratch: Path,
    marker: Path,
    resume: Callable[[Path], int | None] = step_of_newest_valid,
) -> Verdict:
    """Damage a copy as `case` says and look at it; `resume` gives the step gone on from.

    Raises:
        AssertionError: it was taken for a good one, the error does not name what is wrong, a
            resume would not fall back as it should, or looking at it cost too much.
    """
    directory = _fresh(pristine, scratch)
    bundle, before = _newest(directory)
    sound = _tree(bundle)
    steps = sorted((int(path.name[5:]) for path in directory.glob("step_*")), reverse=True)
    if case.spoils > 1:
        (scratch / SPOILT).touch()
    case.apply(bundle, before)
    with looked_at(case):
        try:
            verify(bundle)
        except RestoreError as exc:
            error: RestoreError | None = exc
        else:
            error = None
    assert not marker.exists(), f"{case.name}: it ran code"
    if error is None:
        assert _tree(bundle) == sound, f"{case.name}: accepted"
        return "harmless"
    assert bundle.name in str(error), f"{case.name}: {error}"
    assert case.mentions in str(error), f"{case.name}: names something else: {error}"
    with looked_at(case):
        try:
            step = resume(directory)
        except NoValidBundle:
            raise
        except RestoreError as exc:
            assert case.spoils == 0 and str(exc) == str(error), f"{case.name}: {exc}"
            return "refused"
    assert step == steps[case.spoils], f"{case.name}: went on from {step}"
    assert not marker.exists(), f"{case.name}: it ran code"
    return "refused"


def _fresh(pristine: Path, scratch: Path) -> Path:
    """A copy of `pristine` in `scratch`, where only the newest bundle has to be copied again."""
    directory = scratch / "checkpoints"
    if directory.exists() and not (scratch / SPOILT).exists():
        newest = _newest(directory)[0]
        shutil.rmtree(newest)
        shutil.copytree(pristine / newest.name, newest)
        _remove(scratch / "elsewhere")
    else:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(mode=0o700)
        shutil.copytree(pristine, directory)
    return directory


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _newest(directory: Path) -> tuple[Path, Path]:
    bundles = sorted(directory.glob("step_*"), key=lambda path: int(path.name[5:]))
    assert len(bundles) == 3
    return bundles[-1], bundles[-2]


def _tree(bundle: Path) -> dict[str, FileSeal]:
    return {
        path.relative_to(bundle).as_posix(): FileSeal(*LOCAL.sha256(path))
        for path in bundle.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


@contextmanager
def looked_at(case: Case) -> Iterator[None]:
    """Bounds memory and time of what happens inside."""

    def hangs(*_: object) -> None:
        raise AssertionError(f"{case.name}: looking at it takes longer than {AT_MOST_S} s")

    was = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(AT_MOST_S)
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, was)
    assert peak < AT_MOST_TRACED, f"{case.name}: took {peak:,} bytes of memory"
