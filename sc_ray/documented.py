"""What the source says of the fields of a Struct: the `#:` behind one, or the text below it."""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from collections.abc import Iterator
from functools import cache

import msgspec

_MARK = "#:"


@cache
def field_docs(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The documentation of each field that has some, by its name; those of base classes, too."""
    found: dict[str, str] = {}
    for cls in reversed(struct.__mro__):
        if issubclass(cls, msgspec.Struct) and cls.__struct_fields__:
            found |= _own_docs(cls)
    return found


def class_doc(struct: type[msgspec.Struct]) -> str:
    """The first paragraphs of a class's own docstring, without what follows a heading."""
    own = struct.__dict__.get("__doc__") or ""
    text, *_ = inspect.cleandoc(own).partition("\n\nRaises:")
    return "" if text.startswith("Raises:") else text


def documented(struct: type[msgspec.Struct], at: str = "") -> Iterator[tuple[str, str]]:
    """The dotted path and the documentation of every field, Structs within it included.

    What a Struct says of itself is part of the documentation of the field that holds it.
    """
    docs = field_docs(struct)
    for field in msgspec.structs.fields(struct):
        path = f"{at}{field.encode_name}"
        inner = field.type
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            yield path, "\n\n".join(filter(None, (docs.get(field.name), class_doc(inner))))
            yield from documented(inner, f"{path}.")
        else:
            yield path, docs.get(field.name, "")


def _own_docs(cls: type) -> dict[str, str]:
    try:
        source = inspect.cleandoc(f"\n{inspect.getsource(cls)}")
    except (OSError, TypeError):  # no source came with it, or it was made at run time
        return {}
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    behind = {
        token.start[0]: token.string.removeprefix(_MARK).strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and token.string.startswith(_MARK)
    }
    docs: dict[str, str] = {}
    for number, node in enumerate(tree.body):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        below = tree.body[number + 1] if number + 1 < len(tree.body) else None
        text = behind.get(node.end_lineno or node.lineno, "")
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            if isinstance(below.value.value, str):
                text = inspect.cleandoc(below.value.value)
        if text:
            docs[node.target.id] = text
    return docs
