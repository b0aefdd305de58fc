"""Every public name says what it is: a docstring, or `#:` beside an assignment or a field."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

import sc_core
from sc_core.config import ControllerConfig

ROOT = Path(sc_core.__file__).parent
Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> dict[str, str]:
    """The module of each public name."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    return {
        alias.name: statement.module.removeprefix("sc_core.")
        for statement in tree.body
        if isinstance(statement, ast.ImportFrom) and statement.module is not None
        for alias in statement.names
    }


def name_of(statement: ast.stmt) -> str:
    match statement:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
            return name
    return ""


def is_said(body: Sequence[ast.stmt], at: int, lines: list[str]) -> bool:
    """Whether something is said about a statement of `body`."""
    statement = body[at]
    if isinstance(statement, ast.ClassDef | Function):
        return ast.get_docstring(statement) is not None
    after = body[at + 1] if at + 1 < len(body) else None
    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
        return True
    return "#:" in lines[(statement.end_lineno or statement.lineno) - 1]


def unsaid(body: Sequence[ast.stmt], lines: list[str], names: set[str] | None) -> Iterator[str]:
    """Public names of `body`, or those given, that nothing is said about; and so on inside."""
    for at, statement in enumerate(body):
        name = name_of(statement)
        if not name or name.startswith("_") or (names is not None and name not in names):
            continue
        if not is_said(body, at, lines):
            yield name
        if isinstance(statement, ast.ClassDef):
            for inner in unsaid(statement.body, lines, None):
                yield f"{name}.{inner}"


def test_every_public_name_method_and_field_is_documented() -> None:
    found, bare = set[str](), []
    for module in sorted(set(modules().values())):
        at = ROOT / module.replace(".", "/")
        source = (at / "__init__.py" if at.is_dir() else at.with_suffix(".py")).read_text()
        tree = ast.parse(source)
        names = {name for name, where in modules().items() if where == module}
        found |= names & {name_of(statement) for statement in tree.body}
        bare += list(unsaid(tree.body, source.splitlines(), names))
    assert found == set(sc_core.__all__)
    assert bare == []


def test_the_types_that_settings_and_samplers_are_made_of_are_public() -> None:
    def inside(settings: type[msgspec.Struct]) -> Iterator[str]:
        yield settings.__name__
        for field in msgspec.structs.fields(settings):
            if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
                yield from inside(field.type)

    assert {*inside(ControllerConfig)} <= {*sc_core.__all__}
    assert {"IndexView", "LedgerRecord", "SamplerView"} <= {*sc_core.__all__}
    assert sc_core.__all__ == sorted(sc_core.__all__)
