"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_ten_lines_print_what_stands_below_them() -> None:
    example = re.search(
        r"```python\n(import anyio\n.*?)```\n\n```\n(.*?)```", README.read_text(), re.S
    )
    assert example is not None
    done = subprocess.run(
        [sys.executable, "-c", example[1]], capture_output=True, text=True, check=True
    )
    assert done.stdout == example[2]
