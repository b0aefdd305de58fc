"""What vLLM says when it can't start, in one line."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

_ERROR = re.compile(r"(?:^|\s)((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): .+)")
_PYDANTIC = re.compile(
    r"\[type=.*?input_type=\w+\]|For further information visit \S+|Value error,", re.DOTALL
)


def in_one_line(told: str) -> str:
    """Without line breaks, nor what pydantic adds for programmers."""
    return " ".join(_PYDANTIC.sub("", told).split())


class Written:
    """What this process and its children have written since, where their output is a file.

    Ray makes it one. The process that vLLM starts tells the reason of its end nowhere else.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        for output in (1, 2):
            with suppress(OSError):  # it is closed
                self._sizes[output] = os.fstat(output).st_size

    def last_error(self) -> str:
        """The last line that tells of an exception, from its type on; empty if there is none."""
        found = ""
        for output, size in self._sizes.items():
            path = Path(f"/proc/self/fd/{output}")
            if path.is_file():
                with suppress(OSError), path.open(errors="replace") as file:
                    file.seek(size)
                    for line in file:
                        said = _ERROR.search(line)
                        found = said[1].strip() if said else found
        return found
