"""Structured output: a model of random logits gives only answers that match."""

import json
import os
import re
import signal
from contextlib import suppress
from multiprocessing.connection import wait
from threading import Event

import pytest
import torch

from varlen.decoding import sampling, structured
from varlen.decoding.sampling import Sampler
from varlen.decoding.structured import wait_for_masks
from varlen.decoding.token_bias import BadWords
from varlen.decoding.writer import TextWriter
from varlen.errors import QueueFullError, RequestError
from varlen.request.generation import GenerationOptions
from varlen.sandbox.grammar import GrammarServer
from varlen.sandbox.limits import SandboxLimits

from ..refusals import refused_request as refused
from .sandboxes import new_grammars
from .sequences import RandomModel, sequence_of, sequences_of
from .small_tokenizers import END, PAD, byte_fallback, byte_level, metaspace

TOKENIZERS = {"byte_level": byte_level, "byte_fallback": byte_fallback}


class Server:
    """A model of random logits with all that decodes its tokens."""

    def __init__(self, tokenizer, **limits):
        self.tokenizer = tokenizer
        self.eos_id = tokenizer.token_to_id(END)
        # wider than the tokenizer, as checkpoints are
        self.model = RandomModel(tokenizer.get_vocab_size() + 13, scale=4.0)
        self.grammars = new_grammars(tokenizer, self.model.vocab_size, [self.eos_id], **limits)
        self.sampler = Sampler(
            self.model.vocab_size,
            [self.eos_id],
            self.grammars,
            BadWords(tokenizer, self.model.vocab_size, [self.eos_id]),
            torch.device("cpu"),
        )

    def sequence(self, structured, **options):
        options = GenerationOptions.from_parameters(
            {"structured_outputs": structured, "max_tokens": 200, **options}
        )
        self.grammars.check(options.grammar)
        fields = {name: getattr(options, name) for name in options.__dataclass_fields__}
        return sequence_of(1, 2, **fields)

    def answers(self, sequences):
        """Return text and finish reason of each sequence, or text and error."""
        writers = [
            TextWriter(
                self.tokenizer, each.generation, prompt_ids=each.token_ids, eos_ids=[self.eos_id]
            )
            for each in sequences
        ]
        answers = [["", None] for _ in sequences]
        while running := [row for row, answer in enumerate(answers) if answer[1] is None]:
            step = [sequences[row] for row in running]
            tokens = self.sampler.sample(self.model.logits(step), step)
            for row, token in zip(running, tokens, strict=True):
                if token.is_pending:
                    continue
                if token.error is not None:
                    answers[row][1] = token.error
                    continue
                part = writers[row].write(token)
                sequences[row].token_ids.append(token.token_id)
                answers[row][0] += part.text
                answers[row][1] = part.finish_reason
        return answers


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


CHOICES = ["red", "red green", 'say "no"\\/', "café 你好 😀"]
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
        wait_for_masks([matcher], 1.0)

    assert allowed.shape == (300,)
    assert set(allowed.nonzero()[0]) == {*ends[:2], tokenizer.token_to_id("a")}


def regex(text):
    return json.dumps({"regex": text})


def test_compiled_grammars_are_ended_when_they_have_too_much_memory_and_compiled_again():
    server = Server(byte_level(), max_bytes=20_000_000)
    for index in range(20):
        server.grammars.check(regex(f"x{index}{{1,300}}"))

    use = server.grammars.use()
    assert 0 < use.held_bytes <= 20_000_000
    assert use.started == 20
    assert use.evictions == 20 - use.grammars > 0
    sequence = sequence_of(1, 2, grammar=regex("x0{1,300}"), max_tokens=300)
    [[text, _]] = server.answers([sequence])
    assert re.fullmatch("x0*", text)
    assert server.grammars.use().started == 21


def test_only_some_grammars_keep_their_processes_without_an_answer():
    server = Server(byte_level())
    for index in range(20):
        server.grammars.check(regex(f"x{index}"))
    used = []
    for index in range(18):
        server.grammars.check(regex(f"y{index}"))
        used.append(server.grammars.matcher(regex(f"y{index}")))
        used[-1].advance([1], 1)

    server.grammars.check(regex("z"))

    # answers in progress keep their grammars
    assert server.grammars.use().grammars == 16 + 18
    assert not any(each._grammar.error for each in used)


def test_a_grammar_that_fits_beside_none_in_use_is_refused_for_now():
    server = Server(byte_level(), max_bytes=1)

    with pytest.raises(QueueFullError, match="more than 1 bytes of memory; try again later"):
        server.grammars.check(regex("a"))
    assert server.grammars.use().grammars == 0


COSTLY = {
    "multiples": {
        "json": {"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 1009}]}
    },
    "patterns": {
        "json": {"allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(1, 30)]}
    },
    "counts": {"regex": "(a{0000000001000}){ 1000 }"},
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_grammar_that_takes_too_long_is_refused_and_remembered(name):
    # each takes more than ten times as long on the fastest processors
    server = Server(byte_level(), limits=SandboxLimits(0.1, 1 << 28))

    for _ in range(3):
        with refused("the grammar takes more than 0.1 s of processor time"):
            server.grammars.check(json.dumps(COSTLY[name]))
    assert server.grammars.use().started == 1
    server.grammars.check(regex("a"))


def test_a_grammar_that_takes_too_much_memory_is_refused():
    server = Server(byte_level(), limits=SandboxLimits(60, 1 << 23))
    text = "".join(f"{index} " for index in range(12_000))

    with refused("the grammar takes more than 8388608 bytes of memory"):
        server.grammars.check(json.dumps({"choice": [text]}))


def process_of(server, grammar):
    """Return the process id of a grammar, once it has started."""
    found = server.grammars._grammars[structured._key(grammar)]
    assert found.await_start(60)
    return found._process._pid


def test_an_answer_whose_masks_take_too_long_fails_and_the_others_do_not():
    server = Server(byte_level(), limits=SandboxLimits(60, 1 << 28))
    costly = server.sequence({"regex": "[ab]{1,9}c"}, seed=1)
    other = server.sequence({"choice": CHOICES}, seed=1)
    process = process_of(server, costly.generation.grammar)
    # its first mask is asked for and cannot come before the time of the process is up
    os.kill(process, signal.SIGSTOP)
    [token] = server.sampler.sample(server.model.logits([costly]), [costly])
    assert token.is_pending
    os.kill(process, signal.SIGPROF)
    os.kill(process, signal.SIGCONT)

    (_, error), (text, reason) = server.answers([costly, other])

    assert "more than 60 s of processor time" in str(error)
    assert text in CHOICES
    assert reason == "stop"


def await_background(server):
    done = Event()
    server.grammars._background.run(done.set)
    assert done.wait(60)


def test_the_process_of_a_grammar_ends_when_its_requests_have_gone():
    server = Server(byte_level())
    grammar = json.dumps(COSTLY["counts"])
    hold = server.grammars.hold(grammar)
    hold.compile(wait_seconds=0)
    process = process_of(server, grammar)
    # it cannot be done before the request has gone
    os.kill(process, signal.SIGSTOP)

    hold.release()
    await_background(server)

    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert server.grammars.use().grammars == 0


def test_a_grammar_whose_idle_process_was_killed_is_compiled_for_the_next_answer():
    server = Server(byte_level())
    sequence = server.sequence({"choice": CHOICES}, seed=1)
    grammar = sequence.generation.grammar
    [compiled] = server.grammars._grammars.values()
    os.kill(process_of(server, grammar), signal.SIGKILL)
    # its end has come when the descriptor becomes readable
    wait([compiled.fileno()], 60)

    assert not server.grammars.hold(grammar).take()
    [[text, _]] = server.answers([sequence])

    assert text in CHOICES
    assert server.grammars.use().started == 2


def test_the_sandbox_starts_again_after_its_host_was_killed():
    server = Server(byte_level())
    server.grammars.check(regex("a"))
    host = server.grammars._sandbox._host._process
    os.kill(host.pid, signal.SIGKILL)
    host.wait(60)

    sequence = server.sequence({"choice": CHOICES}, seed=1)

    [[text, _]] = server.answers([sequence])
    assert text in CHOICES


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


def test_all_processes_end_with_the_sandbox():
    server = Server(byte_level())
    server.grammars.check(regex("a"))
    host = server.grammars._sandbox._host._process
    [grammar] = server.grammars._grammars.values()

    server.grammars._sandbox.close()

    assert host.poll() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(grammar._process._pid, 0)


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
    steps = [one_server.sampler.sample(logits.clone(), samples) for _ in range(4)]

    # each has been ready while the other was not, and keeps its mask
    pending = [[token.is_pending for token in step] for step in steps]
    assert not any(pending[-1])
    assert all(any(step) == all(step) for step in pending)
    [grammar] = [
        each for each in one_server.grammars._grammars.values() if each.users() and each.is_compiled
    ][-1:]
    assert {sample.sampler_state.matcher._grammar for sample in samples} == {grammar}
    assert grammar.users() == 2


def test_answers_that_ended_are_released_when_another_begins():
    server = Server(byte_level())
    for _ in range(3):
        server.answers([server.sequence({"choice": ["a"]}, seed=1)])
    [grammar] = server.grammars._grammars.values()

    server.answers([server.sequence({"choice": ["a"]}, seed=1)])

    # the last one waits for the next
    assert len(grammar._forgotten) <= 1


def test_a_step_that_chose_another_token_before_it_was_repeated_does_no_harm(one_server):
    sequence = one_server.sequence({"regex": "[ab]{10}"}, seed=1, max_tokens=20)
    logits = one_server.model.logits([sequence])
    letter = one_server.tokenizer.token_to_id("a")

    while one_server.sampler.sample(logits.clone(), [sequence])[0].is_pending:
        pass
    # its token was never appended
    sequence.token_ids.append(letter)

    [[text, reason]] = one_server.answers([sequence])
    assert re.fullmatch("[ab]{9}", text)
    assert reason == "stop"
