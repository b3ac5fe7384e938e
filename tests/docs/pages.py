"""Code blocks and commands of the pages that users read."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parents[2]
# The others are about the past, or of single measurements.
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(
        path.relative_to(PROJECT).as_posix()
        for path in PROJECT.glob("docs/**/*.md")
        if path.parent.name not in ("benchmarks", "decisions")
    ),
)
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What ends a command of a shell, and what writes its output to a file.
_SEPARATORS = {"&&", ";", "|", "||"}
_ASSIGNMENT = re.compile(r"[A-Z_]+=.*")


@dataclass(frozen=True, slots=True)
class Block:
    """A code block of a page.

    Attributes:
        page: path from the project's folder.
        line: number of its first line of code.
        language: word after the fence, or nothing.
        code: all of its lines.
    """

    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str, pages: tuple[str, ...] = PAGES) -> list[Block]:
    """Return the code blocks of these languages."""
    return [
        Block(page, text.count("\n", 0, match.start(2)) + 1, match[1], match[2])
        for page in pages
        for text in [(PROJECT / page).read_text()]
        for match in _BLOCK.finditer(text)
        if match[1] in languages
    ]


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the words of each command of a block of shell code, redirections included.

    A command may span lines, if a quote or a backslash at the end of a line goes on.
    """
    pending = ""
    for line in block.code.splitlines():
        pending += line + "\n"
        words = _words(pending)
        if words is None or pending.endswith("\\\n"):
            continue
        pending = ""
        command: list[str] = []
        for word in [*words, ";"]:
            if word not in _SEPARATORS:
                command.append(word)
                continue
            while command and _ASSIGNMENT.fullmatch(command[0]):
                command.pop(0)
            if command:
                yield command
            command = []
    assert not pending, f"{block} ends inside a command"


def _words(text: str) -> list[str] | None:
    """Return the words of shell code; None if it ends inside a quote."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=";|&>")
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:
        return None
