"""Structured output: a model of random logits gives only answers that match."""

import json
import re
from contextlib import suppress

import pytest

from tests.backend.decoding.grammar.grammar_server import CHOICES, Server
from tests.backend.decoding.sandboxes import new_grammars
from tests.backend.decoding.sequences import sample, sequence_of, sequences_of
from tests.backend.decoding.text.small_tokenizers import (
    END,
    PAD,
    byte_fallback,
    byte_level,
    metaspace,
)
from tests.backend.refusals import refused_request as refused
from varlen.decoding.grammar.compiled_grammar import await_processes
from varlen.decoding.sampling import sampling
from varlen.errors import RequestError
from varlen.request.generation import GenerationOptions
from varlen.sandbox.grammar import GrammarServer

TOKENIZERS = {"byte_level": byte_level, "byte_fallback": byte_fallback}


@pytest.fixture(scope="module", params=TOKENIZERS)
def server(request):
    return Server(TOKENIZERS[request.param]())


@pytest.fixture(scope="module")
def one_server():
    return Server(byte_level())


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "你"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def is_person(text):
    person = json.loads(text)
    return (
        {"name", "age"} <= person.keys() <= {"name", "age", "tags"}
        and isinstance(person["name"], str)
        and len(person["name"]) <= 8
        and type(person["age"]) is int
        and 0 <= person["age"] <= 120
        and set(person.get("tags", [])) <= {"a", "b", "你"}
        and len(person.get("tags", [])) <= 3
    )


GRAMMARS = {
    "schema": ({"json": PERSON}, is_person),
    "array": (
        {"json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}},
        lambda text: all(type(each) is bool for each in json.loads(text)),
    ),
    "any_object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    "regex": (
        {"regex": r"(\+49|0)[1-9][0-9]{2,6}(/[a-c]+)?"},
        lambda text: re.fullmatch(r"(\+49|0)[1-9][0-9]{2,6}(/[a-c]+)?", text),
    ),
    "choice": ({"choice": CHOICES}, lambda text: text in CHOICES),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_every_answer_that_ends_matches(server, name):
    structured, matches = GRAMMARS[name]
    sequences = [
        server.sequence(structured, seed=seed, temperature=1.0 if seed else 0, top_p=0.95)
        for seed in range(24)
    ]

    answers = server.answers(sequences)

    ended = [text for text, reason in answers if reason == "stop"]
    assert len(ended) >= 6
    for text in ended:
        assert matches(text), text


def test_sequences_with_and_without_a_grammar_run_in_one_step(one_server):
    structured = one_server.sequence({"choice": CHOICES}, seed=1)
    free = [sequence_of(1, 2, seed=seed, max_tokens=30) for seed in (2, 3)]

    answers = one_server.answers([free[0], structured, free[1]])

    assert answers[1][0] in CHOICES
    alone = [sequence_of(1, 2, seed=seed, max_tokens=30) for seed in (2, 3)]
    assert one_server.answers(alone) == [answers[0], answers[2]]


def test_an_answer_that_starts_again_from_its_tokens_still_matches(one_server):
    whole = one_server.sequence({"json": PERSON}, seed=3, max_tokens=200)
    [[_, reason]] = one_server.answers([whole])
    assert reason == "stop"
    tokens = whole.token_ids[2:]

    for number in (1, len(tokens) // 2, len(tokens) - 1):
        again = one_server.sequence({"json": PERSON}, seed=3, max_tokens=200)
        again.token_ids += tokens[:number]
        one_server.answers([again])
        assert again.token_ids == whole.token_ids


def test_a_grammar_at_its_end_ends_the_answer_before_the_smallest_number_of_tokens(one_server):
    sequence = one_server.sequence({"choice": CHOICES}, min_tokens=100, seed=1)

    [[text, reason]] = one_server.answers([sequence])

    assert text in CHOICES
    assert reason == "stop"


def test_an_answer_goes_on_for_the_smallest_number_of_tokens_if_its_grammar_can(one_server):
    sequence = one_server.sequence({"regex": "[ab]*"}, min_tokens=20, max_tokens=40, seed=1)

    [[text, _]] = one_server.answers([sequence])

    assert len(text) >= 20


def test_an_answer_whose_grammar_becomes_too_complex_fails_with_the_reason(one_server):
    sequence = one_server.sequence({"regex": ".*[a-m].{4000}y"}, seed=1, max_tokens=5000)

    [[_, error]] = one_server.answers([sequence])

    assert isinstance(error, RequestError)
    assert "structured_outputs cannot be served: " in str(error)
    assert "too many states" in str(error)


def test_a_token_that_does_not_match_fails_the_answer(one_server):
    sequence = one_server.sequence({"regex": "[ab]{1,5}"}, seed=1)
    sequence.token_ids.append(one_server.tokenizer.token_to_id("c"))

    [[_, error]] = one_server.answers([sequence])

    assert isinstance(error, RequestError)


@pytest.mark.parametrize(
    "grammar, reason",
    [
        ({"regex": "a("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "\ud800"}, "surrogates not allowed"),
        ({"json": {"type": "objct"}}, "objct"),
        ({"json": {"$ref": "http://localhost/x"}}, "http://localhost/x"),
        ({"json": {"$ref": "file:///etc/hostname"}}, "file:///etc/hostname"),
        ({"json": {"minimum": 5, "maximum": 3, "type": "integer"}}, "Unsatisfiable"),
        ({"choice": ["\ud800"]}, "error parsing string"),
        ({"json": {"$ref": "#"}}, "requires itself without an end"),
        ({"json": {"x-guidance": {"lenient": True}, "not": {}}}, "Unimplemented keys"),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_refuses_a_grammar_that_is_not_valid(one_server, grammar, reason):
    with refused("structured_outputs cannot be served: ") as caught:
        one_server.grammars.check(json.dumps(grammar))
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 400


def check_schema(server, schema):
    options = GenerationOptions.from_parameters({"structured_outputs": {"json": schema}})
    server.grammars.check(options.grammar)


def test_a_deep_schema_is_served_unless_it_is_too_deep(one_server):
    schemas = {depth: '{"items":' * depth + "{}" + "}" * depth for depth in (50, 300, 900, 3000)}

    check_schema(one_server, schemas[50])
    for depth in (300, 900):
        # how deep is too deep depends on Python; any other error fails
        with suppress(RequestError):
            check_schema(one_server, schemas[depth])
    with refused("structured_outputs"):
        check_schema(one_server, schemas[3000])


@pytest.mark.parametrize(
    "grammar",
    [
        {"regex": "(a{ 30 }){ 30 }b{0000050}"},
        {"regex": "(.*x.{0,30}){30}"},
        {"json": {"type": "array", "items": PERSON, "minItems": 100_000}},
        {"choice": [f"{index} {index}" for index in range(4000)]},
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_a_costly_grammar_is_served_in_bounded_steps_or_refused(one_server, grammar):
    sequence = one_server.sequence(grammar, seed=1, max_tokens=30)

    [[_, reason]] = one_server.answers([sequence])

    assert reason in ("length", "stop") or isinstance(reason, RequestError)


def test_refuses_structured_output_without_an_end_token():
    grammars = new_grammars(byte_level(), 400, [])

    with refused("structured_outputs cannot be served: this model has no end token"):
        grammars.check('{"regex":"a"}')


def test_refuses_structured_output_for_tokens_without_a_text_of_their_own():
    grammars = new_grammars(metaspace(), 150, [metaspace().token_to_id(END)])

    with refused("structured_outputs cannot be served: the tokens of this model"):
        grammars.check('{"regex":"a"}')


def test_a_model_may_have_several_end_tokens_and_fewer_tokens_than_its_tokenizer():
    tokenizer = byte_level()
    ends = [tokenizer.token_to_id(END), tokenizer.token_to_id(PAD), 10_000]
    matcher = new_grammars(tokenizer, 300, ends).matcher('{"regex":"a?"}')
    matcher.advance([7, 7], begin=2)

    while (allowed := matcher.allowed_tokens()) is None:
        await_processes([matcher], 1.0)

    assert allowed.shape == (300,)
    assert set(allowed.nonzero()[0]) == {*ends[:2], tokenizer.token_to_id("a")}


def test_samples_of_a_prompt_get_their_first_tokens_in_one_step(one_server, monkeypatch):
    options = one_server.sequence({"regex": "[ab]{10}"}, temperature=1.0, seed=1).generation
    fields = {name: getattr(options, name) for name in options.__dataclass_fields__}
    samples = sequences_of(1, 2, **fields | {"n": 2})
    waits = iter([(0,), (1,), (0, 1), ()])
    await_masks = sampling._await_masks

    def one_is_late(states):
        late = next(waits)
        await_masks([state for row, state in enumerate(states) if row not in late])

    monkeypatch.setattr(sampling, "_await_masks", one_is_late)
    monkeypatch.setattr(sampling, "_MASK_SECONDS", 60)
    monkeypatch.setattr(sampling, "_ALL_MASKS_SECONDS", 60)
    logits = one_server.model.logits(samples)
    steps = [sample(one_server.sampler, logits.clone(), samples) for _ in range(4)]

    # each has been ready while the other was not, and keeps its mask
    pending = [[token.is_pending for token in step] for step in steps]
    assert not any(pending[-1])
    assert all(any(step) == all(step) for step in pending)
    [grammar] = [
        each for each in one_server.grammars._grammars.values() if each.users() and each.is_compiled
    ][-1:]
    assert {sample.sampler_state.matcher._grammar for sample in samples} == {grammar}
    assert grammar.users() == 2


def test_a_step_that_chose_another_token_before_it_was_repeated_does_no_harm(one_server):
    sequence = one_server.sequence({"regex": "[ab]{10}"}, seed=1, max_tokens=20)
    logits = one_server.model.logits([sequence])
    letter = one_server.tokenizer.token_to_id("a")

    while sample(one_server.sampler, logits.clone(), [sequence])[0].is_pending:
        pass
    # its token was never appended
    sequence.token_ids.append(letter)

    [[text, reason]] = one_server.answers([sequence])
    assert re.fullmatch("[ab]{9}", text)
    assert reason == "stop"


@pytest.mark.parametrize("expression", [r"\w", r"\W", r"[\w.]", r"[^\w.]", r"[\W_]", r"\\w", r"\d"])
def test_a_word_is_the_same_as_for_re(expression):
    """An answer had U+203F for a word: it is a letter only for the library."""
    tokenizer = byte_level()
    server = GrammarServer(
        tokenizer.to_str(), tokenizer.get_vocab_size(), [tokenizer.token_to_id(END)]
    )
    start = server._compile(json.dumps({"regex": expression}))

    for text in ("a", "é", "漢", "_", "7", "²", "Ⅷ", "\u203f", "\u0301", "-", ".", "\\w"):
        answer, tokens = start.deep_copy(), tokenizer.encode(text).ids
        is_allowed = answer.try_consume_tokens(tokens) == len(tokens) and answer.is_accepting()
        assert is_allowed == bool(re.fullmatch(expression, text)), text
