"""The wire format of generation: the vLLM backend's tensors in, parts of text out."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.fakes.input_limits import input_limits
from tests.backend.refusals import refused_request as refused
from tests.generation_refusals import generation_refusals, json_refusals
from varlen.errors import RequestError
from varlen.intake.checks import Intake
from varlen.intake.tokenization import Tokenizer
from varlen.request.generation import GenerationOptions
from varlen.request.request import GeneratedPart, TokenLogprobs
from varlen.tasks import input_specs, output_specs
from varlen.wire.generate import GeneratedAnswer, ResponseSpec, read_generate_request

FLAGS = {
    name: np.array([True])
    for name in (
        "return_finish_reason",
        "return_cumulative_logprob",
        "return_logprobs",
        "return_num_input_tokens",
        "return_num_output_tokens",
        "return_output_ids",
    )
}
ALL_OUTPUTS = frozenset(name.removeprefix("return_") for name in FLAGS)
SEARCH_OUTPUTS = ALL_OUTPUTS | {"score"}


class FakeTemplate:
    """Puts the contents of messages behind each other."""

    def render(self, messages, variables):
        if any("content" not in message for message in messages):
            raise RequestError("a message has no content")
        return " ".join([*(message["content"] for message in messages), *variables])


@pytest.fixture(scope="module")
def intake(small_bert):
    return Intake(Tokenizer(small_bert, 12), input_limits(), FakeTemplate())


def text(value):
    return np.array([value if isinstance(value, bytes) else value.encode()], dtype=object)


def sampling(**parameters):
    return text(json.dumps(parameters))


def read(intake, parameters="", *, decoupled=True, timeout=0, **tensors):
    if isinstance(parameters, dict):
        parameters = json.dumps(parameters)
    """Return the request of these tensors, whose text is tokenized at once, and what its responses hold."""
    draft, spec = read_generate_request(
        tensors, parameters, intake, decoupled=decoupled, timeout_microseconds=timeout
    )
    return draft.complete(), spec


def ids_of(request):
    [prompt] = request.prompts
    return prompt.token_ids.tolist()


def test_the_tensors_are_those_of_the_vllm_backend():
    expected = {
        "text_input": ("TYPE_STRING", (1,)),
        "stream": ("TYPE_BOOL", (1,)),
        "sampling_parameters": ("TYPE_STRING", (1,)),
        "exclude_input_in_output": ("TYPE_BOOL", (1,)),
        "return_finish_reason": ("TYPE_BOOL", (1,)),
        "return_cumulative_logprob": ("TYPE_BOOL", (1,)),
        "return_logprobs": ("TYPE_BOOL", (1,)),
        "return_num_input_tokens": ("TYPE_BOOL", (1,)),
        "return_num_output_tokens": ("TYPE_BOOL", (1,)),
    }
    inputs = {spec.name: (spec.data_type, spec.dims) for spec in input_specs("generate")}
    assert inputs.items() >= expected.items()
    assert all(spec.optional for spec in input_specs("generate"))
    assert {spec.name: (spec.data_type, spec.dims) for spec in output_specs("generate")} == {
        "text_output": ("TYPE_STRING", (-1,)),
        "finish_reason": ("TYPE_STRING", (-1,)),
        "cumulative_logprob": ("TYPE_FP32", (-1,)),
        "logprobs": ("TYPE_STRING", (-1,)),
        "score": ("TYPE_FP32", (-1,)),
        "num_input_tokens": ("TYPE_UINT32", (1,)),
        "num_output_tokens": ("TYPE_UINT32", (-1,)),
        "output_ids": ("TYPE_INT64", (-1,)),
    }


@pytest.mark.parametrize("refusal", generation_refusals(), ids=lambda each: each.description)
@pytest.mark.parametrize("in_tensor", [True, False], ids=["sampling_parameters", "parameters"])
def test_each_mistake_has_its_message(intake, refusal, in_tensor):
    tensors = dict(refusal.inputs)
    if in_tensor:
        tensors["sampling_parameters"] = sampling(**refusal.parameters)

    with pytest.raises(RequestError) as caught:
        read(intake, {} if in_tensor else refusal.parameters, **tensors)

    assert str(caught.value) == refusal.message


def test_reads_a_text(intake):
    request, spec = read(intake, text_input=text("the cat"))

    assert ids_of(request) == [2, 5, 6, 3]
    assert request.options.generation.max_tokens == 16
    assert spec == ResponseSpec(rows=1, prefix="the cat")


def test_reads_token_ids(intake):
    request, spec = read(intake, input_ids=np.array([5, 6, 7]))

    assert ids_of(request) == [5, 6, 7]
    assert spec == ResponseSpec(rows=1)


def test_reads_messages_with_the_chat_template_and_adds_no_special_tokens(intake):
    messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "cat"}]

    request, spec = read(intake, messages=text(json.dumps(messages)))

    assert ids_of(request) == [5, 6]
    assert spec.prefix == ""


@pytest.mark.parametrize("in_tensor", [True, False])
@pytest.mark.parametrize("sent", [{"cat": {"a": [1]}}, '{"cat": true}'], ids=str)
def test_the_chat_template_gets_its_variables(intake, sent, in_tensor):
    messages = text('[{"role": "user", "content": "the"}]')
    given = {"chat_template_kwargs": sent}
    tensors = {"sampling_parameters": sampling(**given)} if in_tensor else {}

    request, _ = read(intake, {} if in_tensor else given, messages=messages, **tensors)

    alone, _ = read(intake, messages=text('[{"role": "user", "content": "the cat"}]'))
    assert ids_of(request) == ids_of(alone)


def test_refuses_messages_without_a_chat_template(small_bert):
    plain = Intake(Tokenizer(small_bert, 12), input_limits())

    with refused("the checkpoint has no chat template"):
        read(plain, messages=text("[]"))


@pytest.mark.parametrize("messages", ["{}", "3", '["a"]', "null"])
def test_refuses_messages_that_are_no_list_of_objects(intake, messages):
    with refused("allowed: a JSON list of objects with role and content"):
        read(intake, messages=text(messages))


@pytest.mark.parametrize("refusal", json_refusals(), ids=lambda each: each.description)
def test_options_that_take_long_to_read_are_refused(intake, refusal):
    with pytest.raises(RequestError) as caught:
        read(intake, **refusal.inputs)

    assert str(caught.value) == refusal.message


def test_options_of_the_largest_size_and_depth_are_read(intake):
    deep = b'{"structured_outputs":{"json":{"default":' + b"[" * 97 + b"]" * 97 + b"}}}"
    sampling = deep + b" " * (131_072 - len(deep))

    request, _ = read(intake, text_input=text("a"), sampling_parameters=text(sampling))

    assert request.options.generation.grammar


def test_messages_are_read_with_the_tokens_not_in_execute(intake):
    draft, _ = read_generate_request({"messages": text("[" * 5000)}, "{}", intake, decoupled=True)

    assert draft.num_bytes == 5000
    with refused("messages is "):
        draft.complete()


def test_refuses_messages_that_are_longer_than_their_text_can_be(intake):
    with refused("messages has 32001 bytes; allowed: up to 32000"):
        read_generate_request({"messages": text(b"\xff" * 32_001)}, "{}", intake, decoupled=True)


def test_refuses_messages_of_more_values_than_their_text_may_have_commas(intake):
    with refused("messages has 24001 commas and opening brackets; allowed: up to 24000"):
        read(intake, messages=text("[" + "," * 24_000))


def test_the_text_of_messages_may_consist_of_commas(intake):
    with refused("tokens; this model takes at most 12"):
        read(intake, messages=text(json.dumps([{"role": "user", "content": "," * 4000}])))


def test_escapes_and_other_fields_do_not_make_messages_too_long(intake):
    content = json.dumps("the cat" + " " * 3900).replace(" ", "\\u0020")
    messages = f'[{{"role": "user", "content": {content}, "id": 1}}]'

    request, _ = read(intake, messages=text(messages))

    assert len(messages) > 20_000
    assert ids_of(request) == ids_of(read(intake, text_input=text("the cat"))[0])[1:-1]


def test_refuses_a_request_without_a_prompt(intake):
    with refused("the request has no prompt; send one of text_input, input_ids, messages"):
        read(intake)


def test_refuses_two_prompts(intake):
    with refused("the request has text_input and input_ids; send one of"):
        read(intake, text_input=text("a"), input_ids=np.array([1]))


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({"text_input": text(b"a\xff")}, "text_input is not UTF-8 at byte 1; send UTF-8"),
        ({"text_input": np.array([[b"a"]], object)}, "text_input has shape [1, 1]; send [1]"),
        ({"input_ids": np.array([[1]])}, "input_ids has shape [1, 1]; send [tokens]"),
        ({"input_ids": np.array([], np.int64)}, "input_ids has no tokens"),
        ({"input_ids": np.array([60])}, "input_ids holds 60; this model takes 0 to 59"),
        ({"input_ids": np.array([-1])}, "input_ids holds -1"),
        ({"input_ids": np.array([5] * 13)}, "input_ids has 13 tokens; this model takes at most 12"),
        ({"text_input": text("a " * 20)}, "text has 22 tokens; this model takes at most 12"),
        ({"messages": text("{")}, 'messages is "{"; allowed: JSON'),
        ({"messages": text('[{"role": "user"}]')}, "a message has no content"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refuses_a_prompt_that_cannot_be_served(intake, tensors, message):
    with refused(message):
        read(intake, **tensors)


def test_request_parameters_are_sampling_parameters(intake):
    given = {"max_tokens": 3, "temperature": 0.5, "request_priority": 4, "deadline_ms": 250}
    given |= {"tenant": "a", "cache_salt": "b"}

    request, _ = read(intake, given, text_input=text("a"))

    options = request.options
    assert (options.generation.max_tokens, options.generation.temperature) == (3, 0.5)
    assert (options.priority, options.deadline_seconds) == (4, 0.25)
    assert (options.tenant, options.cache_salt) == ("a", "b")


def test_the_tensor_of_sampling_parameters_comes_first(intake):
    request, _ = read(
        intake,
        {"max_tokens": 3, "top_p": 0.5},
        text_input=text("a"),
        sampling_parameters=sampling(max_tokens=5, stop=["x"], request_priority=2),
    )

    options = request.options
    assert (options.generation.max_tokens, options.generation.top_p) == (5, 0.5)
    assert (options.generation.stop, options.priority) == (("x",), 2)


@pytest.mark.parametrize("name", ["tenant", "request_priority", "deadline_ms", "operation"])
def test_refuses_what_a_proxy_may_have_set_in_sampling_parameters_too(intake, name):
    value = {"tenant": "a", "operation": "infer"}.get(name, 1)
    with refused(f"{name} is a parameter of the request and in sampling_parameters; send it once"):
        read(
            intake,
            {name: value},
            text_input=text("a"),
            sampling_parameters=sampling(**{name: value}),
        )


@pytest.mark.parametrize("value", ["[]", "3", '"max_tokens"', "null"])
def test_refuses_sampling_parameters_that_are_no_object(intake, value):
    with refused("; allowed: a JSON object"):
        read(intake, text_input=text("a"), sampling_parameters=text(value))


@pytest.mark.parametrize("name", ["max_tokens", "temperature", "n", "top_k"])
@pytest.mark.parametrize("in_tensor", [True, False])
def test_refuses_a_value_that_is_not_allowed_wherever_it_comes(intake, name, in_tensor):
    tensors = {"sampling_parameters": sampling(**{name: -7})} if in_tensor else {}

    with refused(f"{name} is -7; allowed: "):
        read(intake, {} if in_tensor else {name: -7}, text_input=text("a"), **tensors)


def test_refuses_an_unknown_sampling_parameter(intake):
    with refused('unknown parameter "max_tokenz". Did you mean "max_tokens"?'):
        read(intake, text_input=text("a"), sampling_parameters=sampling(max_tokenz=1))


def test_refuses_a_near_miss_among_request_parameters_and_ignores_what_frontends_add(intake):
    with refused('unknown parameter "max_token". Did you mean "max_tokens"?'):
        read(intake, {"max_token": 3}, text_input=text("a"))

    added = {"triton_enable_empty_final_response": True, "id": "7", "X-Tenant": "a", "model": "m"}
    read(intake, added, text_input=text("a"))


@pytest.mark.parametrize("in_tensor", [True, False])
def test_names_of_other_servers_are_read_wherever_they_come(intake, in_tensor):
    given = {"max_new_tokens": 3, "stop_words": "x", "pad_id": 2, "end_id": 2, "bad_words": ""}
    tensors = {"sampling_parameters": sampling(**given)} if in_tensor else {}

    request, _ = read(intake, {} if in_tensor else given, text_input=text("a"), **tensors)

    options = request.options.generation
    assert (options.max_tokens, options.stop, options.stop_token_ids) == (3, ("x",), (2,))


def test_the_sooner_deadline_holds(intake):
    request, _ = read(intake, {"deadline_ms": 500}, timeout=40_000, text_input=text("a"))

    assert request.options.deadline_seconds == 0.04


def test_streams_only_from_a_decoupled_model(intake):
    stream = np.array([True])

    draft, spec = read(intake, text_input=text("a"), stream=stream)
    assert spec.stream
    assert draft.options.streams
    with refused("stream is true, but this model sends one response per request"):
        read(intake, decoupled=False, text_input=text("a"), stream=stream)
    draft, spec = read(intake, decoupled=False, text_input=text("a"), stream=~stream)
    assert not spec.stream
    assert not draft.options.streams


@pytest.mark.parametrize(
    "stream, exclude, prefix",
    [
        (False, None, "a"),
        (False, False, "a"),
        (False, True, ""),
        (True, None, ""),
        (True, True, ""),
    ],
)
def test_the_answer_begins_with_the_prompt_as_the_vllm_backend_has_it(
    intake, stream, exclude, prefix
):
    tensors = {} if exclude is None else {"exclude_input_in_output": np.array([exclude])}

    _, spec = read(intake, text_input=text("a"), stream=np.array([stream]), **tensors)

    assert spec.prefix == prefix


def test_a_translation_does_not_begin_with_its_source_and_counts_its_tokens(small_bert):
    translating = Intake(Tokenizer(small_bert, 12), input_limits(), target_start=3)

    request, spec = read(translating, text_input=text("the cat"))

    [prompt] = request.prompts
    assert (prompt.payload.tokens.tolist(), prompt.token_ids.tolist()) == ([2, 5, 6, 3], [3])
    assert spec == ResponseSpec(rows=1)
    with refused("exclude_input_in_output is false; only a request with text_input"):
        read(translating, text_input=text("the cat"), exclude_input_in_output=np.array([False]))


@pytest.mark.parametrize(
    "tensors",
    [{"text_input": text("a"), "stream": np.array([True])}, {"input_ids": np.array([5])}],
    ids=["stream", "token ids"],
)
def test_refuses_to_begin_with_a_prompt_that_is_no_text_or_is_streamed(intake, tensors):
    with refused("exclude_input_in_output is false; only a request with text_input"):
        read(intake, exclude_input_in_output=np.array([False]), **tensors)


def test_refuses_a_flag_of_another_shape(intake):
    with refused("stream has shape [2]; send [1]"):
        read(intake, text_input=text("a"), stream=np.array([True, False]))


def test_outputs_are_those_that_the_request_asks_for(intake):
    _, spec = read(intake, text_input=text("a"), **FLAGS)
    assert spec.returns == ALL_OUTPUTS

    off = {name: ~flag for name, flag in FLAGS.items()}
    _, spec = read(intake, text_input=text("a"), **off)
    assert spec.returns == frozenset()


@pytest.mark.parametrize("name", ["return_logprobs", "return_cumulative_logprob"])
@pytest.mark.parametrize("given, expected", [({}, 0), ({"logprobs": 3}, 3)])
def test_asking_for_log_probabilities_has_them_computed(intake, name, given, expected):
    request, _ = read(intake, given, text_input=text("a"), **{name: np.array([True])})

    assert request.options.generation.logprobs == expected


def answer(*, rows=1, prefix="", returns=ALL_OUTPUTS):
    return GeneratedAnswer(
        ResponseSpec(rows, False, prefix, frozenset(returns)),
        4,
        lambda i: f"<{i}>",
        lambda i: f"<{i}>".encode(),
    )


def listed(tensors):
    return {name: array.tolist() for name, array in tensors.items()}


def test_a_response_holds_what_came_since_the_last_one():
    made = answer(rows=2, prefix="x ")
    first = GeneratedPart("a", (1,), (TokenLogprobs(1, -0.5, token_bytes=b"a"),))
    tokens = TokenLogprobs(2, -1.0, token_bytes=b"b"), TokenLogprobs(3, -2.0, token_bytes=b"c")
    second = GeneratedPart("b", (2, 3), tokens, "stop")

    assert listed(made.tensors([(0, first), (0, second), (1, first)])) == {
        "text_output": [b"x ab", b"x a"],
        "finish_reason": [b"stop", b"None"],
        "cumulative_logprob": [-3.5, -0.5],
        "logprobs": [
            b'[{"1": {"logprob": -0.5, "rank": null, "decoded_token": "<1>", "bytes": [97]}},'
            b' {"2": {"logprob": -1.0, "rank": null, "decoded_token": "<2>", "bytes": [98]}},'
            b' {"3": {"logprob": -2.0, "rank": null, "decoded_token": "<3>", "bytes": [99]}}]',
            b'[{"1": {"logprob": -0.5, "rank": null, "decoded_token": "<1>", "bytes": [97]}}]',
        ],
        "num_input_tokens": [4],
        "num_output_tokens": [3, 1],
        "output_ids": [1, 2, 3, 1],
    }
    last = GeneratedPart("é", (9,), (TokenLogprobs(9, -1.5, token_bytes="é".encode()),), "length")
    assert listed(made.tensors([(1, last)])) == {
        "text_output": [b"", "é".encode()],
        "finish_reason": [b"stop", b"length"],
        "cumulative_logprob": [-3.5, -2.0],
        "logprobs": [
            b"[]",
            b'[{"9": {"logprob": -1.5, "rank": null, "decoded_token": "<9>", "bytes": [195, 169]}}]',
        ],
        "num_input_tokens": [4],
        "num_output_tokens": [0, 1],
        "output_ids": [9],
    }


def test_log_probabilities_name_the_chosen_token_once_and_are_finite_json():
    chosen = TokenLogprobs(5, -0.75, top=((8, -0.25), (5, -0.75)))
    rare = TokenLogprobs(3, float("-inf"), top=((8, -0.25),))

    made = answer().tensors([(0, GeneratedPart("a", (5, 3), (chosen, rare)))])

    first, second = json.loads(made["logprobs"][0], parse_constant=pytest.fail)
    assert {token: entry["rank"] for token, entry in first.items()} == {"8": 1, "5": 2}
    assert {token: entry["rank"] for token, entry in second.items()} == {"8": 1, "3": None}
    assert second["3"]["logprob"] == -9999.0
    # a token that was not chosen has the bytes that it would have added
    assert [entry["bytes"] for entry in first.values()] == [[*b"<8>"], []]


def test_the_types_are_those_of_the_configuration():
    types = {
        "TYPE_STRING": np.object_,
        "TYPE_FP32": np.float32,
        "TYPE_UINT32": np.uint32,
        "TYPE_INT64": np.int64,
    }
    for outputs in ([], [(0, GeneratedPart("a", (1,), finish_reason="stop"))]):
        made = answer(returns=SEARCH_OUTPUTS).tensors(outputs)
        assert made.keys() == {spec.name for spec in output_specs("generate")}
        for spec in output_specs("generate"):
            assert made[spec.name].dtype == types[spec.data_type]
            assert made[spec.name].ndim == 1


def test_answers_of_a_search_have_scores_instead_of_log_probabilities(intake):
    beams = text('{"num_beams": 2}')
    yes = np.array([True])
    request, spec = read(
        intake, text_input=text("the cat"), sampling_parameters=beams, return_score=yes
    )

    assert request.options.generation.num_beams == 2
    part = GeneratedPart("a", (1,), finish_reason="stop", score=-0.5)
    made = GeneratedAnswer(spec, 4, str, bytes).tensors([(0, part)])
    assert made["score"].tolist() == [-0.5]
    # JSON has no infinity
    nothing = GeneratedPart("", (), finish_reason="length", score=float("-inf"))
    assert np.isfinite(GeneratedAnswer(spec, 4, str, bytes).tensors([(0, nothing)])["score"]).all()
    with refused("return_logprobs is true; score is that of a beam search"):
        read(intake, text_input=text("a"), sampling_parameters=beams, return_logprobs=yes)
    with refused("return_score is true; only a beam search has it"):
        read(intake, text_input=text("a"), return_score=yes)


def test_without_flags_only_the_text_is_sent():
    assert listed(answer(returns=()).tensors([(0, GeneratedPart("a", (1,)))])) == {
        "text_output": [b"a"]
    }


@settings(max_examples=40)
@given(st.data())
def test_an_answer_is_the_same_however_its_parts_share_responses(data):
    rows = data.draw(st.integers(1, 3))
    count = data.draw(st.integers(1, 12))
    outputs = [
        (
            data.draw(st.integers(0, rows - 1)),
            GeneratedPart(
                data.draw(st.text(max_size=3)), (number,), (TokenLogprobs(number, -0.5),)
            ),
        )
        for number in range(count)
    ]
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, count), max_size=4))), count]
    whole, parted = answer(rows=rows, prefix="x"), answer(rows=rows, prefix="x")

    expected = whole.tensors(outputs)
    responses = [parted.tensors(outputs[begin:end]) for begin, end in pairwise(cuts)]

    texts = zip(*(each["text_output"] for each in responses), strict=True)
    assert [b"".join(each) for each in texts] == expected["text_output"].tolist()
    total = sum(each["num_output_tokens"] for each in responses)
    assert total.tolist() == expected["num_output_tokens"].tolist()
    last = responses[-1]["cumulative_logprob"]
    assert last.tolist() == expected["cumulative_logprob"].tolist()


def test_every_served_parameter_may_be_a_parameter_of_the_request(intake):
    with pytest.raises(RequestError) as caught:
        GenerationOptions.from_parameters({"?": 1})
    served = str(caught.value).partition("Allowed: ")[2].split(", ")

    assert {"max_tokens", "structured_outputs"} <= set(served)
    for name in served:
        # any string is a stop string and a word
        wrong = 1.5 if name in ("stop", "bad_words") else "?"
        with pytest.raises(RequestError, match="allowed:"):
            read(intake, json.dumps({name: wrong}), text_input=text("a"))
