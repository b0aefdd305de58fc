"""Ports that go wrong on purpose: the same few faults for any call of any port.

struck = strike(trainer, "finish_step", hangs, when=lambda number: number == 2)
with pytest.raises(CallTimeout, match=r"trainer\\.finish_step"):
    await controller.run()
assert struck.strikes == 1
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import Any, NoReturn

import anyio
import anyio.lowlevel

Fault = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""Stands between a caller and a port: is given the real call, and makes it, or does not."""


class Struck:
    """How often a call was made, and went wrong."""

    def __init__(self) -> None:
        self.calls = 0
        self.strikes = 0
        self.first_at = 0.0  #: when it went wrong first, on the clock of the event loop


def strike(
    port: object, call: str, fault: Fault, *, when: Callable[[int], bool] = lambda number: True
) -> Struck:
    """Let `fault` have those calls of `port.call`, counted from 1, to which `when` says yes.

    A synchronous call can take the faults that never wait.
    """
    real, struck = getattr(port, call), Struck()

    def is_struck() -> bool:
        struck.calls += 1
        if not when(struck.calls):
            return False
        struck.strikes += 1
        if struck.strikes == 1:
            struck.first_at = anyio.current_time()
        return True

    @wraps(real)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        made = partial(real, *args, **kwargs)
        return await (fault(made) if is_struck() else made())

    @wraps(real)
    def at_once(*args: Any, **kwargs: Any) -> Any:
        async def made() -> Any:
            return real(*args, **kwargs)

        return _without_waiting(fault(made)) if is_struck() else real(*args, **kwargs)

    setattr(port, call, awaited if inspect.iscoroutinefunction(real) else at_once)
    return struck


def raises(error: BaseException) -> Fault:
    """The call fails and has no effect."""

    async def fault(call: Callable[[], Awaitable[Any]]) -> NoReturn:
        raise error

    return fault


def raises_late(error: BaseException) -> Fault:
    """The call has its effect, and its answer is lost."""

    async def fault(call: Callable[[], Awaitable[Any]]) -> NoReturn:
        await call()
        raise error

    return fault


async def hangs(call: Callable[[], Awaitable[Any]]) -> NoReturn:
    """The call does nothing, for ever."""
    await anyio.sleep_forever()
    raise AssertionError


async def is_cancelled(call: Callable[[], Awaitable[Any]]) -> NoReturn:
    """The call ends as cancelled although nobody cancelled it, as by an executor that shut down."""
    stray: BaseException | None = None
    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await anyio.lowlevel.checkpoint()
        except anyio.get_cancelled_exc_class() as exc:
            stray = exc
    assert stray is not None
    raise stray.with_traceback(None)


def answers(change: Callable[[Any], Any]) -> Fault:
    """The call has its effect, and the answer is another one."""

    async def fault(call: Callable[[], Awaitable[Any]]) -> Any:
        return change(await call())

    return fault


def skipped(answer: Any = None) -> Fault:
    """The call says that it is done, and has done nothing."""

    async def fault(call: Callable[[], Awaitable[Any]]) -> Any:
        return answer

    return fault


def minds_no_cancel(for_s: float) -> Fault:
    """The call takes that long, whoever cancels it, and succeeds."""

    async def fault(call: Callable[[], Awaitable[Any]]) -> Any:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(for_s)
            return await call()

    return fault


def answers_a_cancel(answer: object) -> Fault:
    """The call hangs until it is cancelled; then it returns `answer`, or raises it."""

    async def fault(call: Callable[[], Awaitable[Any]]) -> Any:
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            if isinstance(answer, BaseException):
                raise answer from None
            return answer

    return fault


def _without_waiting(made: Awaitable[Any]) -> Any:
    steps = made.__await__()
    try:
        next(iter(steps))
    except StopIteration as over:
        return over.value
    raise TypeError("a synchronous call can't wait: this fault is for calls that are awaited")
