"""Messages of errors as patterns, read from the source."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

# What stands for a value: no other part of a message.
_VARYING = "[^;]*"
# Less literal text than this says nothing.
_LEAST_LITERAL = 8


def text_patterns(folder: Path) -> list[re.Pattern[str]]:
    """Return a pattern of each text in the code that could be a message."""
    return [
        pattern
        for path in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if (pattern := _pattern(node, {})) is not None
    ]


def raised_messages(folder: Path, classes: frozenset[str]) -> Iterator[tuple[str, re.Pattern[str]]]:
    """Yield place and pattern of each message of these errors."""
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text())
        constants = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in classes
                and node.args
            ):
                argument = node.args[0]
                ends = (
                    [argument.body, argument.orelse]
                    if isinstance(argument, ast.IfExp)
                    else [argument]
                )
                for each in ends:
                    if (pattern := _pattern(each, constants)) is not None:
                        yield f"{path.relative_to(folder)}:{node.lineno}", pattern


def _pattern(node: ast.AST, constants: dict[str, ast.expr]) -> re.Pattern[str] | None:
    """Return the pattern of a text; None for other nodes."""
    if isinstance(node, ast.Name):
        node = constants.get(node.id, node)
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    literal, found = "", ""
    for part in parts:
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            literal += part.value
            # the page has one line for each message
            found += re.sub(r"(\\?\s)+", " ", re.escape(part.value))
        elif isinstance(node, ast.JoinedStr):
            found += _VARYING
        else:
            return None
    has_prose = " " in literal and len(literal) >= _LEAST_LITERAL
    return re.compile(found, re.DOTALL) if has_prose else None
