"""Tokens of texts and texts of token ids, which no model runs for."""

import json
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer
from transformers import AutoTokenizer

from tests.backend.fakes.input_limits import input_limits
from tests.backend.refusals import refused_request as refused
from tests.backend.requests import text
from tests.checkpoints import save_checkpoint
from varlen.errors import RequestError
from varlen.intake.checks import Intake
from varlen.intake.roles import TextRole, TextRoles
from varlen.intake.tokenization import Tokenizer
from varlen.models.checkpoint.family import NO_LABELS
from varlen.wire.generate import read_generate_request
from varlen.wire.outputs import ModelOutputs
from varlen.wire.rows import read_request

TEXTS = ["the cat's river", " ünïcode 😀 x", "a " * 30, "the"]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("gpt2") / "gpt2", "GPT2LMHeadModel")


@pytest.fixture(params=["small_bert", "byte_level"])
def folder(request):
    return request.getfixturevalue(request.param)


class FakeTemplate:
    """Puts the contents of messages behind each other."""

    def render(self, messages, variables):
        if any("content" not in message for message in messages):
            raise RequestError("a message has no content")
        words = [message["content"] for message in messages]
        return " ".join([*words, *variables.values()])


def new_intake(folder, roles=None):
    limits = replace(input_limits(max_text_bytes=400), vocab_size=300)
    return Intake(Tokenizer(folder, 12), limits, FakeTemplate(), roles=roles or TextRoles({}))


def objects_of(draft, answer):
    """Return the JSON objects of an answer whose steps run now."""
    request = draft.complete()
    assert request.prompts == ()
    ((name, tensor),) = answer.tensors([]).items()
    assert answer.num_bytes == sum(4 + len(each) for each in tensor.flat)
    return name, tensor.shape, [json.loads(each) for each in tensor.flat]


def of_rows(intake, *rows, requested=("num_tokens", "sentence_embedding"), **parameters):
    outputs = ModelOutputs("embed", 24, NO_LABELS, normalize=True)
    found = read_request(
        {"text": text(*rows)}, json.dumps(parameters), intake, outputs, requested=requested
    )
    return objects_of(*found)


def of_prompt(intake, parameters, **tensors):
    arrays = {
        name: np.array(
            [value if isinstance(value, bool) else value.encode()],
            dtype=None if isinstance(value, bool) else object,
        )
        for name, value in tensors.items()
    }
    return objects_of(
        *read_generate_request(arrays, json.dumps(parameters), intake, decoupled=True)
    )


def test_tokens_are_those_of_transformers(folder):
    oracle = AutoTokenizer.from_pretrained(folder)

    for special in (True, False):
        _, shape, found = of_rows(
            new_intake(folder), *TEXTS, operation="tokenize", add_special_tokens=special
        )
        expected = oracle(
            TEXTS,
            add_special_tokens=special,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
        )
        assert shape == (4, 1)
        assert [each["token_ids"] for each in found] == expected["input_ids"]
        assert [[tuple(pair) for pair in each["offsets"]] for each in found] == [
            [tuple(pair) for pair in row] for row in expected["offset_mapping"]
        ]
        assert [each["special"] for each in found] == [
            [bool(flag) for flag in row] for row in expected["special_tokens_mask"]
        ]
        for each in found:
            assert each["tokens"] == oracle.convert_ids_to_tokens(each["token_ids"])
            # longer texts than the model takes are tokenized as a whole
            assert (each["prompt"], each["max_tokens"]) == ("", 12)


def test_the_text_of_token_ids_is_that_of_the_library(folder):
    # not of transformers, which knows special tokens of more files
    oracle = HuggingFaceTokenizer.from_file(str(folder / "tokenizer.json"))
    rows = [oracle.encode(each).ids for each in TEXTS] + [[]]
    sent = [json.dumps(row) for row in rows]

    for skip, parameters in (
        (True, {}),
        (True, {"skip_special_tokens": True}),
        (False, {"skip_special_tokens": False}),
    ):
        _, _, found = of_rows(new_intake(folder), *sent, operation="detokenize", **parameters)
        assert [each["text"] for each in found] == [
            oracle.decode(row, skip_special_tokens=skip) for row in rows
        ]


def test_a_blank_text_is_its_special_tokens(small_bert):
    _, _, found = of_rows(new_intake(small_bert), "", " ", "\0", "\u3000", operation="tokenize")

    assert [each["token_ids"] for each in found] == [[2, 3]] * 4


def test_a_text_is_cut_to_any_number_of_tokens(small_bert):
    intake = new_intake(small_bert)

    _, _, [found] = of_rows(intake, "the cat " * 9, operation="tokenize", truncate_prompt_tokens=4)

    assert found["token_ids"] == [2, 5, 6, 3]
    assert found["offsets"] == [[0, 0], [0, 3], [4, 7], [0, 0]]
    with refused("truncate_prompt_tokens is 13; allowed: whole numbers from 2 to 12"):
        of_rows(intake, "the", operation="tokenize", truncate_prompt_tokens=13)


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_first_tokens_of_a_text_of_any_length_are_those_of_the_whole_text(small_bert, side):
    intake = new_intake(small_bert)
    text, form = "the cat " * 200_000, {"operation": "tokenize", "truncation_side": side}

    if side == "left":
        # its offsets would need the whole text
        with refused("row 0: text has 1600000 bytes; this model takes at most 400"):
            of_rows(intake, text, truncate=True, **form)
        return
    _, _, [found] = of_rows(intake, text, truncate=True, **form)
    assert found["token_ids"] == [2, *[5, 6] * 5, 3]
    blank = " " * 500 + "the cat"
    with refused("row 0: 400 bytes of text are read (max_text_bytes), which have too few tokens"):
        of_rows(intake, blank, truncate=True, **form)


def test_truncation_cuts_as_it_does_for_the_model(small_bert):
    intake = new_intake(small_bert)
    long = "the " + "cat " * 20 + "river"

    for side in ("right", "left"):
        [prompt] = intake.text_steps([long], truncate=True, side=side)[0].run()
        _, _, [found] = of_rows(
            intake, long, operation="tokenize", truncate=True, truncation_side=side
        )
        assert found["token_ids"] == prompt.token_ids.tolist()


def test_a_prompt_is_put_before_the_text_and_named(small_bert):
    roles = TextRoles(
        {"query": TextRole("the "), "document": TextRole(max_tokens=5)}, TextRole("a ")
    )
    intake = new_intake(small_bert, roles)

    def tokens_of(**parameters):
        _, _, [found] = of_rows(intake, "cat cat", operation="tokenize", **parameters)
        return found

    named = tokens_of(prompt_name="query")
    assert named["prompt"] == "the "
    assert named["token_ids"] == [2, 5, 6, 6, 3]
    assert named["offsets"][1:-1] == [[0, 3], [4, 7], [8, 11]]
    assert tokens_of(input_type="passage")["max_tokens"] == 5
    assert tokens_of()["prompt"] == "a "


def test_the_answer_is_the_first_output_that_the_request_names(small_bert):
    intake = new_intake(small_bert)

    assert of_rows(intake, "cat", operation="tokenize")[0] == "sentence_embedding"
    found = of_rows(intake, "cat", requested=["num_tokens"], operation="tokenize")
    assert found[0] == "num_tokens"


def test_rows_stay_in_order_over_steps(small_bert):
    limits = input_limits(max_text_bytes=5000)
    rows = ["cat " * (1 + index % 7) + "the " * (900 * (index % 3 == 0)) for index in range(20)]

    _, _, found = of_rows(Intake(Tokenizer(small_bert, 12), limits), *rows, operation="tokenize")

    assert [len(each["token_ids"]) for each in found] == [len(row.split()) + 2 for row in rows]


def test_prompts_of_generation_are_tokenized(byte_level):
    oracle, intake = AutoTokenizer.from_pretrained(byte_level), new_intake(byte_level)

    name, shape, [found] = of_prompt(intake, {"operation": "tokenize"}, text_input="the cat")
    assert (name, shape) == ("text_output", (1,))
    assert found["token_ids"] == oracle("the cat")["input_ids"]
    # the input comes before the request's parameters
    sampling = json.dumps({"operation": "detokenize", "skip_special_tokens": False})
    _, _, [back] = of_prompt(
        intake, {}, text_input=json.dumps(found["token_ids"]), sampling_parameters=sampling
    )
    assert back == {"text": "the cat"}


def test_messages_are_tokenized_without_more_special_tokens(small_bert):
    intake = new_intake(small_bert)
    messages = json.dumps([{"content": "the"}, {"content": "cat"}])

    _, _, [found] = of_prompt(intake, {"operation": "tokenize"}, messages=messages)
    assert found["token_ids"] == [5, 6]
    more = {"operation": "tokenize", "add_special_tokens": True}
    _, _, [found] = of_prompt(intake, more, messages=messages)
    assert found["token_ids"] == [2, 5, 6, 3]
    more = {"operation": "tokenize", "chat_template_kwargs": {"end": "cat"}}
    _, _, [found] = of_prompt(intake, more, messages=messages)
    assert found["token_ids"] == [5, 6, 6]
    with refused("chat_template_kwargs without messages"):
        of_prompt(intake, more, text_input="the")
    with refused("a message has no content"):
        of_prompt(intake, {"operation": "tokenize"}, messages="[{}]")
    with refused("row 0: text has 401 bytes; this model takes at most 400"):
        of_prompt(intake, {"operation": "tokenize"}, messages=json.dumps([{"content": "a" * 401}]))


@pytest.mark.parametrize(
    "sent", ["101", "[1, true]", "[1.0]", "[-1]", "[300]", '["a"]', "[[1]]", "{}", "null"]
)
def test_refuses_what_is_no_list_of_token_ids(small_bert, sent):
    shown = json.dumps(json.loads(sent))
    with refused(f"row 1: text is {shown}; allowed: a JSON list of token ids from 0 to 299"):
        of_rows(new_intake(small_bert), "[1]", sent, operation="detokenize")


@pytest.mark.parametrize(
    "row, parameters, message",
    [
        ("[1", {"operation": "detokenize"}, 'row 0: text is "[1"; allowed: JSON'),
        ("[" * 400, {"operation": "detokenize"}, 'row 0: text is "[[[['),
        ("a" * 401, {"operation": "tokenize"}, "row 0: text has 401 bytes"),
        ("a", {"operation": "encode"}, 'operation is "encode"; allowed: infer, tokenize, detoken'),
        ("a", {"operation": None}, "operation is null; allowed: infer, tokenize, detokenize"),
        ("a", {"operation": "tokenize", "add_special_tokens": 1}, "add_special_tokens is 1; allow"),
        ("a", {"operation": "tokenize", "prompt_name": "q"}, "prompt_name is 'q'; this model has"),
        (
            "a",
            {"operation": "tokenize", "normalize": True},
            "the parameter normalize is not for the operation tokenize; leave it out",
        ),
        (
            "[1]",
            {"operation": "detokenize", "add_special_tokens": True},
            "the parameter add_special_tokens is not for the operation detokenize; leave it out",
        ),
        (
            "a",
            {"add_special_tokens": True},
            "the parameter add_special_tokens is for the operation tokenize",
        ),
        (
            "a",
            {"operation": "infer", "skip_special_tokens": True},
            "the parameter skip_special_tokens is for the operation detokenize",
        ),
    ],
)
def test_refuses_what_an_operation_does_not_read(small_bert, row, parameters, message):
    with pytest.raises(RequestError) as error:
        of_rows(new_intake(small_bert), row, **parameters)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "more, message",
    [
        (
            {"input_ids": np.array([[5]])},
            "the request has text, input_ids; the operation tokenize reads only text",
        ),
        (
            {"text_pair": text("b")},
            "row 0: text_pair is not empty; the operation tokenize reads only text",
        ),
        ({"text_pair": text("", "")}, "text_pair has 2 rows; text has 1"),
    ],
)
def test_reads_texts_only(small_bert, more, message):
    tensors = {"text": text("a"), **more}
    outputs = ModelOutputs("classify", 2, NO_LABELS, normalize=True)

    with refused(message):
        read_request(
            tensors,
            '{"operation": "tokenize"}',
            new_intake(small_bert),
            outputs,
            requested=["logits"],
        )


@pytest.mark.parametrize(
    "parameters, tensors, message",
    [
        (
            {"operation": "tokenize"},
            {"text_input": "a", "stream": True},
            "the request has stream, text_input; the operation tokenize reads only text_input or messages",
        ),
        (
            {"operation": "detokenize"},
            {"messages": "[]"},
            "the request has messages; the operation detokenize reads only text_input",
        ),
        ({"operation": "tokenize"}, {}, "the request has no prompt; the operation tokenize"),
        ({"operation": 3}, {"text_input": "a"}, "operation is 3; allowed: infer, tokenize, detok"),
        (
            {"operation": "tokenize", "top_k": 4},
            {"text_input": "a"},
            "the parameter top_k is not for the operation tokenize; leave it out",
        ),
        (
            {},
            {"text_input": "a", "sampling_parameters": '{"operation": "tokenize", "x": 1}'},
            "the parameter x is not for the operation tokenize; leave it out",
        ),
        (
            {"add_special_tokens": False},
            {"text_input": "a"},
            "the parameter add_special_tokens is for the operation tokenize",
        ),
    ],
)
def test_refuses_what_an_operation_on_a_prompt_does_not_read(
    small_bert, parameters, tensors, message
):
    with pytest.raises(RequestError) as error:
        of_prompt(new_intake(small_bert), parameters, **tensors)
    assert str(error.value).startswith(message)


def test_pairs_that_a_model_requires_may_be_empty(small_bert):
    outputs = ModelOutputs("rerank", 1, NO_LABELS, normalize=True)
    tensors = {"text": text("cat", "the"), "text_pair": text("", "")}

    found = read_request(
        tensors, '{"operation": "tokenize"}', new_intake(small_bert), outputs, requested=["logits"]
    )

    name, _, rows = objects_of(*found)
    assert (name, [each["token_ids"] for each in rows]) == ("logits", [[2, 6, 3], [2, 5, 3]])


def test_generation_keeps_its_option_of_special_tokens(small_bert):
    intake = new_intake(small_bert)
    tensors = {"text_input": np.array([b"cat"], dtype=object)}

    draft, _ = read_generate_request(
        tensors, '{"skip_special_tokens": false, "operation": "infer"}', intake, decoupled=True
    )

    assert draft.options.generation.skip_special_tokens is False


def test_adapters_are_told_whatever_the_text(small_bert):
    adapters = {"legal": "", "cut": "a factor is missing"}
    limits = replace(input_limits(max_text_bytes=400), vocab_size=300)
    intake = Intake(Tokenizer(small_bert, 12), limits, adapters=adapters.items())

    _, shape, found = of_rows(intake, "a", "b", operation="adapters", tenant="x")
    _, _, [other] = of_prompt(intake, {"operation": "adapters"}, text_input="a")

    assert shape == (2, 1)
    assert found == [{"adapters": adapters}] * 2
    assert other == {"adapters": adapters}
    with refused("truncate is not for the operation adapters; leave it out"):
        of_rows(intake, "a", operation="adapters", truncate=True)
