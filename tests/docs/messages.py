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
    """Yield place and pattern of each message of these errors.

    Functions named `..._problems` yield the messages of one ConfigError.
    """
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
            for argument in _messages_of(node, classes):
                ends = (
                    [argument.body, argument.orelse]
                    if isinstance(argument, ast.IfExp)
                    else [argument]
                )
                for each in ends:
                    if (pattern := _pattern(each, constants)) is not None:
                        yield f"{path.relative_to(folder)}:{node.lineno}", pattern


def _messages_of(node: ast.AST, classes: frozenset[str]) -> list[ast.expr]:
    """Return the messages of a call of these classes, or of a function of problems."""
    if isinstance(node, ast.FunctionDef) and node.name.endswith("_problems"):
        yields = [each.value for each in ast.walk(node) if isinstance(each, ast.Yield)]
        return [value for value in yields if value is not None and "ConfigError" in classes]
    is_error = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    if is_error and node.func.id in classes and node.args:
        return node.args[:1]
    return []


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
