"""Random regular expressions and JSON schemas that every library reads alike."""

import random
from typing import Any

_LETTERS = "abcxyz019_-"
_WORDS = ("red", "green", "blue", "a b", "é", "漢", "")
_MOST_DEPTH = 3


def random_regex(draw: random.Random, depth: int = 0) -> str:
    """Return a regular expression of Python and of Rust."""
    parts = []
    for _ in range(draw.randint(1, 4)):
        kind = draw.randrange(4 if depth < _MOST_DEPTH else 2)
        if kind == 0:
            part = draw.choice(_LETTERS).replace("-", r"\-")
        elif kind == 1:
            part = draw.choice(("[a-f]", "[^a-z]", "[0-9A-F]", r"\d", r"[\w.]", "."))
        else:
            inner = "|".join(random_regex(draw, depth + 1) for _ in range(draw.randint(1, 3)))
            part = f"({inner})"
        low = draw.randrange(4)
        parts.append(
            part + draw.choice(("", "", "?", "*", "+", f"{{{low}}}", f"{{{low},{low + 3}}}"))
        )
    return "".join(parts)


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a JSON schema."""
    kinds = [_integer, _number, _string, _enum, _simple]
    if depth < _MOST_DEPTH:
        kinds += [_object, _object, _array, _any_of]
    return draw.choice(kinds)(draw, depth)


def _integer(draw: random.Random, _: int) -> dict[str, Any]:
    low = draw.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 10**6)}


def _number(draw: random.Random, _: int) -> dict[str, Any]:
    low = draw.uniform(-10, 10)
    return {"type": "number", draw.choice(("minimum", "exclusiveMinimum")): low, "maximum": low + 5}


def _string(draw: random.Random, _: int) -> dict[str, Any]:
    low = draw.randrange(5)
    if draw.random() < 0.4:
        return {"type": "string", "pattern": f"^{random_regex(draw, _MOST_DEPTH)}$"}
    return {"type": "string", "minLength": low, "maxLength": low + draw.randrange(9)}


def _enum(draw: random.Random, _: int) -> dict[str, Any]:
    values = [*_WORDS, None, True, 3, -0.5]
    return {"enum": draw.sample(values, draw.randint(1, 4))}


def _simple(draw: random.Random, _: int) -> dict[str, Any]:
    return draw.choice(({"type": "boolean"}, {"type": "null"}, {"const": "fixed"}))


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(("id", "name", "tags", "größe", "a b", "value"), draw.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(draw, depth + 1) for name in names},
        "required": draw.sample(names, draw.randint(0, len(names))),
        "additionalProperties": False,
    }


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    low = draw.randrange(3)
    return {
        "type": "array",
        "items": random_schema(draw, depth + 1),
        "minItems": low,
        "maxItems": low + draw.randrange(3),
    }


def _any_of(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(draw, depth + 1) for _ in range(draw.randint(1, 3))]}
