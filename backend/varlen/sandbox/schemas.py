"""Finds JSON schemas that require themselves, so that no finite answer matches.

In terms of grammars, such a schema is an unproductive symbol.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

Schema: TypeAlias = Mapping[str, Any]


def has_finite_answer(schema: object) -> bool:
    """Return False if a JSON schema requires itself without an end; True otherwise.

    Schemas that no value meets for other reasons are the grammar library's to refuse.
    """
    if not isinstance(schema, dict):
        return True
    # nodes that the root may need, each after the node that needs it
    nodes: dict[int, Schema] = {id(schema): schema}
    unread: list[Schema] = [schema]
    needs: dict[int, list[list[int]]] = {}
    while unread:
        node = unread.pop()
        alternatives = list(_needs(node, schema))
        needs[id(node)] = [
            # anything but an object, such as true, is met by some value
            [id(each) for each in group]
            for group in alternatives
            if all(isinstance(each, dict) for each in group)
        ]
        for each in (each for group in alternatives for each in group):
            if isinstance(each, dict) and id(each) not in nodes:
                nodes[id(each)] = each
                unread.append(each)
    finite: set[int] = set()
    while True:
        before = len(finite)
        for node_id in reversed(nodes):
            if all(any(each in finite for each in group) for group in needs[node_id]):
                finite.add(node_id)
        if id(schema) in finite or len(finite) == before:
            return id(schema) in finite


def _needs(node: Schema, root: Schema) -> Iterator[list[object]]:
    """Yield groups of schemas; a value of `node` needs one schema of each group."""
    reference = node.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        yield [_resolved(root, reference)]
    for part in _list(node, "allOf"):
        yield [part]
    for name in ("anyOf", "oneOf"):
        if parts := _list(node, name):
            yield parts
    kind = node.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    if kinds == ["object"]:
        properties = node.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        for name in _list(node, "required"):
            if not isinstance(name, str):
                continue
            if name in properties:
                yield [properties[name]]
            elif "patternProperties" not in node:
                # a pattern may match the name, and the library knows whether it does
                yield [node.get("additionalProperties", True)]
    elif kinds == ["array"]:
        least = node.get("minItems", 0)
        least = least if isinstance(least, int) else 0
        first = _list(node, "prefixItems")
        yield from ([each] for each in first[: max(least, 0)])
        if least > len(first):
            yield [node.get("items", True)]


def _list(node: Schema, name: str) -> list[Any]:
    found = node.get(name)
    return found if isinstance(found, list) else []


def _resolved(root: Schema, reference: str) -> object:
    """Return the schema that a JSON pointer names; True if there is none."""
    found: object = root
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return True
    return found
