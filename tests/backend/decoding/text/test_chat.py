"""Chat templates: the same prompts as with transformers, and no harm from bad ones."""

from datetime import datetime
from functools import cache

import pytest
from transformers import PreTrainedTokenizerFast

from tests.backend.decoding.sandboxes import new_template
from tests.backend.decoding.text.small_tokenizers import byte_level
from tests.backend.refusals import refused_checkpoint
from tests.backend.refusals import refused_request as refused
from tests.threads import run_in_threads
from varlen.sandbox.limits import SandboxLimits

# Templates in the styles of well-known models.
LLAMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start|>system<|stop|>\\n\\nToday: ' + strftime_now('%d %b %Y') + '\\n\\n' + system + '<|eot|>' }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- for call in message.tool_calls %}
            {{- '<|start|>tool<|stop|>' + (call | tojson) + '<|eot|>' }}
        {%- endfor %}
        {%- continue %}
    {%- endif %}
    {{- '<|start|>' + message['role'] + '<|stop|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|stop|>\\n\\n' }}
{%- endif %}
"""
CHATML = """{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}
<|im_start|>system
You help.<|im_end|>
{% endif %}
<|im_start|>{{ message['role'] }}
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}
{% else %}{{ message['content'] }}{% endif %}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
MISTRAL = """{{ bos_token }}{% set state = namespace(turn=0) %}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (state.turn % 2 == 0) -%}
        {{ raise_exception('roles must alternate: user, assistant, ...') }}
    {%- endif -%}
    {%- set state.turn = state.turn + 1 -%}
    {%- if message['role'] == 'user' -%}
        {{ '[INST] ' + message['content'] + ' [/INST]' }}
    {%- else -%}
        {{ ' ' + message['content'] + eos_token }}
    {%- endif -%}
{%- endfor -%}
"""
# What SmolLM3, Granite and Hunyuan have: a date, a switch in the text, methods of strings, slices, a mode.
SWITCHES = """{%- if messages[0].role == "system" -%}
{%- set system = messages[0].content -%}{%- set messages = messages[1:] -%}
{%- else -%}{%- set system = "Today is " ~ strftime_now("%d %B %Y") ~ "." -%}{%- endif -%}
{%- set mode = "think" if enable_thinking is defined and enable_thinking else "fast" -%}
{%- if "/no_think" in system -%}{%- set mode = "fast" -%}
{%- set system = system.replace("/no_think", "").rstrip() -%}{%- endif -%}
{{- "<|start|>system<|end|>" + system.split("\n")[0] + " [" + mode + "]\n" -}}
{%- for message in messages -%}
{%- set content = message.content if message.content is string else "" -%}
{%- if message["role"] == "user" -%}{{- "<|user|>" + content.strip() -}}
{%- elif message.role == "assistant" -%}
{%- generation -%}{{- content.split("</think>")[-1].lstrip("\n") ~ "<|eot|>" -}}{%- endgeneration -%}
{%- endif -%}{%- if loop.last and add_generation_prompt -%}{{- "<|assistant|>" -}}{%- endif -%}
{%- endfor -%}
"""
TEMPLATES = {"llama": LLAMA, "chatml": CHATML, "mistral": MISTRAL, "switches": SWITCHES}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHATS = {
    "one": [{"role": "user", "content": "Hi <b>&\n 你好"}],
    "turns": [
        {"role": "user", "content": " Hi "},
        {"role": "assistant", "content": "Hello!\n"},
        {"role": "user", "content": "{{ 7 * 7 }} {% raw %}"},
    ],
}
WITH_SYSTEM = {
    "system": [{"role": "system", "content": "Be brief."}, *CHATS["one"]],
    "tools": [
        *CHATS["turns"],
        {"role": "assistant", "tool_calls": [{"b": "<é>", "a": [1, None, True]}], "content": ""},
    ],
}


def template_of(source, **options):
    return new_template(source, TOKENS, **{"max_characters": 10_000, **options})


@cache
def shared_template(source):
    """Return a template whose process all tests of this file use."""
    return template_of(source)


@pytest.mark.parametrize(
    "name, chat",
    [
        *((name, chat) for name in TEMPLATES for chat in CHATS.values()),
        *(
            (name, chat)
            for name in ("llama", "chatml", "switches")
            for chat in WITH_SYSTEM.values()
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else str(len(value)),
)
def test_prompts_are_those_of_transformers(name, chat):
    reference = PreTrainedTokenizerFast(tokenizer_object=byte_level(), **TOKENS)
    expected = reference.apply_chat_template(
        chat, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True
    )

    assert shared_template(TEMPLATES[name]).render(chat) == expected


def test_templates_have_the_filters_and_tests_that_transformers_gives_them():
    source = (
        "{{ messages[0] | tojson(indent=2) }}{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}"
        "{{ strftime_now('%Y') }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}x{% endfor %}"
        "{{ tools is none }}{{ unknown is defined }}{{ add_generation_prompt }}"
    )
    reference = PreTrainedTokenizerFast(tokenizer_object=byte_level(), **TOKENS)
    chat = CHATS["turns"]

    text = template_of(source).render(chat)

    assert text == reference.apply_chat_template(
        chat, chat_template=source, tokenize=False, add_generation_prompt=True
    )
    assert str(datetime.now().astimezone().year) in text


QWEN = CHATML + (
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "<think>{{ note | default('') }}</think>{% endif %}"
    "{% if documents %}{{ documents | tojson }}{% endif %}"
)


@pytest.mark.parametrize(
    "variables",
    [
        {"enable_thinking": False},
        {"enable_thinking": False, "note": "é"},
        {"enable_thinking": True, "documents": [{"text": "<a>"}]},
        {"add_generation_prompt": False},
    ],
    ids=str,
)
def test_variables_are_read_as_transformers_reads_them(variables):
    reference = PreTrainedTokenizerFast(tokenizer_object=byte_level(), **TOKENS)
    prompt = {"add_generation_prompt": True} | variables

    text = shared_template(QWEN).render(CHATS["one"], variables)

    assert text == reference.apply_chat_template(
        CHATS["one"], chat_template=QWEN, tokenize=False, **prompt
    )
    assert text != shared_template(QWEN).render(CHATS["one"])


@pytest.mark.parametrize(
    "name", ["enable_thinkin", "messages", "bos_token", "range", "raise_exception", "self", "note "]
)
def test_a_variable_that_a_template_does_not_read_or_a_request_may_not_set_is_refused(name):
    with refused(
        f"chat_template_kwargs has {name!r}; the chat template of this model reads:"
        " add_generation_prompt, documents, enable_thinking, note"
    ):
        shared_template("{{ bos_token }}" + QWEN).render(CHATS["one"], {name: 1})
    with refused("chat_template_kwargs has 'a'; the chat template of this model reads: none"):
        shared_template("{{ messages }}").render(CHATS["one"], {"a": 1})


def test_what_a_template_refuses_is_the_client_s_error():
    with refused(
        "the chat template of this model refuses the messages: roles must alternate: user, assistant, ..."
    ):
        shared_template(MISTRAL).render(CHATS["one"] * 2)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 5 }}",
        "{{ messages[9].content.x }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1] }}",
        "{{ messages.append(1) }}",
        "{{ range(999999999) | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ '%s' | format(1, 2) }}",
    ],
    ids=str,
)
def test_a_template_that_fails_does_no_harm(source):
    with refused("the chat template of this model refuses the messages: "):
        template_of(source).render(CHATS["one"])


def test_a_long_prompt_is_refused_before_it_is_complete():
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{{ messages[0].content }}"
    endless += "{% endfor %}{% endfor %}"

    with refused("the messages have more than 1000 characters with the chat template"):
        template_of(endless, max_characters=1000).render(CHATS["one"])


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "messages has 0 messages; allowed: a list of 1 to 1024"),
        ([{"role": "user"}] * 1025, "messages has 1025 messages; allowed: a list of 1 to 1024"),
        ({"role": "user"}, "messages has no list; allowed: a list of 1 to 1024"),
        ([{"role": "user"}, "hi"], "message 1 is 'hi'; send an object with role and content"),
        ([{"content": "hi"}], "message 0 is {'content': 'hi'}; send an object with role"),
        ([{"role": 5}], "message 0 is {'role': 5}; send an object with role"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refuses_messages_by_number(messages, message):
    with refused(message):
        shared_template(CHATML).render(messages)


def test_a_template_that_is_no_template_is_refused_at_load():
    with refused_checkpoint("the chat template cannot be read: "):
        template_of("{% for %}")
    assert template_of("fine").render(CHATS["turns"]) == "fine"


BOMBS = {
    "text": "{{ 'a' * 3000000000 }}",
    "later": "{% set n = messages | length %}{{ 'a' * (3000000000 * n) }}",
    "format": "{{ '%2000000000d' % 1 }}",
    "filter": "{{ 'x' | center(3000000000) }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
}
# only for long messages
_IF_LONG = "{% if messages[0].content | length > 99 %}"


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_takes_too_much_is_refused_at_load(name):
    limits = SandboxLimits(0.5, 1 << 26)
    reason = "0.5 s of processor time" if name == "loops" else "67108864 bytes of memory"

    with refused_checkpoint(f"the chat template of this model takes more than {reason}"):
        template_of(BOMBS[name], limits=limits)
    assert template_of("fine", limits=limits).render(CHATS["turns"]) == "fine"


@pytest.mark.parametrize("name", BOMBS)
def test_messages_for_which_a_template_takes_too_much_are_refused_and_others_are_not(name):
    source = f"{_IF_LONG}{BOMBS[name]}{{% endif %}}{{{{ messages[0].content }}}}"
    template = template_of(source, limits=SandboxLimits(0.5, 1 << 26))

    for _ in range(2):
        assert template.render([{"role": "user", "content": "Hi"}]) == "Hi"
        with refused("the chat template of this model takes more than "):
            template.render([{"role": "user", "content": "Hi" * 50}])


def test_prompts_of_many_threads_are_rendered_at_the_same_time():
    template = template_of(CHATML)
    expected = template.render(CHATS["turns"])
    texts = []

    run_in_threads(6, lambda _: texts.extend(template.render(CHATS["turns"]) for _ in range(10)))

    assert texts == [expected] * 60


def test_a_template_may_refuse_a_short_conversation_at_load():
    template = template_of("{{ raise_exception('no') if messages | length < 2 }}fine")

    assert template.render(CHATS["turns"]) == "fine"


def test_unread_variables_are_left_out_if_a_request_allows_it():
    unread = {"messages": [], "bos_token": "x", "range": 1, "other": True, "enable_thinking": False}

    text = shared_template(QWEN).render(CHATS["one"], {**unread, "ignore_unread": True})

    assert text == shared_template(QWEN).render(CHATS["one"], {"enable_thinking": False})
    with refused("chat_template_kwargs has "):
        shared_template(QWEN).render(CHATS["one"], {**unread, "ignore_unread": False})


NAMED = {"rag": "RAG {{ messages[0].content }}", "tool_use": "TOOL {{ end }}"}


def test_a_request_names_one_of_several_templates():
    template = template_of({"default": "PLAIN {{ end }}", **NAMED})

    assert template.render(CHATS["turns"], {"end": 1}) == "PLAIN 1"
    assert template.render(CHATS["turns"], {"chat_template": "rag"}) == "RAG  Hi "
    assert template.render(CHATS["turns"], {"chat_template": "tool_use", "end": 2}) == "TOOL 2"
    with refused("chat_template is 'other'; allowed: names of the checkpoint's own templates: "):
        template.render(CHATS["turns"], {"chat_template": "other"})
    # the template of a client does not run
    with refused("chat_template is '{{ 1 }}'; allowed: names"):
        template.render(CHATS["turns"], {"chat_template": "{{ 1 }}"})


def test_without_a_default_a_request_has_to_name_its_template():
    template = template_of(NAMED)

    assert template.render(CHATS["one"], {"chat_template": "tool_use"}) == "TOOL "
    with refused(
        "the checkpoint has several chat templates, and none is the default; send chat_template with one of their"
        " names: rag, tool_use"
    ):
        template.render(CHATS["one"])
