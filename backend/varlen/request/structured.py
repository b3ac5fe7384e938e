"""What an answer has to match: the parameter `structured_outputs` of vLLM, older `guided_decoding`."""

import json

from varlen.errors import RequestError, shorten
from varlen.parameter import read_json, refuse

STRUCTURED_OUTPUTS = ("structured_outputs", "guided_decoding")

_MAX_CHARACTERS = 65_536
_KINDS = ("json", "regex", "choice", "json_object")


def read_grammar(name: str, value: object) -> str:
    """Return the parameter as a JSON object with one of `json`, `regex`, `choice`.

    Raises:
        RequestError: it is none of these; the message says what is allowed.
    """
    if isinstance(value, str):
        value = read_json(name, value)
    if not isinstance(value, dict):
        refuse(name, value, f"an object with one of {', '.join(_KINDS)}")
    # clients send all fields of their object: null and false ask for nothing, and the library is ours to choose
    given = {
        key: each
        for key, each in value.items()
        if each is not None and each is not False and key != "backend"
    }
    if len(given) != 1 or not given.keys() <= set(_KINDS):
        raise RequestError(
            f"{name} has {shorten(', '.join(map(str, given))) or 'no field'}; allowed: one of"
            f" {', '.join(_KINDS)}"
        )
    [(kind, content)] = given.items()
    if kind == "json_object":
        kind, content = "json", {"type": "object"}
    if kind == "json":
        content = read_json(f"{name}.json", content) if isinstance(content, str) else content
        if not isinstance(content, dict):
            refuse(f"{name}.json", content, "a JSON schema, as an object or a string")
    elif kind == "choice":
        texts = content if isinstance(content, list) else []
        if not texts or not all(isinstance(each, str) for each in texts):
            refuse(f"{name}.choice", content, "a list of strings, at least one")
    elif not isinstance(content, str):
        refuse(f"{name}.{kind}", content, "a string")
    try:
        return json.dumps({kind: content}, separators=(",", ":"))
    except RecursionError:
        raise RequestError(f"{name} is nested too deeply") from None


def check_grammar(grammar: str) -> None:
    """Raise RequestError if a grammar is too long."""
    if len(grammar) > _MAX_CHARACTERS:
        raise RequestError(
            f"structured_outputs has {len(grammar)} characters; allowed: up to {_MAX_CHARACTERS}"
        )
