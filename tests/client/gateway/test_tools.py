"""Tools of chats: forms of calls, parsed and forced answers, streams, reasoning."""

import json
import random

import jsonschema
import pytest
from llguidance import LLMatcher

from tests.backend.decoding.text.small_tokenizers import END, byte_level
from varlen.decoding.grammar.grammars import grammar_tokens
from varlen.request.generation import read_grammar
from varlen.sandbox.grammar import GrammarServer
from varlen_client.errors import InvalidRequest
from varlen_client.gateway.tool_calls import (
    PROBE_CHAT,
    PROBE_TOOLS,
    TOOL_FORMS,
    AnswerParser,
    ChatForm,
    ReasoningForm,
    forced_schema,
    form_of,
)
from varlen_client.gateway.tools import MAX_TOOL_CHARACTERS, MAX_TOOL_LEVELS, MAX_TOOLS

from .tool_templates import ARGUMENTS, FAMILIES, PLAIN, THINKING, UNKNOWN, renderer

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "add 1 and 2"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"type": "array", "items": {"type": "integer"}},
        "c": {"type": "string"},
    },
    "required": ["a"],
}
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": SCHEMA},
}
SCHEMAS = {"add": SCHEMA}
THINK = ReasoningForm("<think>", "</think>")
JSON_CALL = '{"name": "add", "arguments": {"a": 1}}'
CALL = ("add", {"a": 1})


def form_found(source, chat=PROBE_CHAT, special=(), **variables):
    prompt = renderer(source)(chat, tools=PROBE_TOOLS, **variables)
    visible = prompt
    for each in special:
        visible = visible.replace(each, "")
    return form_of(prompt, visible)


def parsed(parser, parts):
    """Return content, reasoning and calls of an answer, with their arguments as objects."""
    content = reasoning = ""
    calls = []
    for at, part in enumerate(parts, start=1):
        delta = parser.add(part, is_last=at == len(parts))
        content, reasoning = content + delta.content, reasoning + delta.reasoning
        for each in delta.calls:
            if each.name is not None:
                assert each.index == len(calls)
                assert len(each.id) == 9
                assert each.id.isalnum()
                calls.append([each.name, ""])
            calls[each.index][1] += each.arguments
    return content, reasoning, [(name, json.loads(text)) for name, text in calls]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_form_of_a_template_is_found_and_reads_its_calls(name):
    family = FAMILIES[name]
    form = form_found(family.source, special=family.special)

    assert form.reads_tools
    assert form.calls.read is TOOL_FORMS[family.form].read
    assert form.has_special_tokens == bool(family.special and name != "llama3")
    assert (form.reasoning is not None) == (name == "qwen3")
    parser = AnswerParser(form, SCHEMAS)
    assert parsed(parser, [family.call]) == ("", "", [("add", ARGUMENTS)])


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_template_with_calls_of_another_form_has_none(name):
    form = form_found(UNKNOWN[name])

    assert form.reads_tools
    assert form.calls is None


def test_a_prompt_tells_whether_it_opens_the_reasoning():
    assert form_found(THINKING).opens_reasoning
    assert form_found(THINKING, PROBE_CHAT[:1]).opens_reasoning
    thinks = form_found(FAMILIES["qwen3"].source)
    silent = form_found(FAMILIES["qwen3"].source, enable_thinking=False)
    assert thinks.reasoning == silent.reasoning == THINK
    assert not thinks.opens_reasoning
    assert not silent.opens_reasoning
    assert form_found(PLAIN, PROBE_CHAT[:1]) == ChatForm()


HERMES, LLAMA, MISTRAL, XML, GEMMA = (
    ChatForm(calls=TOOL_FORMS[name], reasoning=THINK)
    for name in ("hermes", "llama3", "mistral", "qwen_xml", "gemma")
)
OPEN = ChatForm(calls=TOOL_FORMS["hermes"], reasoning=THINK, opens_reasoning=True)
TAGGED = f"<tool_call>\n{JSON_CALL}\n</tool_call>"
BARE = '{"name": "add", "parameters": {"a": 1}}'
DEEP = '{"name": "add", "arguments": {"a": ' + "[" * 3000 + "]" * 3000 + "}}"
# Form, text of the answer, and its content, reasoning and calls.
ANSWERS = {
    "text": (HERMES, " Hello, <tool> you! \n", (" Hello, <tool> you! \n", "", [])),
    "nothing": (HERMES, "", ("", "", [])),
    "call": (HERMES, TAGGED, ("", "", [CALL])),
    "call without an end": (HERMES, TAGGED[:-12], ("", "", [CALL])),
    "text before and after": (
        HERMES,
        f"I add.\n\n{TAGGED}\n\nDone.",
        ("I add.Done.", "", [CALL]),
    ),
    "two calls": (HERMES, f"\n{TAGGED}\n{TAGGED}\n", ("", "", [CALL, CALL])),
    "end in an argument": (
        HERMES,
        TAGGED.replace('"a": 1', '"c": "</tool_call>{\\"\\\\"'),
        ("", "", [("add", {"c": '</tool_call>{"\\'})]),
    ),
    "list": (HERMES, f"<tool_call>[{JSON_CALL}, {JSON_CALL}]</tool_call>", ("", "", [CALL, CALL])),
    "unknown function": (
        HERMES,
        TAGGED.replace("add", "sub"),
        (TAGGED.replace("add", "sub"), "", []),
    ),
    "broken JSON": (HERMES, TAGGED.replace("1", "1,"), (TAGGED.replace("1", "1,"), "", [])),
    "NaN": (HERMES, TAGGED.replace("1", "NaN"), (TAGGED.replace("1", "NaN"), "", [])),
    "cut": (HERMES, TAGGED[:30], (TAGGED[:30], "", [])),
    "no JSON": (HERMES, "<tool_call>" + "x" * 600, ("<tool_call>" + "x" * 600, "", [])),
    "deep JSON": (
        HERMES,
        f"<tool_call>{DEEP}</tool_call>",
        (f"<tool_call>{DEEP}</tool_call>", "", []),
    ),
    "broken and right": (
        HERMES,
        f"<tool_call>{{}}</tool_call>{TAGGED}",
        ("<tool_call>{}</tool_call>", "", [CALL]),
    ),
    "half a character": (
        HERMES,
        TAGGED.replace('"a": 1', '"c": "\\ud800"'),
        ("", "", [("add", {"c": "\ud800"})]),
    ),
    "reasoning": (HERMES, f"<think>\nhm\n</think>\n\nYes. {TAGGED}", ("Yes.", "hm", [CALL])),
    "reasoning only": (HERMES, "<think>\nhm, hm ", ("", "hm, hm", [])),
    "reasoning with a call": (
        HERMES,
        f"<think>{TAGGED}</think>\n{TAGGED}",
        ("", TAGGED, [CALL]),
    ),
    "open reasoning": (OPEN, "hm\n</think>\n\n 4 \n", ("4 \n", "hm", [])),
    "late reasoning": (HERMES, "a <think>b</think>", ("a <think>b</think>", "", [])),
    "bare": (LLAMA, f" \n{BARE}", ("", "", [CALL])),
    "bare, several": (LLAMA, f"{BARE}; {BARE};\n{BARE}", ("", "", [CALL] * 3)),
    "bare with its token": (LLAMA, f"<|python_tag|>{BARE}", ("", "", [CALL])),
    "bare in a text": (LLAMA, f"I say {BARE}", (f"I say {BARE}", "", [])),
    "other JSON": (LLAMA, ' {"a": 1} \n', (' {"a": 1} \n', "", [])),
    "mistral": (MISTRAL, f"[TOOL_CALLS] [{JSON_CALL}, {JSON_CALL}]", ("", "", [CALL, CALL])),
    "mistral with names": (
        MISTRAL,
        'Ok. [TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}[TOOL_CALLS]add{"a": 1}',
        ("Ok.", "", [CALL, CALL]),
    ),
    "tags": (
        XML,
        "<tool_call>\n<function=add>\n<parameter=a>\nnull\n</parameter>\n</function>\n</tool_call>",
        ("", "", [("add", {"a": None})]),
    ),
    "tags with a wrong type": (
        XML,
        "<tool_call><function=add><parameter=a>x</parameter><parameter=c>1</parameter></function></tool_call>",
        ("", "", [("add", {"a": "x", "c": "1"})]),
    ),
    "gemma": (
        GEMMA,
        "<start_function_call>call:add{a:1,b:[2,3],c:<escape>{x:1}<escape>}<end_function_call>"
        "<start_function_call>call:add{a:1}<end_function_call>",
        ("", "", [("add", {"a": 1, "b": [2, 3], "c": "{x:1}"}), CALL]),
    ),
    "gemma, broken": (
        GEMMA,
        "<start_function_call>call:add{a:x}<end_function_call>",
        ("<start_function_call>call:add{a:x}<end_function_call>", "", []),
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_read_the_same_in_any_parts(name):
    form, text, expected = ANSWERS[name]
    chosen = random.Random(0)

    divisions = [[text], [*text] or [""]]
    for _ in range(20):
        cuts = sorted(chosen.choices(range(len(text) + 1), k=5))
        divisions.append([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])

    for parts in divisions:
        assert parsed(AnswerParser(form, SCHEMAS), parts) == expected, parts


def test_only_the_first_of_several_calls_is_reported_if_asked_for():
    parser = AnswerParser(HERMES, SCHEMAS, is_parallel=False)

    assert parsed(parser, [f"{TAGGED}\n{TAGGED}"]) == ("", "", [CALL])


@pytest.mark.parametrize("is_list", [False, True])
def test_a_forced_answer_streams_its_arguments(is_list):
    texts = [json.dumps(each, ensure_ascii=False) for each in (ARGUMENTS, {"c": '}"\\'})]
    answers = [f'{{"name":"add", "arguments" : {text} }}' for text in texts]
    answer = f"[ {answers[0]} ,{answers[1]}]" if is_list else answers[0]
    parser = AnswerParser(HERMES, SCHEMAS, choice="forced")

    found = [each for part in answer for each in parser.add(part).calls]
    found += parser.add("", is_last=True).calls

    assert len(found) > 20
    for index, text in enumerate(texts[: 1 + is_list]):
        assert "".join(each.arguments for each in found if each.index == index) == text
    assert parsed(AnswerParser(HERMES, SCHEMAS, choice="forced"), [answer])[2][0] == (
        "add",
        ARGUMENTS,
    )


def sent(calls):
    """Return the sampling parameters of the last request."""
    return calls.received[-1][3]


@pytest.mark.parametrize("name", ["qwen3_coder", "llama3", "mistral", "gemma4"])
def test_an_answer_has_the_calls_of_its_text(post, calls, model, name):
    family = model(name, *FAMILIES[name].call)

    answer = post(CHAT, model="writer", messages=HELLO, tools=[ADD])

    [choice] = answer["choices"]
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert (call["type"], call["function"]["name"]) == ("function", "add")
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    assert sent(calls)["chat_template_kwargs"] == {"tools": [ADD]}
    assert sent(calls).get("skip_special_tokens", True) == (not family.special or name == "llama3")


def test_an_answer_without_calls_is_text(post, model):
    model("qwen3", "<think>\nhm\n</think>\n\n", "It is 3.", "\n")

    [choice] = post(CHAT, model="writer", messages=HELLO, tools=[ADD])["choices"]

    assert choice["message"] == {
        "role": "assistant",
        "content": "It is 3.\n",
        "reasoning_content": "hm",
    }
    assert choice["finish_reason"] == "stop"


def test_reasoning_is_divided_without_tools_and_left_out_if_asked_for(post, send, make_app, model):
    text = "<think>hm</think>4"
    model("qwen3", text)
    body = {"model": "writer", "messages": HELLO}

    def message(app=None, **fields):
        response = send("POST", CHAT, {**body, **fields}, app=app)
        return response.json()["choices"][0]["message"]

    assert message()["reasoning_content"] == "hm"
    assert message(include_reasoning=False) == {"role": "assistant", "content": "4"}
    whole = message(app=make_app(reasoning="none"))
    assert whole == {"role": "assistant", "content": text}


def test_the_variables_of_a_request_say_whether_its_prompt_thinks(post, calls, model):
    model(THINKING, "hm</think>4")

    found = post(CHAT, model="writer", messages=HELLO, chat_template_kwargs={"x": 1})

    assert found["choices"][0]["message"]["reasoning_content"] == "hm"
    assert sent(calls)["chat_template_kwargs"] == {"x": 1, "ignore_unread": True}


def test_a_form_is_asked_for_once(send, make_app, calls, model):
    model("qwen2", FAMILIES["qwen2"].call)
    app = make_app()

    for _ in range(3):
        send("POST", CHAT, {"model": "writer", "messages": HELLO, "tools": [ADD]}, app=app)

    assert calls.asked_forms == 1


def test_a_form_that_is_known_keeps_no_variables_of_its_request(send, make_app, gateways, model):
    model("qwen2", FAMILIES["qwen2"].call)
    app, variables = make_app(), {"unread": "of a client"}

    send(
        "POST",
        CHAT,
        {"model": "writer", "messages": HELLO, "chat_template_kwargs": variables},
        app=app,
    )

    [gateway] = [gateway for made, gateway in gateways.values() if made is app]
    [known] = gateway.forms._known
    assert "of a client" not in str(known)


def test_the_template_for_tools_is_used_where_there_is_one(post, calls, model):
    family = model("qwen2", FAMILIES["qwen2"].call, template="tool_use")

    found = post(CHAT, model="writer", messages=HELLO, tools=[ADD])

    assert found["choices"][0]["finish_reason"] == "tool_calls", family
    assert sent(calls)["chat_template_kwargs"] == {"chat_template": "tool_use", "tools": [ADD]}


def test_tools_are_not_shown_if_none_may_be_called(post, calls, model):
    model("qwen2", FAMILIES["qwen2"].call)

    found = post(CHAT, model="writer", messages=HELLO, tools=[ADD], tool_choice="none")

    assert found["choices"][0]["message"]["content"] == FAMILIES["qwen2"].call
    assert "chat_template_kwargs" not in sent(calls)


NAMED = {"type": "function", "function": {"name": "add"}}
GET = {"type": "function", "function": {"name": "get"}}


@pytest.mark.parametrize("choice, reason", [("required", "tool_calls"), (NAMED, "stop")], ids=str)
@pytest.mark.parametrize("name", ["qwen2", "llama3", "mistral"])
def test_a_forced_answer_has_a_schema(post, calls, model, name, choice, reason):
    form = TOOL_FORMS[FAMILIES[name].form]
    text = json.dumps({"name": "add", form.arguments: {"a": 1}})
    model(name, *(f"[{text}]" if form.is_list else text))
    tools = [ADD, GET]

    [found] = post(CHAT, model="writer", messages=HELLO, tools=tools, tool_choice=choice)["choices"]

    [call] = found["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert (found["message"]["content"], found["finish_reason"]) == (None, reason)
    schema = sent(calls)["structured_outputs"]["json"]
    names = ["add", "get"] if choice == "required" else ["add"]
    assert [*schema["$defs"]] == names
    schema = schema["items"] if form.is_list else schema
    alternatives = schema.get("anyOf", [schema])
    assert [each["properties"]["name"]["const"] for each in alternatives] == names
    assert all([*each["properties"]] == ["name", form.arguments] for each in alternatives)


def test_references_of_a_forced_schema_begin_at_its_function(post, calls, model):
    model("qwen2", JSON_CALL)
    inner = {
        "type": "object",
        "properties": {"x": {"$ref": "#"}, "title": {"enum": [{"$ref": "#"}]}},
    }
    parameters = {
        "title": "Add",
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/In", "description": "a"}},
        "$defs": {"In": {**inner, "title": "In"}},
    }
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]

    post(CHAT, model="writer", messages=HELLO, tools=tools, tool_choice="required")

    [found] = sent(calls)["structured_outputs"]["json"]["$defs"].values()
    assert found["properties"]["a"] == {"$ref": "#/$defs/add/$defs/In"}
    assert found["$defs"]["In"]["properties"]["x"] == {"$ref": "#/$defs/add"}
    assert found["$defs"]["In"]["properties"]["title"] == {"enum": [{"$ref": "#"}]}
    assert "title" not in found
    assert "title" not in found["$defs"]["In"]


def test_a_forced_answer_that_was_cut_says_so(post, model):
    model("qwen2", '{"name": "add", "arguments": {"a": 12', end="length")

    [found] = post(CHAT, model="writer", messages=HELLO, tools=[ADD], tool_choice="required")[
        "choices"
    ]

    assert found["finish_reason"] == "length"
    assert found["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 12'


def nested(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"x": schema}}
    return {"type": "function", "function": {"name": "deep", "parameters": schema}}


REFUSED = {
    "unknown form": ({}, "unknown start", "--tool-calls and one of hermes"),
    "no tools, forced": ({"tool_choice": "required"}, PLAIN, "reads no tools"),
    "required without tools": (
        {"tools": [], "tool_choice": "required"},
        "qwen2",
        "there are no tools",
    ),
    "unknown name": (
        {"tool_choice": {"type": "function", "function": {"name": "sub"}}},
        "qwen2",
        "'sub'; allowed: the names of tools, add",
    ),
    "twice": ({"tools": [ADD, ADD]}, "qwen2", "two functions with the name 'add'"),
    "no object": (
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
            ]
        },
        "qwen2",
        "'f' have the type 'array'; allowed: object",
    ),
    "long": (
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "description": "x" * MAX_TOOL_CHARACTERS},
                }
            ]
        },
        "qwen2",
        f"allowed: up to {MAX_TOOL_CHARACTERS}",
    ),
    "many": ({"tools": [ADD] * (MAX_TOOLS + 1)}, "qwen2", f"at most {MAX_TOOLS} items"),
    "deep": ({"tools": [nested(6)]}, "qwen2", f"more than {MAX_TOOL_LEVELS} deep"),
    "other kind": ({"tools": [{"type": "web_search"}]}, "qwen2", "tools.0.type is 'web_search'"),
    "odd name": (
        {"tools": [{"type": "function", "function": {"name": "f g"}}]},
        "qwen2",
        "should match pattern",
    ),
    "two forms": (
        {"response_format": {"type": "json_object"}},
        "qwen2",
        "send one, or tool_choice: none",
    ),
    "older tools": ({"function_call": {"name": "add"}}, "qwen2", "write tool_choice and tools"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_tools_that_cannot_be_called(refusal, model, name):
    fields, template, message = REFUSED[name]
    model(UNKNOWN.get(template, template))

    status, error = refusal(
        CHAT, **{"model": "writer", "messages": HELLO, "tools": [ADD], **fields}
    )

    assert (status, message in error["message"]) == (400, True), error


def test_a_setting_names_the_form(send, make_app, calls, model):
    model(UNKNOWN["unknown start"], FAMILIES["mistral"].call)
    body = {"model": "writer", "messages": HELLO, "tools": [ADD]}

    found = send("POST", CHAT, body, app=make_app(tool_calls="mistral")).json()
    ignored = send("POST", CHAT, body, app=make_app(tool_calls="none"))

    assert found["choices"][0]["finish_reason"] == "tool_calls"
    assert sent(calls).get("chat_template_kwargs") is None
    assert "x-varlen-warning" in ignored.headers
    with pytest.raises(ValueError, match="tool_calls is 'x'; allowed: auto, none, hermes"):
        make_app(tool_calls="x")


STREAMED = {
    "calls": (
        "qwen3",
        [
            "<think>h",
            "m</think>",
            "\nI a",
            "dd.<tool",
            f"_call>{JSON_CALL}</to",
            f"ol_call>{TAGGED}",
        ],
        "auto",
    ),
    "text": ("qwen3", ["a ", " b", "\n"], "auto"),
    "forced": ("qwen2", [*JSON_CALL], "required"),
    "list": ("mistral", ["[", *JSON_CALL, ", ", JSON_CALL, "]"], "required"),
}


@pytest.mark.parametrize("name", STREAMED)
def test_a_stream_is_the_answer_in_parts_for_the_openai_client(ask, model, name):
    family, texts, choice = STREAMED[name]
    model(family, *texts)
    options = {"model": "writer", "messages": HELLO, "tools": [ADD], "tool_choice": choice, "n": 2}

    async def stream(client):
        async with client.chat.completions.stream(**options) as events:
            async for _ in events:
                pass
            return await events.get_final_completion()

    whole = ask(lambda c: c.chat.completions.create(**options))
    parts = ask(stream)

    def plain(completion):
        return [
            (
                each.message.content or None,
                getattr(each.message, "reasoning_content", None),
                [(c.function.name, c.function.arguments) for c in each.message.tool_calls or ()],
                each.finish_reason,
                each.index,
            )
            for each in completion.choices
        ]

    assert plain(parts) == plain(whole)


def test_an_answer_with_calls_is_a_message_of_the_next_request(ask, calls, model):
    model("mistral", FAMILIES["mistral"].call)

    async def loop(client):
        options = {"model": "writer", "tools": [ADD]}
        first = await client.chat.completions.create(messages=HELLO, **options)
        message = first.choices[0].message
        [call] = message.tool_calls
        calls.texts = ("3",)
        result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        return call, await client.chat.completions.create(
            messages=[*HELLO, message, result], **options
        )

    call, last = ask(loop)

    assert last.choices[0].message.content == "3"
    question, answer, result = calls.received[-1][2]
    assert answer["tool_calls"] == [
        {"id": call.id, "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
    ]
    assert result == {"role": "tool", "tool_call_id": call.id, "content": "3"}
    # the template takes it
    assert calls.render([question, answer, result], tools=[ADD])


def test_tokens_with_log_probabilities_are_those_of_the_parts(post, model):
    model("qwen2", "<tool_", f"call>{JSON_CALL}", "</tool_call>")

    [choice] = post(CHAT, model="writer", messages=HELLO, tools=[ADD], logprobs=True)["choices"]

    assert len(choice["logprobs"]["content"]) == 3
    assert choice["finish_reason"] == "tool_calls"


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["c", "f"]},
        "days": {"type": "array", "items": {"$ref": "#/$defs/Day"}, "maxItems": 3},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {
        "Day": {
            "type": "object",
            "title": "Day",
            "properties": {"rain": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}},
            "required": ["rain"],
            "additionalProperties": False,
        }
    },
}
TREE = {
    "type": "object",
    "properties": {"left": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
    "required": ["left"],
    "additionalProperties": False,
}
FORCED = {
    "weather": WEATHER,
    "tree": TREE,
    "now": {"properties": {}, "additionalProperties": False},
}


@pytest.fixture(scope="module")
def grammars():
    tokenizer = byte_level()
    ends = [tokenizer.token_to_id(END)]
    return GrammarServer(**grammar_tokens(tokenizer, tokenizer.get_vocab_size(), ends))


def answer_of_noise(start, chosen):
    """Return a text of tokens that are chosen by chance where the grammar allows them."""
    matcher, ids = start.deep_copy(), []
    while not matcher.is_stopped():
        bits = matcher.compute_bitmask()
        allowed = [each for each in range(8 * len(bits)) if bits[each // 8] >> each % 8 & 1]
        ids.append(chosen.choice(allowed))
        assert matcher.consume_tokens(ids[-1:])
        assert len(ids) < 10_000
    return byte_level().decode(ids)


@pytest.mark.parametrize("number", [60, pytest.param(2000, marks=pytest.mark.full)])
def test_no_forced_call_is_invalid(grammars, number):
    chosen = random.Random(0)
    starts = []
    for form in (HERMES, LLAMA, MISTRAL):
        for name in (None, *FORCED):
            schema = forced_schema(form.calls, FORCED, name=name, is_parallel=False)
            start = grammars._compile(read_grammar("structured_outputs", {"json": schema}))
            assert isinstance(start, LLMatcher), start
            starts.append((form, name, start))
    called = set()
    for at in range(number):
        form, name, start = starts[at % len(starts)]
        text = answer_of_noise(start, chosen)
        cut = chosen.randrange(len(text))

        parser = AnswerParser(form, FORCED, choice="forced")
        content, reasoning, [(found, arguments)] = parsed(parser, [text[:cut], text[cut:]])

        assert (content, reasoning) == ("", "")
        assert found in ((name,) if name else FORCED)
        jsonschema.validate(arguments, FORCED[found])
        called.add(found)
    assert called == {*FORCED}


@pytest.mark.parametrize(
    "schema, reason",
    [
        ({"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
        ({"type": "string", "format": "weird"}, "Unknown format: weird"),
        ({"$ref": "#/$defs/No"}, "does not exist"),
    ],
    ids=str,
)
def test_what_a_grammar_cannot_hold_is_named(grammars, schema, reason):
    schemas = {"f": {"properties": {"a": schema}}}
    forced = forced_schema(HERMES.calls, schemas, name=None, is_parallel=True)

    found = grammars._compile(read_grammar("structured_outputs", {"json": forced}))

    assert isinstance(found, str)
    assert reason in found


def test_the_refusal_of_a_forced_call_says_what_to_send(refusal, calls, model):
    model("qwen2", JSON_CALL)
    calls.failure = InvalidRequest(
        'structured_outputs cannot be served: Unimplemented keys: ["not"]'
    )

    status, error = refusal(
        CHAT, model="writer", messages=HELLO, tools=[ADD], tool_choice="required"
    )

    assert (status, error["message"]) == (
        400,
        'the schemas of the tools cannot be forced: Unimplemented keys: ["not"]; send tool_choice: auto, or other'
        " schemas",
    )
