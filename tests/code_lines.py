"""Counts code lines of each room beside the commit before: `python -m tests.code_lines`; fails above the budget.

A code line has a token that is neither comment nor docstring. The budget is `max_code_lines` in pyproject.toml, for
the Python files of the product; whoever raises it says in the commit what the lines buy. C++ is counted beside it,
without blank lines and comments.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Callable
from functools import cache

from heterps_core.text_table import Table
from tests.paths import PROJECT

PRODUCT = ("heterps", "heterps_core", "infra", "tasks", "flows")
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Return how many lines of a Python file have code.

    Example:
        >>> code_lines('\"\"\"A module.\"\"\"\\n\\n# Why.\\nvalue = [\\n    1,\\n]\\n')
        3
    """
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        # Texts that stand alone are docstrings, also those of fields.
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def cpp_lines(source: str) -> int:
    """Return how many lines of a C++ file have code; it has no comments but those of two slashes."""
    return sum(bool(line.strip()) and not line.lstrip().startswith("//") for line in source.splitlines())


def lines_by_room(commit: str) -> Counter[str]:
    """Return the code lines of each room in a commit."""
    counted: Counter[str] = Counter()
    for line in git("ls-tree", "-r", commit).splitlines():
        entry, path = line.split("\t")
        room = path.partition("/")[0]
        if path.endswith(".py") and room in (*PRODUCT, "tests"):
            room = "tests/benchmarks" if path.startswith("tests/benchmarks/") else room
            counted[room] += lines_of_content(entry.split()[-1], code_lines)
        elif path.endswith(".cpp"):
            counted["C++"] += lines_of_content(entry.split()[-1], cpp_lines)
    return counted


@cache
def lines_of_content(content_id: str, count: Callable[[str], int]) -> int:
    """Return the lines of a file by git's name for its content, which two commits share where it did not change."""
    return count(git("cat-file", "blob", content_id))


def git(*arguments: str) -> str:
    """Return what git prints in this project."""
    return subprocess.run(["git", *arguments], cwd=PROJECT, check=True, capture_output=True, text=True).stdout


def main() -> int:
    """Print the table; returns 1 where the product has more code lines than its budget."""
    now, before = (lines_by_room(commit) for commit in ("HEAD", "HEAD~1"))
    rooms = [*PRODUCT, "C++", "tests", "tests/benchmarks"]
    sums = [sum(counted[room] for room in PRODUCT) for counted in (now, before)]
    rows = [(room, now[room], now[room] - before[room]) for room in rooms]
    rows.append(("product, Python", sums[0], sums[0] - sums[1]))
    table = Table(
        caption="Code lines", columns={"room": "", "lines": ",", "beside the commit before": "+,"}, rows=rows
    )
    print("\n".join(table.lines()))
    budget = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["heterps"]["max_code_lines"]
    if sums[0] > budget:
        print(
            f"the product must have at most {budget:,} code lines (max_code_lines in pyproject.toml), has {sums[0]:,}"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
