"""Libraries that take seconds to import, imported when they are first used.

    if TYPE_CHECKING:
        import torch
    else:
        torch = lazy("torch")

A mistake in the settings is then told in a second, and a process loads no more than its own part
of the work needs.
"""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_one_at_a_time = threading.RLock()


class _Lazy:
    """Stands for a module until one of its names is asked for, and hands that on ever after."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._module is None:
            with much_is_imported():
                self._module = importlib.import_module(self._name)
        return getattr(self._module, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return lazy, (self._name,)


def lazy(name: str) -> Any:
    """The module of that name, to be imported at its first use."""
    return _Lazy(name)


@contextmanager
def much_is_imported() -> Iterator[None]:
    """Do without garbage collections while modules are imported.

    What is made then is kept. Looking through all of it, again and again, takes a fifth of the
    time of such an import.
    """
    with _one_at_a_time:
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()
