"""Small chat templates with the calls and reasoning of known families, and answers."""

import json
from dataclasses import dataclass
from functools import cache

from jinja2.sandbox import ImmutableSandboxedEnvironment

_TURNS = """{%- for message in messages %}
{%- if message.role == "user" %}{{ "<|user|>" + message.content + "<|end|>" }}
{%- elif message.role == "tool" %}{{ "<|tool|>" + message.content + "<|end|>" }}
{%- else %}{{ "<|assistant|>\\n" }}REASONING{{ message.content }}
{%- for call in message.tool_calls %}{% set f = call.function %}CALL{% endfor %}AFTER{{ "<|end|>" }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt | default(true) %}{{ "<|assistant|>\\n" }}{% endif %}BEGINNING"""
_TOOLS = "{% if tools %}{{ '<|system|>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
_JSON = """{{ {"name": f.name, "ARGUMENTS": f.arguments} | tojson }}"""


def _source(call, *, arguments="arguments", reasoning="", beginning="", after=""):
    turns = _TURNS.replace("CALL", call.replace("JSON", _JSON)).replace("ARGUMENTS", arguments)
    turns = turns.replace("REASONING", reasoning).replace("BEGINNING", beginning)
    return _TOOLS + turns.replace("AFTER", after)


_THINKS = "{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}"
_UNTHINKING = (
    "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)
_HERMES = "{{ '<tool_call>\\n' }}JSON{{ '\\n</tool_call>' }}"
_KEYS = "{% for k, v in f.arguments.items() %}{{ k }}:QUOTE{{ v }}QUOTE{% endfor %}"
_CHECKED = "{% if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"


@dataclass(frozen=True)
class Family:
    """A template and an answer with one call of `add(a=1, b=[2], c="é")`.

    Attributes:
        form: name of the form.
        special: its special tokens.
    """

    form: str | None
    source: str
    call: str = ""
    special: tuple = ()


ARGUMENTS = {"a": 1, "b": [2], "c": 'é "<x>\n'}
_WRITTEN = json.dumps(ARGUMENTS)
_OBJECT = f'{{"name": "add", "arguments": {_WRITTEN}}}'
FAMILIES = {
    "qwen2": Family("hermes", _source(_HERMES), f"<tool_call>\n{_OBJECT}\n</tool_call>"),
    "qwen3": Family(
        "hermes",
        _source(_HERMES, reasoning=_THINKS, beginning=_UNTHINKING),
        f"<tool_call>\n{_OBJECT}\n</tool_call>",
    ),
    "qwen3_coder": Family(
        "qwen_xml",
        _source(
            "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}"
            "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
        ),
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[2]\n</parameter>\n"
        '<parameter=c>\né "<x>\n\n</parameter>\n</function>\n</tool_call>',
    ),
    "llama3": Family(
        "llama3",
        _source("JSON", arguments="parameters"),
        f'{{"name": "add", "parameters": {_WRITTEN}}}',
        ("<|python_tag|>",),
    ),
    "mistral": Family(
        "mistral",
        _source("{{ '[TOOL_CALLS] [' }}JSON{{ ']' }}" + _CHECKED),
        f"[TOOL_CALLS] [{_OBJECT}]",
        ("[TOOL_CALLS]",),
    ),
    "mistral_args": Family(
        "mistral",
        _source("{{ '[TOOL_CALLS]' + f.name + '[ARGS]' + f.arguments | tojson }}"),
        f"[TOOL_CALLS]add[ARGS]{_WRITTEN}",
        ("[TOOL_CALLS]", "[ARGS]"),
    ),
    "granite": Family(
        "granite", _source("{{ '<|tool_call|>[' }}JSON{{ ']' }}"), f"<|tool_call|>[{_OBJECT}]"
    ),
    "gemma": Family(
        "gemma",
        _source(
            "<start_function_call>call:{{ f.name }}{{ '{' }}"
            + _KEYS.replace("QUOTE", "<escape>")
            + "{{ '}' }}<end_function_call>"
        ),
        '<start_function_call>call:add{a:1,b:[2],c:<escape>é "<x>\n<escape>}<end_function_call>',
        ("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "gemma4": Family(
        "gemma4",
        _source(
            "<|tool_call>call:{{ f.name }}{{ '{' }}"
            + _KEYS.replace("QUOTE", '<|"|>')
            + "{{ '}' }}<tool_call|>"
        ),
        '<|tool_call>call:add{a:1,b:[2],c:<|"|>é "<x>\n<|"|>}<tool_call|>',
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
}
# Templates whose calls have no known form, and one without tools.
UNKNOWN = {
    "unknown start": _source("<CALL>JSON</CALL>"),
    "unknown list": _source("[JSON]"),
    "code": _source("{{ f.name + '(probe_argument=1)' }}"),
}
PLAIN = _source("").replace(_TOOLS, "")
THINKING = _source("", reasoning="", beginning="{{ '<think>\\n' }}")


@cache
def _environment():
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = None
    return environment


def renderer(source, name=None):
    """Return a function that makes the prompt of a chat.

    Args:
        name: the only name that the template has; others are refused.
    """
    from varlen_client.errors import InvalidRequest

    template = _environment().from_string(source)

    def render(messages, **variables):
        if variables.pop("chat_template", name) != name:
            raise InvalidRequest("chat_template is another; allowed: names of the templates")
        variables.pop("ignore_unread", None)
        return template.render(messages=messages, **variables)

    return render
