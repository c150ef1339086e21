"""The commands of README, TUTORIAL, OPERATING, AWS and DATA (indented blocks, backticks), and those of --help."""

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from tests.paths import PROJECT

DOCUMENTS = ("README.md", "docs/TUTORIAL.md", "docs/OPERATING.md", "docs/AWS.md", "docs/DATA.md")
PROGRAMS = ("heterps", "make", "prefect", "python", "aws")
PLACEHOLDERS = {
    "RUN": "latest",
    "FOLDER": "clicks",
    "FILE": "heterps.toml",
    "N": "30",
    "VERSION": "1",
    "VERSION|none": "none",
}
"""Words of the documents that stand for a value, and a value."""

_PROMPT = re.compile(
    r"^(?:\S+ \S+ \S+ \* \* \* cd \S+ && |sudo -u heterps env )?(?:\w+=(?:'[^']*'|\S+) )*(?:\S*/bin/)?"
)
_SUBSTITUTED = re.compile(r"^( +)(?:\w+=[^\s$]+ )*\w+=\$\((.*)\)$")
_OPTIONAL = re.compile(r"\[([^\]]*)\]")


class Command(NamedTuple):
    """A command of a document."""

    place: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.place} {shlex.join(self.words)}"[:90]


def commands() -> Iterator[Command]:
    """Yield the commands of all documents in their order, each with placeholders replaced."""
    for document in DOCUMENTS:
        is_python = False
        for number, line in enumerate((PROJECT / document).read_text().splitlines(), start=1):
            is_python ^= line.startswith("```")
            line = _SUBSTITUTED.sub(r"\1\2", line)
            texts = re.findall(r"`((?:heterps|prefect|python) [^`]+)`", line)
            if line.startswith("    ") and not is_python:
                texts = [_PROMPT.sub("", line.strip().removesuffix(" \\"))]
            for text in texts:
                words = _words(text)
                if words and words[0] in PROGRAMS and "..." not in text and "…" not in text:
                    yield Command(f"{document}:{number}", words)


def help_examples() -> Iterator[Command]:
    """Yield the examples that commands show with `--help`, each up to a pipe or a second command."""
    for module in sorted((PROJECT / "flows" / "commands").rglob("*.py")):
        for number, line in enumerate(module.read_text().splitlines(), start=1):
            if line.startswith("  heterps "):
                words = _words(re.split(r" (?:\||&&) ", line)[0])
                yield Command(f"{module.relative_to(PROJECT)}:{number}", words)


def _words(text: str) -> tuple[str, ...]:
    try:
        found = shlex.split(_OPTIONAL.sub(r"\1", text), comments=True)
    except ValueError:
        return ()
    return tuple(PLACEHOLDERS.get(word, word) for word in found)


def python_blocks() -> Iterator[tuple[str, str]]:
    """Yield place and source of the Python blocks of all documents."""
    for document in DOCUMENTS:
        text = (PROJECT / document).read_text()
        for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            yield f"{document}:{text[: block.start()].count(chr(10)) + 1}", block.group(1)
