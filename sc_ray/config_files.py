"""Configuration files: how they are found, read, and merged with their parents and `key=value`.

YAML, with two deviations from YAML 1.1: `1e-3` is a number, and `10:00` is text. Merging and
interpolation (`${grpo.num_prompts_per_step}`, `${oc.env:HOME}`) are OmegaConf's.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sc_core import (
    ConfigError,
)

COMMAND_LINE = "command line"  #: named as the source of what is wrong with a `key=value`
PARENT = "defaults"
"""At the top of a file: another one, or several, that it changes. Beside it, or built in."""
_BUILT_IN = resources.files("sc_ray") / "configs"
_WHILE = re.compile(r"\w+ raised while resolving interpolation: \"?(.*?)\"?$")
_SIGN = re.compile(r"\++|~+")  #: of Hydra: every key can be set here, and none be taken away
_ESCAPED = re.compile(r"(\\*)(\$\{)")
_DEEPEST = 40
"""Levels of a file. Settings have five; what merges them recurses, some 15 frames for a level."""


class Layer(msgspec.Struct, frozen=True):
    """Settings from one place; later layers change earlier ones."""

    source: str  #: the file, or the command line; errors name it
    data: dict[str, Any]


def builtin_configs() -> list[str]:
    """The names of the configurations that come with the package."""
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in _BUILT_IN.iterdir()
        if entry.name.endswith(".yaml")
    )


def read_layers(source: str) -> list[Layer]:
    """A file, or the built-in one of that name, after those that its `defaults` names.

    Raises:
        ConfigError: one of them is not there, can't be read, is no mapping, or is its own parent.
    """
    return _read(source, None, ())


def override_layer(pairs: Sequence[str], below: Sequence[Layer]) -> Layer:
    """What `key=value` pairs, with dotted keys and values in YAML, change of the layers `below`.

    Raises:
        ConfigError: not of that form, not YAML, or a key of something that has none.
    """
    data: dict[str, Any] = {}
    known = [layer.data for layer in below]
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if sign := _SIGN.match(key):
            raise ConfigError(f"{COMMAND_LINE}: {pair!r}: leave out {sign[0]}, and write key=value")
        *parents, last = key.split(".")
        if not equals or not all((*parents, last)):
            raise ConfigError(f"{COMMAND_LINE}: {pair!r} is not of the form key=value")
        at = data
        for depth, name in enumerate(parents, 1):
            inner = at.get(name, _under(known, parents[:depth]))
            if not isinstance(inner, dict):
                section = ".".join(parents[:depth])
                raise ConfigError(f"{COMMAND_LINE}: {section} is {inner!r} and has no key {last}")
            at = at.setdefault(name, {})
        value = parse_yaml(text, f"{COMMAND_LINE}: {key}")
        if isinstance(value, dict) and isinstance(at.get(last), dict):
            with _told_of(f"{COMMAND_LINE}: {key}"):
                value = _container(_merged([at[last], value]), resolve=False)
        at[last] = value
    return Layer(COMMAND_LINE, data)


def merge(layers: Sequence[Layer]) -> dict[str, Any]:
    """One mapping from all layers, with every interpolation resolved.

    Mappings are merged key by key; anything else, lists too, is replaced.

    Raises:
        ConfigError: an interpolation of what is not there, with the key that has it.
    """
    with _told_of(layers[-1].source):
        return _container(_merged([layer.data for layer in layers]), resolve=True)


def parse_yaml(text: str, source: str) -> Any:
    """Plain data from YAML.

    Raises:
        ConfigError: it is none; says where. Or it is too deep.
    """
    try:
        data = yaml.load(text, _Loader)  # a SafeLoader
        _check_depth(data, _DEEPEST)
        return data
    except RecursionError as exc:
        raise ConfigError(f"{source}: more than {_DEEPEST} levels deep, or part of itself") from exc
    except yaml.MarkedYAMLError as exc:
        line = f":{exc.problem_mark.line + 1}" if exc.problem_mark else ""
        raise ConfigError(f"{source}{line}: not YAML: {exc.problem}") from exc
    except yaml.YAMLError as exc:
        raise ConfigError(f"{source}: not YAML: {str(exc).splitlines()[0]}") from exc


def yaml_value(value: Any) -> str:
    """Plain data on one line of YAML, which `read_layers` takes for the same again."""
    text: str = yaml.dump(
        _escaped(value), Dumper=_Dumper, default_flow_style=True, width=10**9, allow_unicode=True
    )
    return text.removesuffix("...\n").rstrip("\n")


def _read(source: str, child: Path | None, heirs: tuple[str, ...]) -> list[Layer]:
    text, path = _text_of(source, child)
    name = source if path is None else str(path)
    if name in heirs:
        raise ConfigError(f"{heirs[-1]}: {PARENT}: {' -> '.join((*heirs, name))} goes in a circle")
    data = parse_yaml(text, name)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: a mapping of settings was expected, not {data!r:.60}")
    parents = data.pop(PARENT, None)
    layers: list[Layer] = []
    for parent in parents if isinstance(parents, list) else [parents]:
        if parent is None:
            continue
        if not isinstance(parent, str):
            raise ConfigError(f"{name}: {PARENT} is the name of a file, or a list of such")
        layers += _read(parent, path, (*heirs, name))
    return [*layers, Layer(name, data)]


def _text_of(source: str, child: Path | None) -> tuple[str, Path | None]:
    """The text, and the path unless it is built in."""
    path = Path(source) if child is None else Path(os.path.normpath(child.parent / source))
    built_in = builtin_configs()
    if source in built_in and (child is None or not _is_file(path)):
        return (_BUILT_IN / f"{source}.yaml").read_text(), None
    if _is_file(path):
        try:
            return path.read_text(), path
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{path} can't be read: {exc}") from exc
    near = difflib.get_close_matches(source, built_in, n=1)
    hint = f"did you mean {near[0]}?" if near else f"built in are {', '.join(built_in)}"
    asked = "" if child is None else f"{child}: {PARENT}: "
    missing = source if child is None else path
    raise ConfigError(
        f"{asked}there is no configuration {missing}, neither a file nor built in; {hint}"
    )


def _under(known: Sequence[dict[str, Any]], keys: Sequence[str]) -> Any:
    """What the last of these mappings that has it has there; a mapping where none has."""
    for data in reversed(known):
        at: Any = data
        for key in keys:
            at = at.get(key) if isinstance(at, dict) else None
        if at is not None:
            return at
    return {}


def _merged(mappings: Sequence[dict[str, Any]]) -> DictConfig:
    merged = OmegaConf.merge(*(OmegaConf.create(mapping) for mapping in mappings))
    assert isinstance(merged, DictConfig)
    return merged


def _check_depth(value: Any, levels: int) -> None:
    if isinstance(value, dict | list):
        if not levels:
            raise RecursionError
        for inner in value.values() if isinstance(value, dict) else value:
            _check_depth(inner, levels - 1)


@contextmanager
def _told_of(source: str) -> Iterator[None]:
    """What OmegaConf refuses, as a `ConfigError`."""
    try:
        yield
    except OmegaConfBaseException as exc:
        first = _WHILE.sub(r"\1", str(exc).splitlines()[0])
        key = f"{exc.full_key}: " if exc.full_key else ""
        raise ConfigError(f"{source}: {key}{first}") from exc


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # its name is too long, say
        return False


def _container(merged: DictConfig, *, resolve: bool) -> dict[str, Any]:
    data = OmegaConf.to_container(merged, resolve=resolve, throw_on_missing=resolve)
    assert isinstance(data, dict)
    return data  # type: ignore[return-value]  # keys that are not text are refused by `decode`


def _escaped(value: Any) -> Any:
    """Text that looks like an interpolation and is none is marked as such."""
    if isinstance(value, str):
        return _ESCAPED.sub(r"\1\1\\\2", value)
    if isinstance(value, dict):
        return {key: _escaped(inner) for key, inner in value.items()}
    return [_escaped(inner) for inner in value] if isinstance(value, list | tuple) else value


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes 1e-3 for text and 10:00 for 600; here they are a number and text."""

    yaml_implicit_resolvers = {
        first: [
            pair
            for pair in pairs
            if pair[0] not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp")
        ]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as exc:  # `!!int x`, or too many digits
            told = f"{node.value!r:.40} is no {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, told, node.start_mark) from exc


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"([-+]?(0[0-7]*|[1-9][0-9]*)|0x[0-9a-fA-F]+)$"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would take for something else than text."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def represent_text(self, text: str) -> yaml.Node:
        breaks = len(f"{text}.".splitlines()) > 1  # folded otherwise, and U+0085 read as another
        return self.represent_scalar("tag:yaml.org,2002:str", text, '"' if breaks else None)


_Dumper.add_representer(str, _Dumper.represent_text)
