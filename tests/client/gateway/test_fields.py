"""Which fields of completions and chats are served, allowed in one value, ignored or refused."""

import json

import pytest
from openai.types import completion_create_params
from openai.types.chat import chat_completion_stream_options_param
from openai.types.chat import completion_create_params as chat

from varlen_client.gateway import GatewaySettings
from varlen_client.gateway.app import create_app
from varlen_client.gateway.generation import MAX_ARGUMENT_CHARACTERS, ChatBody, CompletionsBody
from varlen_client.gateway.sampling import MAX_REQUEST_ID_CHARACTERS, StreamOptions

from .fake_models import Calls, FakeClient

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "f"}}]
HELLO = [{"role": "user", "content": "hello"}]
BODIES = {
    COMPLETION: {"model": "writer", "prompt": "a"},
    CHAT: {"model": "writer", "messages": HELLO},
}
BOTH = (COMPLETION, CHAT)
SCHEMA = {"type": "object"}

# Passed on as they are.
PASSED_ON = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "min_tokens": 2,
    "max_tokens": 3,
    "seed": 3,
    "stop": ["a", "b"],
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": -100.0},
    "bad_words": ["no"],
    "stop_token_ids": [7],
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "num_beams": 4,
    "length_penalty": 0.5,
    "early_stopping": "never",
    "cache_salt": "salt",
}

# Fields, and the options that the server gets.
SERVED = [
    *((BOTH, {name: value}, {name: value}) for name, value in PASSED_ON.items()),
    (BOTH, {"early_stopping": True}, {"early_stopping": True}),
    (BOTH, {"use_beam_search": True, "n": 3}, {"num_beams": 3}),
    (BOTH, {"guided_json": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
    (BOTH, {"guided_json": "{}"}, {"structured_outputs": {"json": "{}"}}),
    (BOTH, {"guided_regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
    (BOTH, {"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}),
    (BOTH, {"structured_outputs": {"regex": "a"}}, {"structured_outputs": {"regex": "a"}}),
    (
        BOTH,
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
    ),
    (
        BOTH,
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
            }
        },
        {"structured_outputs": {"json": SCHEMA}},
    ),
    *(
        (BOTH, {"response_format": {"type": kind, "value": value}}, {"structured_outputs": asked})
        for kind, value, asked in (
            ("json_object", SCHEMA, {"json": SCHEMA}),
            ("json", SCHEMA, {"json": SCHEMA}),
            ("regex", "a+", {"regex": "a+"}),
        )
    ),
    ((CHAT,), {"max_completion_tokens": 2}, {"max_tokens": 2}),
    # their log probabilities rank the samples
    (BOTH, {"n": 2, "best_of": 3}, {"logprobs": 0}),
    (BOTH, {"n": "2", "temperature": "0.7", "seed": 3.0}, {"temperature": 0.7, "seed": 3}),
    (BOTH, {"stop": ["a", "", "b"]}, {"stop": ["a", "b"]}),
    ((CHAT,), {"logprobs": 1, "top_logprobs": 2}, {"logprobs": 2}),
    ((CHAT,), {"chat_template": "rag"}, {"chat_template_kwargs": {"chat_template": "rag"}}),
    (
        (CHAT,),
        {"chat_template_kwargs": {"tone": "kind"}},
        # as vLLM does
        {"chat_template_kwargs": {"tone": "kind", "ignore_unread": True}},
    ),
]

# Fields that change nothing, in these values.
NO_EFFECT = [
    (BOTH, {"service_tier": "flex"}),
    (BOTH, {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s"}),
    (BOTH, {"prompt_cache_key": "k", "prompt_cache_retention": "24h"}),
    (BOTH, {"store": True}),
    (BOTH, {"n": 1, "best_of": 1}),
    (BOTH, {"logit_bias": {}, "bad_words": [], "stop": "", "stop_token_ids": []}),
    (BOTH, {"stop": [""], "stream": "false", "seed": None, "max_tokens": None}),
    (BOTH, {"response_format": {"type": "text"}}),
    (BOTH, {"use_beam_search": False, "priority": 0, "session_id": "s"}),
    (BOTH, {"guided_decoding_backend": "xgrammar", "guided_json": None}),
    (BOTH, {"detokenize": True, "spaces_between_special_tokens": True, "watermarking": False}),
    (BOTH, {"thinking_token_budget": -1, "stream_interval": 1, "return_mm_kwargs": True}),
    (BOTH, {"return_tokens_as_token_ids": False, "return_token_ids": False}),
    (BOTH, {"return_token_offsets": False, "routed_experts_prompt_start": 0}),
    (BOTH, {"allowed_token_ids": None, "truncate_prompt_tokens": None, "prompt_logprobs": None}),
    ((COMPLETION,), {"echo": False, "suffix": None, "add_special_tokens": True}),
    ((COMPLETION,), {"suffix": "", "prompt_embeds": None}),
    ((CHAT,), {"parallel_tool_calls": False, "reasoning_effort": "low"}),
    ((CHAT,), {"tools": TOOLS, "parallel_tool_calls": True}),
    ((CHAT,), {"tools": TOOLS, "tool_choice": "auto"}),
    ((CHAT,), {"functions": [{"name": "f"}], "function_call": "auto"}),
    # of Qwen's clients, OpenRouter and LobeChat
    ((CHAT,), {"enable_thinking": False, "thinking_budget": 100, "plugins": []}),
    (BOTH, {"provider": {"order": ["a"]}, "transforms": ["middle-out"], "route": "fallback"}),
    (BOTH, {"models": ["a", "b"], "usage": {"include": True}}),
    ((CHAT,), {"tools": TOOLS, "tool_choice": "none"}),
    ((CHAT,), {"functions": [{"name": "f"}], "function_call": "none"}),
    ((CHAT,), {"tools": [], "functions": []}),
    ((CHAT,), {"prediction": None, "audio": None, "web_search_options": None}),
    ((CHAT,), {"modalities": ["text"], "verbosity": "low", "chat_template_kwargs": {}}),
    ((CHAT,), {"logprobs": False, "top_logprobs": 0}),
    ((CHAT,), {"logprobs": 0}),
    ((CHAT,), {"echo": False, "add_generation_prompt": True, "continue_final_message": False}),
    ((CHAT,), {"add_special_tokens": False, "include_reasoning": False}),
    ((CHAT,), {"return_prompt_text": False, "documents": None, "chat_template": None}),
]

# Fields, and a part of the message.
REFUSED = [
    (BOTH, {"n": 0}, "n is 0: Input should be greater than or equal to 1"),
    (BOTH, {"n": 2, "best_of": 1}, "best_of is 1; allowed: from n, which is 2"),
    (BOTH, {"best_of": 3, "stream": True}, "best_of is 3 with stream: true; allowed: n, which"),
    (BOTH, {"best_of": 3, "num_beams": 3}, "the request has best_of and beams; send one"),
    (BOTH, {"priority": 3}, "priority is 3: Input should be 0"),
    (BOTH, {"detokenize": False}, "detokenize is False: Input should be True"),
    (BOTH, {"return_token_ids": True}, "return_token_ids is True: Input should be False"),
    (BOTH, {"logit_bias": {"5": "much"}}, "logit_bias.5 is 'much': Input should be a valid num"),
    (BOTH, {"use_beam_search": True}, "use_beam_search is True and n is 1; allowed: n from 2"),
    (BOTH, {"use_beam_search": True, "n": 2, "num_beams": 4}, "num_beams; send one"),
    (
        BOTH,
        {"response_format": {"type": "json_schema"}},
        "response_format of type json_schema has no other field; allowed: json_schema",
    ),
    (
        BOTH,
        {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
        "response_format of type json_object has json_schema; allowed: no other field or value",
    ),
    (
        BOTH,
        {"response_format": {"type": "regex", "value": "a", "json_schema": {"schema": SCHEMA}}},
        "response_format of type regex has json_schema and value; allowed: value",
    ),
    (
        BOTH,
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        "the request has response_format and guided_regex; send one",
    ),
    (BOTH, {"request_id": ""}, "request_id is '': String should have at least 1"),
    (BOTH, {"request_id": "a" * (MAX_REQUEST_ID_CHARACTERS + 1)}, "should have at most 128"),
    *(
        (BOTH, {name: value}, f"{name} is not supported")
        for name, value in {
            "allowed_token_ids": [5],
            "ec_transfer_params": {"a": 1},
            "guided_grammar": "root ::= 'a'",
            "guided_whitespace_pattern": " ",
            "kv_transfer_params": {"a": 1},
            "logits_processors": ["a"],
            "logprob_token_ids": [5],
            "prompt_logprobs": 1,
            "repetition_detection": {"a": 1},
            "truncate_prompt_tokens": -1,
            "truncation_side": "left",
            "vllm_xargs": {"a": 1},
        }.items()
    ),
    ((COMPLETION,), {"suffix": "b"}, "suffix is not supported: texts are not filled in"),
    ((COMPLETION,), {"prompt_embeds": "a"}, "prompt_embeds is not supported"),
    ((COMPLETION,), {"add_special_tokens": False}, "add_special_tokens is False: Input should be"),
    ((COMPLETION,), {"echo": True, "logprobs": 0}, "echo is True with logprobs"),
    ((COMPLETION,), {"echo": True, "prompt": [5]}, "echo is True with a prompt of token ids"),
    ((COMPLETION,), {"prompt": ["a"] * 129}, "prompt has 129 rows; allowed: 1 to 128"),
    ((COMPLETION,), {"prompt": []}, "prompt has 0 rows; allowed: 1 to 128"),
    *(
        (
            (CHAT,),
            {"tools": TOOLS, "tool_choice": forced},
            "forces a call, and the chat template of",
        )
        for forced in ("required", {"type": "function", "function": {"name": "f"}})
    ),
    ((CHAT,), {"tools": [{}]}, "tools.0.type: Field required"),
    (
        (CHAT,),
        {"functions": [{}], "function_call": {"name": "f"}},
        "function_call is not supported",
    ),
    ((CHAT,), {"modalities": ["text", "audio"]}, "modalities is not supported: answers are text"),
    (
        (COMPLETION, CHAT),
        {"stream_options": {"include_usage": False}},
        "stream_options is only allowed with stream: true; send both",
    ),
    ((CHAT,), {"top_logprobs": 2}, "top_logprobs needs logprobs: true"),
    ((CHAT,), {"echo": True}, "echo is True: Input should be False"),
    ((CHAT,), {"documents": [{"text": "a"}]}, "documents is not supported"),
    ((CHAT,), {"add_generation_prompt": False}, "add_generation_prompt is False: Input should"),
    ((CHAT,), {"messages": []}, "messages is []: List should have at least 1 item"),
    (
        (CHAT,),
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"arguments": "[[],[],[],[],"}}]}
            ]
            * (MAX_ARGUMENT_CHARACTERS // 12 // 16)
            + [{"role": "assistant", "function_call": {"arguments": "[" * MAX_ARGUMENT_CHARACTERS}}]
        },
        f"characters; allowed: up to {MAX_ARGUMENT_CHARACTERS} in all messages, so leave old calls out",
    ),
    *(
        ((CHAT,), {"messages": [message]}, f"messages.0.{problem}")
        for message, problem in (
            ({"role": "reviewer", "content": "a"}, "role is 'reviewer': Input should be"),
            ({"role": "user"}, "content: Field required"),
            ({"role": "user", "content": None}, "content: Field required"),
            ({"role": "user", "content": 5}, "content is 5: Input should be a text, or a list"),
            ({"role": "user", "content": ["a", 5]}, "content.1 is 5: Input should be"),
            ({"role": "assistant", "audio": {"id": "a"}}, "audio is not supported: messages are"),
            (
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]},
                "content.0.image_url is not supported: messages are texts",
            ),
            (
                {"role": "user", "content": [{"type": "image", "text": "a"}]},
                "content.0.type is 'image': Input should be 'text'",
            ),
        )
    ),
]

# Fields of OpenAI that ask for something that there is not.
MISSING = {
    COMPLETION: {"suffix"},
    CHAT: {
        "audio",
        "modalities",
        "moderation",
        "prediction",
        "prompt_cache_options",
        "web_search_options",
    },
}
OPENAI = {
    COMPLETION: (completion_create_params.CompletionCreateParamsNonStreaming, CompletionsBody),
    CHAT: (chat.CompletionCreateParamsNonStreaming, ChatBody),
}


# Python's json writes these as NaN and Infinity, which the gateway reads.
NO_NUMBERS = [
    ({"temperature": float("nan")}, "temperature is nan: Input should be a finite number"),
    ({"frequency_penalty": float("inf")}, "frequency_penalty is inf: Input should be a finite"),
    ({"logit_bias": {"1": float("nan")}}, "logit_bias.1 is nan: Input should be a finite number"),
]


def by_path(table):
    """Return a case for each path of each row."""
    return [
        pytest.param(path, *row, id=f"{path.split('/')[2]} {' '.join(row[0])}"[:60])
        for paths, *row in table
        for path in paths
    ]


@pytest.fixture(scope="module")
def gateway():
    """One gateway for all tests of this file, and what its models were asked."""
    calls = Calls()
    settings = GatewaySettings(url="grpc://127.0.0.1:1")
    return calls, create_app(settings, lambda name: FakeClient(calls, name))


@pytest.fixture
def calls(gateway):
    gateway[0].received.clear()
    return gateway[0]


@pytest.fixture
def make_app(gateway):
    return lambda: gateway[1]


@pytest.fixture
def received(post, calls):
    """Return a function that posts fields, and returns the options that the server gets."""

    def received(path, **fields):
        post(path, **{**BODIES[path], **fields})
        *_, options = calls.received[-1]
        return options

    return received


@pytest.mark.parametrize("path, fields, options", by_path(SERVED))
def test_served_fields_are_options_of_the_server(received, path, fields, options):
    assert received(path, **fields) == received(path) | options


@pytest.mark.parametrize("path, fields", by_path(NO_EFFECT))
def test_fields_that_ask_for_nothing_change_nothing(received, path, fields):
    assert received(path, **fields) == received(path)


@pytest.mark.parametrize("fields, message", NO_NUMBERS)
def test_a_number_that_is_none_is_named(send, calls, fields, message):
    body = json.dumps({**BODIES[COMPLETION], **fields})

    answer = send("POST", COMPLETION, content=body, headers={"Content-Type": "application/json"})

    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert calls.received == []


@pytest.mark.parametrize("path, fields, message", by_path(REFUSED))
def test_other_fields_are_refused_by_name(refusal, calls, path, fields, message):
    status, error = refusal(path, **{**BODIES[path], **fields})

    assert status == 400
    assert message in error["message"]
    assert calls.received == []


@pytest.mark.parametrize("path", BOTH)
def test_every_field_of_openai_is_known_or_refused(received, refusal, path):
    params, body = OPENAI[path]

    assert params.__annotations__.keys() - body.model_fields.keys() == MISSING[path]
    assert received(path, **dict.fromkeys(MISSING[path])) == received(path)
    for name in MISSING[path]:
        _, error = refusal(path, **BODIES[path], **{name: {"a": 1}})
        assert error["message"].startswith(f"{name} is not supported: ")


def test_every_option_of_a_stream_of_openai_is_known():
    options = chat_completion_stream_options_param.ChatCompletionStreamOptionsParam.__annotations__

    assert options.keys() <= StreamOptions.model_fields.keys()


@pytest.mark.parametrize("path, head", [(COMPLETION, "cmpl-"), (CHAT, "chatcmpl-")])
def test_an_answer_has_the_id_of_its_request(post, path, head):
    assert post(path, **BODIES[path], request_id="mine")["id"] == f"{head}mine"


def test_of_several_wrong_fields_the_first_is_named_with_its_own_reasons(refusal):
    status, error = refusal(COMPLETION, model=5, prompt="a", echo="x", best_of="y")

    assert (status, error["param"]) == (400, "model")
    assert error["message"] == "model is 5: Input should be a valid string"
