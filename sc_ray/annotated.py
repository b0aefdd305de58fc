"""A run's settings as YAML that says of each key what it is, and that loads again."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

import msgspec

from sc_ray.config_files import yaml_value
from sc_ray.documented import class_doc, field_docs
from sc_ray.settings import TrainConfig

_COLUMNS = 100


def annotated(config: TrainConfig) -> str:
    """All settings, documented: `# type; default` behind a key, what it does above it."""
    return "\n".join(_lines(config, 0)) + "\n"


def plain(config: msgspec.Struct) -> str:
    """All settings as YAML, without a word."""
    return "\n".join(_lines(config, 0, silent=True)) + "\n"


def type_text(kind: Any) -> str:
    """A type as people write it: `int or null`, `one of drop, requeue`."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    parts = [type_text(part) for part in get_args(kind) if part is not ...]
    if kind is None or kind is type(None):
        return "null"
    if get_origin(kind) in (list, tuple):
        return f"list of {parts[0]}"
    if get_origin(kind) is Mapping:
        return "mapping" if parts[-1] == "any" else f"mapping of {parts[-1]}"
    if parts:
        return " or ".join(parts)
    return {int: "int", float: "number", str: "text", bool: "true or false", Any: "any"}[kind]


def _lines(settings: msgspec.Struct, depth: int, *, silent: bool = False) -> Iterator[str]:
    indent = "  " * depth
    docs = field_docs(type(settings))
    for field in msgspec.structs.fields(settings):
        value = getattr(settings, field.name)
        doc = docs.get(field.name, "")
        if isinstance(value, msgspec.Struct):
            if depth == 0 and not silent:
                yield ""
            if not silent:
                yield from _comment(class_doc(type(value)) or doc, indent)
            yield f"{indent}{field.encode_name}:"
            yield from _lines(value, depth + 1, silent=silent)
            continue
        line = f"{indent}{field.encode_name}: {yaml_value(msgspec.to_builtins(value))}"
        if silent:
            yield line
            continue
        if depth == 0:
            yield ""
        yield from _comment(doc, indent)
        told = type_text(field.type)
        default = _default(field)
        if default != value:
            told += f"; default {yaml_value(msgspec.to_builtins(default))}"
        yield f"{line}  # {told}"


def _default(field: msgspec.structs.FieldInfo) -> Any:
    made = field.default_factory
    return field.default if made is msgspec.NODEFAULT else made()


def _comment(text: str, indent: str) -> Iterator[str]:
    """`text` in comment lines; paragraphs stay apart, and so do the items of a list."""
    first = True
    text = re.sub(r"\bNone\b", "null", text)  # as YAML has it
    for paragraph in filter(None, text.split("\n\n")):
        if not first:
            yield f"{indent}#"
        first = False
        for item in paragraph.replace("\n- ", "\n\0- ").split("\n\0"):
            yield from textwrap.wrap(
                " ".join(item.split()),
                _COLUMNS,
                initial_indent=f"{indent}# ",
                subsequent_indent=f"{indent}#   " if item.startswith("- ") else f"{indent}# ",
                break_long_words=False,
                break_on_hyphens=False,
            )
