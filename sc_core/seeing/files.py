"""Files that are there as a whole, or as they were before."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A file to write; it takes the place of `path` when the body ends without an error.

    Raises:
        OSError: it can't be written; `path` is as it was.
    """
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    staged = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with staged.open("wb") as file:
            yield file
        os.replace(staged, path)
    except BaseException:
        with suppress(OSError):
            staged.unlink()
        raise
