"""Messages of errors as patterns, read from the source."""

import ast
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

# What stands for a value: no other part of a message.
_VARYING = "[^;]*"
# Less literal text than this says nothing.
_LEAST_LITERAL = 8


@dataclass(frozen=True)
class Texts:
    """The texts in code that could be messages.

    Attributes:
        whole: texts without values, on one line.
        patterns: patterns of the others.
    """

    whole: set[str] = field(default_factory=set)
    patterns: list[re.Pattern[str]] = field(default_factory=list)

    def __contains__(self, message: str) -> bool:
        return message in self.whole or any(each.fullmatch(message) for each in self.patterns)


@cache
def texts_of(folder: Path) -> Texts:
    """Return the texts of the code in a folder."""
    texts = Texts()
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.JoinedStr() if (pattern := _pattern(node, {})) is not None:
                    texts.patterns.append(pattern)
                case ast.Constant(value=str(text)) if _has_prose(text):
                    texts.whole.add(re.sub(r"\s+", " ", text))
    return texts


@cache
def raised_messages(folder: Path) -> list[tuple[str, str, re.Pattern[str]]]:
    """Return class, place and pattern of each message of an error in a folder.

    Functions named `..._problems` yield the messages of one ConfigError.
    """
    found = []
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
            for name, argument in _messages_of(node):
                ends = (
                    [argument.body, argument.orelse]
                    if isinstance(argument, ast.IfExp)
                    else [argument]
                )
                for each in ends:
                    if (pattern := _pattern(each, constants)) is not None:
                        place = f"{path.relative_to(folder)}:{node.lineno}"
                        found.append((name, place, pattern))
    return found


def _messages_of(node: ast.AST) -> list[tuple[str, ast.expr]]:
    """Return the message of a call with its name, or of a function of problems."""
    if isinstance(node, ast.FunctionDef) and node.name.endswith("_problems"):
        yields = [each.value for each in ast.walk(node) if isinstance(each, ast.Yield)]
        return [("ConfigError", value) for value in yields if value is not None]
    match node:
        case ast.Call(func=ast.Name(id=name), args=[message, *_]):
            return [(name, message)]
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
    return re.compile(found, re.DOTALL) if _has_prose(literal) else None


def _has_prose(text: str) -> bool:
    return " " in text and len(text) >= _LEAST_LITERAL
