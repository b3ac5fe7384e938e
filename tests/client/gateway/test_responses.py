"""`/v1/responses` as the `openai` client sees it: texts, functions, reasoning, streams."""

import json

import pytest

from varlen_client.errors import InvalidRequest

from .test_tools import JSON_CALL, SCHEMA, sent
from .tool_templates import ARGUMENTS, FAMILIES, PLAIN

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "add", "description": "adds", "parameters": SCHEMA}
HELLO = {"model": "writer", "input": "add 1 and 2"}


def items(response):
    """Return what each item of an answer says."""
    found = []
    for item in response.output:
        if item.type == "function_call":
            assert (len(item.call_id), item.status) == (9, response.status)
            found.append((item.name, json.loads(item.arguments)))
        else:
            [part] = item.content
            found.append((item.type, part.text))
    return found


def test_a_text_is_a_message(ask, calls):
    answer = ask(
        lambda c: c.responses.create(**HELLO, instructions="be brief", max_output_tokens=3)
    )

    assert (answer.output_text, answer.status) == ("0.0 0.1 0.2 ", "incomplete")
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (7, 3)
    assert calls.received[0][2] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "add 1 and 2"},
    ]
    assert sent(calls) == {"max_tokens": 3}


ANSWERS = {
    "text": ("qwen3", ("a ", " b", "\n"), {}),
    "calls": ("qwen3", ("<think>h", "m</think>I", " add.", FAMILIES["qwen3"].call * 2), {}),
    "forced": ("qwen2", tuple(JSON_CALL), {"tool_choice": "required"}),
    "named": ("qwen2", tuple(JSON_CALL), {"tool_choice": {"type": "function", "name": "add"}}),
}
EXPECTED = {
    "text": [("message", "a  b\n")],
    "calls": [("reasoning", "hm"), ("message", "I add."), *[("add", ARGUMENTS)] * 2],
    "forced": [("add", {"a": 1})],
    "named": [("add", {"a": 1})],
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_the_same_whole_and_streamed(ask, model, name):
    family, texts, fields = ANSWERS[name]
    model(family, *texts)

    async def both(client):
        options = {**HELLO, **fields, "tools": [TOOL]}
        whole = await client.responses.create(**options)
        async with client.responses.stream(**options) as stream:
            events = [event async for event in stream]
            return whole, events, await stream.get_final_response()

    whole, events, final = ask(both)

    assert items(whole) == items(final) == EXPECTED[name]
    assert (whole.status, final.status) == ("completed", "completed")
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-2:] == ["response.output_item.done", "response.completed"]
    assert final.usage == whole.usage


def test_the_raw_stream_has_the_name_of_each_event(send, model):
    model("qwen3", "a")

    text = send("POST", PATH, {**HELLO, "stream": True}).text

    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    for name, data in blocks:
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
    assert "[DONE]" not in text


def test_an_answer_is_a_part_of_the_next_request(ask, calls, model):
    model("qwen3", "<think>hm</think>", FAMILIES["qwen3"].call * 2)

    async def loop(client):
        first = await client.responses.create(**HELLO, tools=[TOOL])
        results = [
            {"type": "function_call_output", "call_id": each.call_id, "output": "3"}
            for each in first.output
            if each.type == "function_call"
        ]
        calls.texts = ("It is 3.",)
        question = {"role": "user", "content": [{"type": "input_text", "text": "add"}]}
        return await client.responses.create(
            **{**HELLO, "input": [question, *first.output, *results]}, tools=[TOOL]
        )

    assert ask(loop).output_text == "It is 3."
    _, answer, *results = calls.received[-1][2]
    assert (answer["role"], answer["reasoning_content"]) == ("assistant", "hm")
    assert [each["function"] for each in answer["tool_calls"]] == [
        {"name": "add", "arguments": ARGUMENTS}
    ] * 2
    assert [(each["role"], each["content"]) for each in results] == [("tool", "3")] * 2


def test_a_text_has_the_form_of_a_schema(post, calls):
    form = {"type": "json_schema", "name": "sum", "schema": SCHEMA, "strict": True}

    answer = post(PATH, **HELLO, text={"format": form})

    assert answer["text"]["format"] == form
    assert sent(calls)["structured_outputs"] == {"json": SCHEMA}


def test_tools_of_a_template_without_tools_are_ignored_with_a_warning(send, model):
    model(PLAIN, "3")

    response = send("POST", PATH, {**HELLO, "tools": [TOOL]})

    assert response.json()["output"][0]["content"][0]["text"] == "3"
    assert response.headers["x-varlen-warning"] == "tools are not served; the answer is text"


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"previous_response_id": "resp_1"}, "send the whole conversation in input"),
        ({"background": True}, "background is not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type is 'web_search'"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input.0.type is 'item_reference'"),
        ({"input": [{"role": "user"}]}, "an item of type message has no content"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "function_call has no arguments"),
        ({"input": []}, "at least 1 item"),
        ({"text": {"format": {"type": "json_schema"}}}, "json_schema has no schema"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"truncation": "auto"}, "truncation is 'auto'"),
    ],
    ids=str,
)
def test_refuses_what_is_not_served(refusal, fields, message):
    status, error = refusal(PATH, **{**HELLO, **fields})

    assert (status, message in error["message"]) == (400, True), error


def test_an_error_in_a_stream_is_an_event(ask, calls):
    calls.failure, calls.fail_after = InvalidRequest("the model has stopped"), 2

    async def stream(client):
        return [event async for event in await client.responses.create(**HELLO, stream=True)]

    *_, last = ask(stream)
    assert (last.type, last.message) == ("error", "the model has stopped")
