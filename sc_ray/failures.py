"""How a failure leaves the controller's process: as text that always arrives."""

from __future__ import annotations

import traceback

from sc_core import (
    CallTimeout,
    ScError,
    root_cause,
)

_AT_MOST_CHARACTERS = 100_000
"""Of a traceback: the newest part of a very deep one is enough, and Ray sends it in one piece."""


class ControllerFailed(ScError, RuntimeError):
    """The run ended with an error: its root cause, told in plain text.

    Text crosses any process boundary. The original may hold a lock, need arguments that nobody
    has at the other end, or be a group that Ray can't rebuild.
    """

    def __init__(
        self,
        type_name: str,
        message: str,
        traceback_text: str = "",
        cancelled: bool = False,
        may_still_write: bool = False,
    ) -> None:
        super().__init__(type_name, message, traceback_text, cancelled, may_still_write)
        self.type_name = type_name  #: of the root cause
        self.message = message  #: of the root cause
        self.traceback_text = traceback_text  #: of everything, groups and causes included
        self.cancelled = cancelled  #: nothing failed: somebody cancelled the run from outside
        self.may_still_write = may_still_write  #: a call outlived its deadline; its process ends

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}" if self.message else self.type_name

    @classmethod
    def of(cls, error: BaseException) -> ControllerFailed:
        """Tell of `error`, whatever it is and whatever it holds."""
        root = root_cause(error)
        try:
            message = str(root)
        except Exception as exc:  # its own __str__ is broken
            message = f"(no message: {type(exc).__name__} in its __str__)"
        return cls(
            type(root).__name__,
            message,
            "".join(traceback.format_exception(error))[-_AT_MOST_CHARACTERS:],
            # both backends cancel by a BaseException that is none of Python's own
            not isinstance(root, Exception | KeyboardInterrupt | SystemExit | GeneratorExit),
            _holds_call_timeout(error),
        )


def _holds_call_timeout(error: BaseException) -> bool:
    """Whether a call outlived its deadline, also if a later error only names it as its cause."""
    seen: set[int] = set()
    rest: list[BaseException | None] = [error]
    while rest:
        one = rest.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, CallTimeout):
            return True
        rest += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            rest += one.exceptions
    return False
