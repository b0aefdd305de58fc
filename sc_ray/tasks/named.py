"""What a configuration names as `module:name`."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from sc_core import (
    ConfigError,
)


def load_named(kind: str, form: str, spec: str) -> Any:
    """The function or class that `spec` names; its module is imported.

    `kind` and `form` say in errors what was looked for: "reward" and "function", for one.

    Raises:
        ConfigError: the name is malformed, or the module or what it should hold is not there.
    """
    module_name, colon, name = spec.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"{kind} {spec!r} is not of the form module:{form}")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as exc:  # the module is the user's: it may raise anything
        reason = f"{type(exc).__name__}: {exc}"
        raise ConfigError(f"{kind} {spec!r}: importing {module_name} failed: {reason}") from exc
    found = vars(module).get(name)
    if callable(found):
        return found
    if found is not None:
        raise ConfigError(f"{kind} {spec!r}: {name} is a {type(found).__name__}, not a {form}")
    callables = [other for other, value in vars(module).items() if callable(value)]
    near = difflib.get_close_matches(name, callables, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"{kind} {spec!r}: {module_name} has no {form} {name}{hint}")
