"""Every code block of the documentation does what it says. Pages that need Ray: tests/ray."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_page import PAGES, Block, Reader, blocks_of, commands_of, expect, needs_ray


@pytest.mark.parametrize("page", [p for p in PAGES if not needs_ray(p)], ids=lambda p: p.name)
def test_the_page_is_true(page: Path, tmp_path: Path) -> None:
    Reader(page, tmp_path).read()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors_of(there), f"{page.name} links to {target}"


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# the reader itself ---------------------------------------------------------------------


def test_notes_belong_to_the_fence_after_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- varies -->\n```\na\n```\n\n<!-- lost -->\n\ntext\n\n```python\nb\n```\n")
    assert blocks_of(page) == [Block("", "a\n", 2, "varies"), Block("python", "b\n", 10, "")]


def test_commands_and_their_output() -> None:
    assert commands_of("$ a\n1\n2\n$ b\n") == [("a", "1\n2\n"), ("b", "")]


@pytest.mark.parametrize(
    ("shown", "got", "figures", "agree"),
    [
        ("a 1.5 s\n", "a 1.5 s\n", True, True),
        ("a 1.5 s\n", "a 2.5 s\n", True, False),
        ("a 1.5 s\n", "a 22 s\n", False, True),
        ("a 1.5 s\n", "b 1.5 s\n", False, False),
        ("a … c\n", "a b c\n", True, True),
        ("a\n…\nd\n", "a\nb\nc\nd\n", True, True),
        ("a\n…\nd\n", "a\nd\n", True, True),
        ("a\n", "a\nb\n", True, False),
    ],
)
def test_an_output_is_compared(shown: str, got: str, figures: bool, agree: bool) -> None:
    if agree:
        expect(shown, got, figures=figures)
    else:
        with pytest.raises(AssertionError):
            expect(shown, got, figures=figures)


@pytest.mark.parametrize(
    "text",
    [
        "```python\nraise ValueError\n```\n",
        "```python\nprint(1)\n```\n\n```\n2\n```\n",
        "```console\n$ false\n```\n",
        "```console\n$ echo 1\n2\n```\n",
        "```console\n$ false | cat\n```\n",
        "```console\n$ echo 1; false; echo 2\n```\n",
        "```rust\n```\n",
        "text\n\n    python -m sc_core dance\n",
        "<!-- see tests/test_audit.py -->\n```\n```\n",
    ],
)
def test_a_page_that_is_not_true_is_found_out(text: str, tmp_path: Path) -> None:
    page = tmp_path / "untrue.md"
    page.write_text(text)
    with pytest.raises(AssertionError, match=r"untrue\.md:\d"):
        Reader(page, tmp_path).read()


def test_blocks_share_their_names_and_their_directory(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nfrom pathlib import Path\nPath('a').write_text('b')\n```\n\n"
        "```console\n$ cat a\nb\n```\n\n```python\nprint(Path('a').read_text())\n```\n\n"
        "```\nb\n```\n"
    )
    Reader(page, tmp_path).read()
