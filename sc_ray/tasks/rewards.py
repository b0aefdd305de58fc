"""Reward functions, and how a configuration names one."""

from __future__ import annotations

import difflib
import importlib
from typing import cast

from sc_core import (
    ConfigError,
)
from sc_ray.tasks.task import Reward


def exact_match(prompt: str, completion: str, answer: str) -> float:
    """1 for the answer, apart from space around it, else 0."""
    return float(completion.strip() == answer.strip())


def load_reward(spec: str) -> Reward:
    """The function that `module:function` names; the module is imported.

    Raises:
        ConfigError: the name is malformed, or the module or the function is not there.
    """
    module_name, colon, function_name = spec.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(f"reward {spec!r} is not of the form module:function")
    try:
        module = importlib.import_module(module_name)
    except Exception as exc:  # the module is the user's: its import may raise anything
        reason = f"{type(exc).__name__}: {exc}"
        raise ConfigError(f"reward {spec!r}: importing {module_name} failed: {reason}") from exc
    found = vars(module).get(function_name)
    if callable(found):
        return cast("Reward", found)
    if found is not None:
        raise ConfigError(
            f"reward {spec!r}: {function_name} is a {type(found).__name__}, not a function"
        )
    functions = [name for name, value in vars(module).items() if callable(value)]
    near = difflib.get_close_matches(function_name, functions, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"reward {spec!r}: {module_name} has no function {function_name}{hint}")
