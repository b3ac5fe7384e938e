"""Schemas that require themselves without an end."""

import json

import pytest

from varlen.sandbox.grammar import has_finite_answer

ITSELF = {"$ref": "#"}
LIST = {"type": "array", "items": ITSELF}


def an_object(required=("a",), **properties):
    return {"type": "object", "properties": properties, "required": list(required)}


@pytest.mark.parametrize(
    "schema",
    [
        ITSELF,
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"anyOf": [ITSELF, {"allOf": [{}, ITSELF]}]},
        an_object(a=ITSELF),
        an_object(a=an_object(["b"], b=ITSELF)),
        {**an_object(["other"]), "additionalProperties": ITSELF},
        {**LIST, "minItems": 1},
        {"type": ["array"], "prefixItems": [{}, ITSELF], "minItems": 2},
        {"$ref": "#/a~1b/0", "a/b": [{"oneOf": [{"$ref": "#/a~1b/0"}]}]},
    ],
    ids=json.dumps,
)
def test_a_schema_that_requires_itself_has_no_finite_answer(schema):
    assert not has_finite_answer(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        LIST,
        an_object([], a=ITSELF),
        an_object(a={"anyOf": [ITSELF, {"type": "null"}]}),
        # a value without a type may be a number
        {"properties": {"a": ITSELF}, "required": ["a"]},
        {**an_object(a=ITSELF), "type": ["object", "null"]},
        {"type": "array", "prefixItems": [{}, ITSELF], "minItems": 1},
        {**an_object(), "patternProperties": {"a": {}}, "additionalProperties": ITSELF},
        {"$ref": "#/nowhere"},
        {"$ref": "http://localhost/x"},
        {"allOf": "no list", "anyOf": 5, "required": [7], "type": "object", "properties": []},
    ],
    ids=json.dumps,
)
def test_a_schema_with_a_way_out_has_finite_answers(schema):
    assert has_finite_answer(schema)


def test_a_long_chain_of_references_needs_no_deep_stack():
    number = 3000
    definitions = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(number)}
    chain = {"$ref": "#/$defs/0", "$defs": definitions}

    assert has_finite_answer({**chain, "$defs": {**definitions, str(number): {"type": "null"}}})
    assert not has_finite_answer(
        {**chain, "$defs": {**definitions, str(number): {"$ref": "#/$defs/0"}}}
    )
