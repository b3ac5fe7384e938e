"""`/v1/completions` and `/v1/chat/completions` of the gateway, whole and streamed."""

import asyncio
import json
import math

import pytest

from varlen_client.errors import DeadlineMissed, InvalidRequest, ServerError
from varlen_client.gateway.answers import numbered

HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def events_of(response):
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


@pytest.fixture
def stream(send):
    """Return a function that streams an answer, and returns its chunks."""

    def stream(path, **body):
        response = send("POST", path, {"model": "writer", "stream": True, **body})
        assert response.status_code == 200, response.text
        *chunks, done = events_of(response)
        assert done == "[DONE]"
        return [json.loads(chunk) for chunk in chunks]

    return stream


def test_completes_a_prompt(post, calls):
    answer = post("/v1/completions", model="writer", prompt="hello", max_tokens=3)

    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [
        {"index": 0, "text": "0.0 0.1 0.2 ", "logprobs": None, "finish_reason": "length"}
    ]
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    assert calls.received == [("writer", "generate", "hello", {"max_tokens": 3})]


def test_completes_several_prompts_with_several_samples(post):
    answer = post("/v1/completions", model="writer", prompt=["a", "b"], n=2, max_tokens=2)

    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"][:2] for choice in answer["choices"]] == ["0.", "1."] * 2
    assert answer["usage"]["prompt_tokens"] == 14


@pytest.mark.parametrize("prompt", [[5, 6], [[5, 6]]], ids=str)
def test_a_prompt_may_be_token_ids(post, calls, prompt):
    post("/v1/completions", model="writer", prompt=prompt)

    assert calls.received[0][2] == [5, 6]


def test_a_chat_has_a_message(post, calls):
    answer = post("/v1/chat/completions", model="writer", messages=HELLO, max_tokens=2)

    assert answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "0.0 0.1 "}
    assert choice["finish_reason"] == "length"
    assert calls.received[0][2] == HELLO


@pytest.mark.parametrize(
    "limits, most",
    [
        ({}, 5),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 2, "max_tokens": 3}, 2),
    ],
    ids=["default", "max_tokens", "max_completion_tokens"],
)
def test_a_chat_has_a_limit(send, make_app, calls, limits, most):
    body = {"model": "writer", "messages": HELLO, **limits}
    send("POST", "/v1/chat/completions", body, app=make_app(chat_max_tokens=5))

    assert calls.received[0][3] == {"max_tokens": most}


def test_parts_of_messages_are_joined_and_answers_may_come_back(post, calls):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None},
    ]

    post("/v1/chat/completions", model="writer", messages=messages)

    assert [message["content"] for message in calls.received[0][2]] == ["be brief", "ab", "c"]


def test_a_part_with_languages_reaches_the_template_as_a_part(post, calls):
    """TranslateGemma's template reads them there."""
    part = {"source_lang_code": "cs", "target_lang_code": "de-DE", "text": "ano"}
    content = [{"type": "text", **part}]

    messages = [{"role": "user", "content": content}]
    post("/v1/chat/completions", model="writer", messages=messages)

    assert calls.received[0][2] == messages


def test_messages_have_the_fields_that_templates_read(post, calls):
    call = {"id": "1", "type": "function"}
    messages = [
        {"role": "user", "content": ["a", {"type": "text", "text": "b", "cache_control": {}}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "id": 5, "opts": {}}
        | {"tool_calls": [{**call, "function": {"name": "f", "arguments": '{"x": [1]}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
        {"role": "assistant", "function_call": {"name": "g", "arguments": "{broken"}},
        {"role": "function", "name": "g", "content": [{"type": "text", "text": "8"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]

    post("/v1/chat/completions", model="writer", messages=messages)

    assert calls.received[0][2] == [
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            # as vLLM gives them to templates
            "tool_calls": [{**call, "function": {"name": "f", "arguments": {"x": [1]}}}],
            "reasoning_content": "hm",
            "reasoning": "hm",
        },
        {"role": "tool", "content": "7", "tool_call_id": "1"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "g", "arguments": "{broken"}}],
        },
        {"role": "tool", "content": "8", "name": "g"},
        {"role": "assistant", "content": "no"},
    ]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "fields, warns",
    [
        ({"tools": TOOLS}, True),
        ({"tools": TOOLS, "tool_choice": "auto"}, True),
        ({"functions": [{"name": "f"}]}, True),
        ({"tools": TOOLS, "tool_choice": "none"}, False),
        ({"tools": [], "tool_choice": "auto"}, False),
    ],
    ids=str,
)
def test_an_answer_without_the_tools_of_its_request_says_so(send, make_app, streams, fields, warns):
    body = {"model": "writer", "messages": HELLO, "stream": streams, **fields}

    response = send("POST", "/v1/chat/completions", body)

    assert response.status_code == 200
    warning = response.headers.get("x-varlen-warning")
    assert warning == ("tools are not served; the answer is text" if warns else None)
    strict = send("POST", "/v1/chat/completions", body, app=make_app(strict=True))
    assert strict.status_code == (400 if warns else 200)


@pytest.mark.parametrize("strict", [False, True])
def test_variables_that_the_template_does_not_read_are_refused_if_asked_for(
    send, make_app, calls, strict
):
    body = {"model": "writer", "messages": HELLO, "chat_template_kwargs": {"a": 1}}

    send("POST", "/v1/chat/completions", body, app=make_app(strict=strict))

    sent = calls.received[0][3]["chat_template_kwargs"]
    assert sent == ({"a": 1} if strict else {"a": 1, "ignore_unread": True})


def test_completions_report_log_probabilities(post, stream):
    options = {"prompt": "a", "max_tokens": 2, "logprobs": 1}

    [choice] = post("/v1/completions", model="writer", **options)["choices"]

    expected = {
        "tokens": ["0.0 ", "0.1 "],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"0.0 ": -0.5, "é": -1.5}, {"0.1 ": -0.5, "é": -1.5}],
        "text_offset": [0, 4],
    }
    assert choice["logprobs"] == expected
    parts = [chunk["choices"][0]["logprobs"] for chunk in stream("/v1/completions", **options)]
    assert {name: [*parts[0][name], *parts[1][name]] for name in expected} == expected


def test_chats_report_log_probabilities(post, calls):
    options = {"logprobs": True, "top_logprobs": 2, "max_tokens": 1}

    answer = post("/v1/chat/completions", model="writer", messages=HELLO, **options)

    [token] = answer["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["logprob"], token["bytes"]) == ("0.0 ", -0.5, [*b"0.0 "])
    assert [each["token"] for each in token["top_logprobs"]] == ["0.0 ", "é"]
    assert calls.received[0][3]["logprobs"] == 2


def test_a_token_that_cannot_come_has_a_logprob_of_null(post, stream, calls):
    calls.least_logprob = -math.inf
    options = {"prompt": "a", "max_tokens": 1, "logprobs": 1}

    whole = post("/v1/completions", model="writer", **options)

    for answer in (whole, *stream("/v1/completions", **options)):
        assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"0.0 ": -0.5, "é": None}]


@pytest.mark.parametrize("top, texts", [(None, []), (1, ["0.0 "])], ids=["none", "one"])
def test_a_chat_has_as_many_likely_tokens_as_it_asks_for(post, stream, top, texts):
    options = {"messages": HELLO, "logprobs": True, "top_logprobs": top, "max_tokens": 1}

    answer = post("/v1/chat/completions", model="writer", **options)

    [chunk] = stream("/v1/chat/completions", **options)
    for choice in (*answer["choices"], *chunk["choices"]):
        [token] = choice["logprobs"]["content"]
        assert (token["token"], token["logprob"]) == ("0.0 ", -0.5)
        assert [each["token"] for each in token["top_logprobs"]] == texts


# "€" in two tokens, and what else each might have been; 92 and 93 have one text
_PARTS = {0: b"\xe2\x82", 1: b"\xac", 90: b"\xe2", 91: b"\xf0\x9f", 92: b"x", 93: b"x"}


def test_parts_of_characters_are_entries_of_their_own_in_completions(post, stream, calls):
    calls.utf8 = _PARTS
    options = {"prompt": "a", "max_tokens": 2, "logprobs": 5}

    [choice] = post("/v1/completions", model="writer", **options)["choices"]

    found = choice["logprobs"]
    assert found["tokens"] == [r"bytes:\xe2\x82", r"bytes:\xac"]
    others = {r"bytes:\xe2": -1.5, r"bytes:\xf0\x9f": -2.5, "x": -3.5, "token_id:93": -4.5}
    assert found["top_logprobs"] == [{token: -0.5, **others} for token in found["tokens"]]
    # both begin where the character does
    assert found["text_offset"] == [0, 0]
    chunks = [chunk["choices"][0]["logprobs"] for chunk in stream("/v1/completions", **options)]
    assert [each for chunk in chunks for each in chunk["top_logprobs"]] == found["top_logprobs"]


def test_parts_of_characters_have_their_bytes_in_chats(post, stream, calls):
    calls.utf8 = _PARTS
    options = {"messages": HELLO, "max_tokens": 2, "logprobs": True, "top_logprobs": 5}

    answer = post("/v1/chat/completions", model="writer", **options)

    chunks = stream("/v1/chat/completions", **options)
    streamed = [each for chunk in chunks for each in chunk["choices"][0]["logprobs"]["content"]]
    for content in (answer["choices"][0]["logprobs"]["content"], streamed):
        assert b"".join(bytes(token["bytes"]) for token in content) == "€".encode()
        for at, token in enumerate(content):
            top = token["top_logprobs"]
            assert [bytes(each["bytes"]) for each in top] == [
                _PARTS[each] for each in (at, 90, 91, 92, 93)
            ]
            assert top[0].items() <= token.items()


def test_the_chosen_token_is_among_the_likely_ones_of_a_chat(post, calls):
    calls.least_logprob = -0.25
    options = {"messages": HELLO, "max_tokens": 1, "logprobs": True, "top_logprobs": 1}

    answer = post("/v1/chat/completions", model="writer", **options)

    [token] = answer["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in token["top_logprobs"]] == [token["token"]] == ["0.0 "]


@pytest.mark.parametrize("n", [1, 2])
def test_a_streamed_completion_makes_the_whole_one(post, stream, n):
    options = {"prompt": "a", "max_tokens": 4, "n": n}
    whole = post("/v1/completions", model="writer", **options)["choices"]

    chunks = stream("/v1/completions", **options)

    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index, expected in enumerate(whole):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == expected["text"]
        # once it has ended, nothing more comes
        reasons = [choice["finish_reason"] for choice in own]
        assert reasons[-1] is not None
        assert reasons[:-1] == [None] * (len(own) - 1)
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_a_streamed_chat_begins_with_the_role(stream):
    chunks = stream("/v1/chat/completions", messages=HELLO, max_tokens=2)

    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": "0.0 "}, {"content": "0.1 "}]


def test_the_role_comes_once_also_if_the_first_parts_are_empty(stream, calls):
    calls.empty_parts = 2

    chunks = stream("/v1/chat/completions", messages=HELLO, max_tokens=1, n=2)

    for index in (0, 1):
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        deltas = [choice["delta"] for choice in choices if choice["index"] == index]
        assert [delta.pop("role", None) for delta in deltas] == ["assistant", None, None]
        assert [delta["content"] for delta in deltas] == ["", "", f"{index}.0 "]


def test_a_stream_ends_with_its_usage_on_request(stream):
    options = {"prompt": "a", "max_tokens": 3, "stream_options": {"include_usage": True}}

    *chunks, last = stream("/v1/completions", **options)

    # as at OpenAI
    assert [chunk["usage"] for chunk in chunks] == [None] * 3
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


def test_each_chunk_has_the_usage_of_its_answer_on_request(stream):
    usage = {"include_usage": True, "continuous_usage_stats": True}

    *chunks, _ = stream("/v1/completions", prompt="a", max_tokens=3, n=2, stream_options=usage)

    found = [
        chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["choices"][0]["index"] == 0
    ]
    assert found == [1, 2, 3]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {7}
    # as in vLLM, it needs the other option
    plain = stream("/v1/completions", prompt="a", stream_options={"continuous_usage_stats": True})
    assert all("usage" not in chunk for chunk in plain)


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_has_the_answers_to_several_prompts(post, stream, calls, n):
    options = {"prompt": ["a ", "b ", "c "], "n": n, "max_tokens": 3, "echo": True}
    whole = post("/v1/completions", model="writer", **options)

    *chunks, last = stream("/v1/completions", **options, stream_options={"include_usage": True})

    choices = [chunk["choices"][0] for chunk in chunks]
    for expected in whole["choices"]:
        own = [choice for choice in choices if choice["index"] == expected["index"]]
        assert "".join(choice["text"] for choice in own) == expected["text"]
        assert [bool(choice["finish_reason"]) for choice in own][-2:] == [False, True]
    assert last["usage"] == whole["usage"]
    assert [prompt for _, _, prompt, _ in calls.received[-3:]] == options["prompt"]


def test_an_error_of_one_prompt_ends_the_stream_of_all(send, calls):
    calls.failure, calls.fail_after = ServerError("broken"), 2

    body = {"model": "writer", "prompt": ["a", "b"], "stream": True}
    response = send("POST", "/v1/completions", body)

    *chunks, last = events_of(response)
    assert {json.loads(chunk)["choices"][0]["index"] for chunk in chunks} == {0, 1}
    assert "error" in json.loads(last)
    assert calls.running == 0


def test_a_stream_that_is_left_closes_the_answers_to_all_prompts():
    closed = []

    async def parts_of(prompt, delay):
        try:
            while True:
                await asyncio.sleep(delay)
                yield [prompt]
        finally:
            closed.append(prompt)

    async def leave():
        streams = numbered([parts_of("quick", 0), parts_of("slow", 60)], 2)
        assert await anext(streams) == (0, ["quick"])
        assert await anext(streams) == (0, ["quick"])
        await streams.aclose()
        return len(asyncio.all_tasks())

    assert asyncio.run(leave()) == 1
    assert sorted(closed) == ["quick", "slow"]


@pytest.mark.parametrize(
    "path, prompt",
    [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": HELLO})],
    ids=["completion", "chat"],
)
def test_the_best_samples_are_sent_and_all_are_counted(post, calls, path, prompt):
    # sample 1 ends a token before the others
    calls.logprob_of_row = {0: -2.0, 1: -0.5, 2: -1.0}
    options = {**prompt, "max_tokens": 3, "best_of": 3, "n": 2}

    answer = post(path, model="writer", **options)

    texts = [choice.get("text") or choice["message"]["content"] for choice in answer["choices"]]
    assert texts == ["1.0 1.1 ", "2.0 2.1 2.2 "]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
    assert answer["usage"]["completion_tokens"] == 3 + 2 + 3
    # samples of temperature 0 are equal
    assert len(post(path, model="writer", **{**options, "n": 1}, temperature=0)["choices"]) == 1
    assert "logprobs" not in calls.received[-1][3]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "path, prompt",
    [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": HELLO})],
    ids=["completion", "chat"],
)
def test_an_error_before_the_answer_has_its_status(refusal, calls, path, prompt, streams):
    calls.failure = InvalidRequest("temperature is -1; allowed: 0 to 2")

    status, error = refusal(path, model="writer", stream=streams, **prompt)

    assert (status, error["message"]) == (400, "temperature is -1; allowed: 0 to 2")


@pytest.mark.parametrize(
    "failure, message",
    [
        (DeadlineMissed("late"), "the answer was not complete in time"),
        (ServerError("/opt/broken.py"), "the server failed; the gateway's log has the reason"),
    ],
    ids=["late", "broken"],
)
def test_an_error_in_the_middle_of_a_stream_is_its_last_event(send, calls, failure, message):
    calls.failure, calls.fail_after = failure, 2

    response = send("POST", "/v1/completions", {"model": "writer", "prompt": "a", "stream": True})

    *chunks, last = events_of(response)
    assert len(chunks) == 2
    assert json.loads(last)["error"]["message"] == message


@pytest.mark.parametrize("n", [1, 2])
def test_an_echo_begins_each_answer_with_its_prompt(post, stream, n):
    options = {"model": "writer", "max_tokens": 2, "n": n}

    plain, echoed = (
        post("/v1/completions", **options, prompt=["a ", "b "], echo=echo)["choices"]
        for echo in (False, True)
    )

    assert [choice["text"] for choice in echoed] == [
        f"{prompt} {choice['text']}"
        for prompt, choice in zip(["a"] * n + ["b"] * n, plain, strict=True)
    ]
    chunks = stream("/v1/completions", **options, prompt="a ", echo=True)
    for index in range(n):
        parts = [chunk["choices"][0] for chunk in chunks]
        texts = [part["text"] for part in parts if part["index"] == index]
        assert texts[0] == f"a {index}.0 "
        assert "".join(texts) == echoed[index]["text"]
