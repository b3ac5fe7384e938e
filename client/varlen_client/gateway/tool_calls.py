"""Calls of tools and reasoning in texts: the forms of model families, and their parser.

A form is found by what the chat template of a model writes for a known call: the form is the one that reads this call
back. The parser gives the same answer however its text is divided into parts.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

# JSON schemas of the arguments of functions, by their names.
Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]

# Characters between the start of a call and its JSON, which may have the name of the function.
_MAX_HEAD = 512
# Some chat templates refuse ids of calls with other lengths or characters.
_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9


@dataclass(frozen=True, slots=True)
class Call:
    """A call in an answer, or the next part of one.

    Attributes:
        index: number of the call in its answer.
        id, name: None in parts after the first.
        arguments: JSON text of an object, or the next part of it.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str

    def delta(self) -> dict[str, Any]:
        """Return the call as a chunk of OpenAI's streams has it."""
        function = {"name": self.name, "arguments": self.arguments}
        if self.name is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


# Name and arguments of a call.
_Named: TypeAlias = tuple[str, Mapping[str, Any]]
# Returns the calls in the text between start and end of a form; None is no valid call.
_Read: TypeAlias = Callable[[str, Schemas], list[_Named] | None]


def _objects(body: str, schemas: Schemas) -> list[_Named] | None:  # noqa: ARG001 - as every reader
    """Return calls that are an object with name and arguments, or a list of them."""
    found = _json(body)
    calls = [_named(each) for each in (found if isinstance(found, list) else [found])]
    return None if None in calls else [each for each in calls if each is not None]


_HEAD = re.compile(r"\s*([\w.:/-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*")


def _objects_or_named(body: str, schemas: Schemas) -> list[_Named] | None:
    """Return calls of Mistral: a list of objects, or a name before its arguments."""
    head = _HEAD.match(body)
    if head is None:
        return _objects(body, schemas)
    arguments = _json(body[head.end() :])
    return [(head[1], arguments)] if isinstance(arguments, dict) else None


_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)


def _tagged(body: str, schemas: Schemas) -> list[_Named] | None:
    """Return a call whose parameters are texts between tags, typed by the schema."""
    found = _FUNCTION.fullmatch(body)
    if found is None:
        return None
    properties = schemas.get(found[1], {}).get("properties", {})
    arguments = {}
    for name, written in _PARAMETER.findall(found[2]):
        text = written.removeprefix("\n").removesuffix("\n")
        schema = properties.get(name) if isinstance(properties, dict) else None
        is_text = not isinstance(schema, dict) or schema.get("type", "string") == "string"
        value = None if is_text else _json(text)
        is_null = not is_text and text.strip() == "null"
        arguments[name] = text if value is None and not is_null else value
    return [(found[1], arguments)]


_GEMMA_CALL = re.compile(r"\s*call:\s*([\w.:/-]+)\s*(\{.*\})\s*", re.DOTALL)
_GEMMA_KEY = re.compile(r"([{,]\s*)([^\W\d][\w.-]*)(\s*:)")


def _gemma(quote: str) -> _Read:
    """Return the reader of Gemma's calls: bare keys, and texts between two quotes."""

    def read(body: str, schemas: Schemas) -> list[_Named] | None:  # noqa: ARG001 - as every reader
        found = _GEMMA_CALL.fullmatch(body)
        if found is None:
            return None
        parts = found[2].split(quote)
        written = [
            json.dumps(part) if at % 2 else _GEMMA_KEY.sub(r'\1"\2"\3', part)
            for at, part in enumerate(parts)
        ]
        arguments = _json("".join(written))
        return [(found[1], arguments)] if isinstance(arguments, dict) else None

    return read


def _named(found: object) -> _Named | None:
    """Return the call that an object of JSON is; None if it is none."""
    if not isinstance(found, dict):
        return None
    name, arguments = found.get("name"), found.get("arguments", found.get("parameters"))
    return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _json(text: str) -> Any:
    """Return a value of JSON; None if the text has none."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How the models of a family write calls of tools.

    Attributes:
        start: text before a call. Empty is the beginning of the answer, where a call is an object of JSON.
        end: text after a call, which answers may leave out.
        read: reader of the text between them.
        is_json: whether a call ends with its JSON; else it ends with `end`.
        is_list: whether one `start` has a list of calls.
        arguments: name of the arguments in a forced call.
        also: another text before a call at the beginning of the answer.
    """

    start: str
    end: str
    read: _Read
    is_json: bool = True
    is_list: bool = False
    arguments: str = "arguments"
    also: str = ""


# By the name in the option `--tool-calls`. The first one that reads the call of a template is its form.
TOOL_FORMS: Mapping[str, ToolForm] = {
    # Hermes, Qwen 2.5 and 3
    "hermes": ToolForm("<tool_call>", "</tool_call>", _objects),
    # Qwen 3 Coder, and Qwen after 3
    "qwen_xml": ToolForm("<tool_call>", "</tool_call>", _tagged, is_json=False),
    "mistral": ToolForm("[TOOL_CALLS]", "", _objects_or_named, is_list=True),
    # Granite 3
    "granite": ToolForm("<|tool_call|>", "", _objects, is_list=True),
    # FunctionGemma
    "gemma": ToolForm(
        "<start_function_call>", "<end_function_call>", _gemma("<escape>"), is_json=False
    ),
    "gemma4": ToolForm("<|tool_call>", "<tool_call|>", _gemma('<|"|>'), is_json=False),
    # Llama from 3.1 on; the only one without a start is the last
    "llama3": ToolForm("", ";", _objects, arguments="parameters", also="<|python_tag|>"),
}


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """How models write their reasoning in front of an answer."""

    start: str
    end: str


REASONING_FORMS: Sequence[ReasoningForm] = (
    ReasoningForm("<think>", "</think>"),
    ReasoningForm("[THINK]", "[/THINK]"),
    ReasoningForm("<|channel>thought", "<channel|>"),
)


@dataclass(frozen=True, slots=True)
class ChatForm:
    """What answers to a chat template look like.

    Attributes:
        reads_tools: whether the template shows tools to the model.
        calls: form of calls; None is not known.
        reasoning: form of the reasoning; None is none.
        opens_reasoning: whether the prompt ends with the start of the reasoning.
        has_special_tokens: whether starts and ends are special tokens, which texts of answers leave out.
        template: name of the checkpoint's template for tools, if it is not the default.
    """

    reads_tools: bool = False
    calls: ToolForm | None = None
    reasoning: ReasoningForm | None = None
    opens_reasoning: bool = False
    has_special_tokens: bool = False
    template: str | None = None


# A conversation that shows the form of a template.
QUESTION, THOUGHT, RESULT = "probe-question-7", "probe-thought-7", "probe-result-7"
_NAME, _ARGUMENTS = "probe_function", {"probe_argument": "probe value"}
_DESCRIPTION = "probe-description-7"
_CALL = {"name": _NAME, "arguments": _ARGUMENTS}
PROBE_TOOLS: Sequence[Mapping[str, Any]] = (
    {
        "type": "function",
        "function": {
            "name": _NAME,
            "description": _DESCRIPTION,
            "parameters": {
                "type": "object",
                "properties": {"probe_argument": {"type": "string", "description": "probe"}},
                "required": ["probe_argument"],
            },
        },
    },
)
PROBE_CHAT: Sequence[Mapping[str, Any]] = (
    {"role": "user", "content": QUESTION},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": THOUGHT,
        "reasoning": THOUGHT,
        "tool_calls": [{"id": "probe1234", "type": "function", "function": _CALL}],
    },
    {"role": "tool", "name": _NAME, "tool_call_id": "probe1234", "content": RESULT},
)


def form_of(prompt: str, visible: str) -> ChatForm:
    """Return the form of a chat template.

    Args:
        prompt: prompt of PROBE_CHAT and PROBE_TOOLS, or of the first message of the chat.
        visible: the prompt without special tokens.
    """
    before, _, after = prompt.rpartition(QUESTION)
    answer, has_result, beginning = after.partition(RESULT)
    calls = _call_form(answer, beginning) if has_result else None
    reasoning, is_open = _reasoning_form(answer, beginning if has_result else after)
    marks = [] if calls is None else [calls.start, calls.also if calls.also in answer else ""]
    marks += [] if reasoning is None else [reasoning.start]
    return ChatForm(
        reads_tools=_DESCRIPTION in before or _DESCRIPTION in after,
        calls=calls,
        reasoning=reasoning,
        opens_reasoning=is_open,
        has_special_tokens=any(visible.count(mark) < prompt.count(mark) for mark in marks if mark),
    )


def _call_form(answer: str, beginning: str) -> ToolForm | None:
    """Return the form that reads the call of PROBE_CHAT.

    Args:
        answer: text of the prompt from the question to the result of the call.
        beginning: text after the result, where an answer begins.
    """
    schemas = {_NAME: {"properties": {"probe_argument": {"type": "string"}}}}
    for form in TOOL_FORMS.values():
        at = answer.find(form.start or "{")
        if at < 0:
            continue
        if not form.start and not _begins(answer[:at].removesuffix(form.also), beginning):
            # the call has a start that is not known
            continue
        parser = AnswerParser(ChatForm(calls=form), schemas)
        found = parser.add(answer[at:], is_last=True).calls
        if len(found) == 1 and (found[0].name, _json(found[0].arguments)) == (_NAME, _ARGUMENTS):
            if form.start:
                return form
            has_parameters = '"parameters"' in answer[at:]
            return replace(form, arguments="parameters" if has_parameters else "arguments")
    return None


def _begins(text: str, beginning: str) -> bool:
    """Return whether a text ends as a prompt does, where an answer begins."""
    mark = beginning.rstrip()[-8:]
    return bool(mark) and text.rstrip().endswith(mark)


def _reasoning_form(answer: str, beginning: str) -> tuple[ReasoningForm | None, bool]:
    """Return the form of the reasoning, and whether the prompt opens it."""
    for form in REASONING_FORMS:
        _, is_opened, opened = beginning.rpartition(form.start)
        is_open = bool(is_opened) and form.end not in opened
        start, thought, end = (answer.find(each) for each in (form.start, THOUGHT, form.end))
        if is_open or is_opened or 0 <= start < thought < end:
            return form, is_open
    return None, False


Choice: TypeAlias = Literal["auto", "forced"]


@dataclass(slots=True)
class Delta:
    """The next part of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


class AnswerParser:
    """Divides the text of one answer into reasoning, content and calls."""

    def __init__(
        self,
        form: ChatForm,
        schemas: Schemas,
        *,
        choice: Choice = "auto",
        is_parallel: bool = True,
    ) -> None:
        """Start at the beginning of an answer.

        Args:
            form: form of the chat template.
            schemas: the functions that may be called; calls of others stay text.
            choice: whether the answer has the form of `forced_schema`.
            is_parallel: whether there may be several calls; only the first one is reported otherwise.
        """
        self._form, self._schemas, self._is_parallel = form, schemas, is_parallel
        self._rest = ""
        self._end = _JsonEnd()
        self._space, self._drops_space, self._is_reasoning = "", False, False
        self.num_calls = 0
        self._step: Callable[[bool], bool] = self._forced_head
        if choice == "auto":
            self._step = self._begin
            if form.reasoning is not None and form.opens_reasoning:
                self._begin_reasoning()
        self._delta = Delta()

    def add(self, text: str, *, is_last: bool = False) -> Delta:
        """Return what is known of the answer with its next text.

        Args:
            is_last: whether the answer ends with it.
        """
        self._delta = Delta()
        self._rest += text
        while self._step(is_last):
            pass
        if is_last and not self.num_calls and not self._drops_space and not self._is_reasoning:
            self._delta.content += self._space
        return self._delta

    # Each step reads a part of the rest, and returns whether the next one may go on.

    def _begin(self, is_last: bool) -> bool:
        """Read white space and the start of the reasoning."""
        reasoning = self._form.reasoning
        text = self._rest.lstrip()
        if reasoning is not None and text.startswith(reasoning.start):
            self._rest = text.removeprefix(reasoning.start)
            self._begin_reasoning()
            return True
        if reasoning is not None and reasoning.start.startswith(text) and not is_last:
            return False
        self._step = self._first_content
        return True

    def _begin_reasoning(self) -> None:
        self._step, self._drops_space, self._is_reasoning = self._reasoning, True, True

    def _reasoning(self, is_last: bool) -> bool:
        """Read reasoning up to its end."""
        assert self._form.reasoning is not None
        end = self._form.reasoning.end
        text, found, rest = self._rest.partition(end)
        if not found:
            text, rest = _without_part_of(end, text, is_last)
        self._rest = rest
        said = self._said(text)
        self._delta.reasoning += said
        if found:
            self._step, self._space, self._drops_space = self._first_content, "", True
            self._is_reasoning = False
        return bool(found)

    def _first_content(self, is_last: bool) -> bool:
        """Read the beginning of the content, where a call may have no start."""
        form = self._form.calls
        if form is None or form.start or not self._schemas:
            self._step = self._content
            return True
        text = self._rest.lstrip()
        if text.startswith(("{", form.also)):
            self._step = self._call
            return True
        if form.also.startswith(text) and not is_last:
            return False
        self._step = self._text
        return True

    def _content(self, is_last: bool) -> bool:
        """Read content up to the start of a call."""
        form = self._form.calls
        if form is None or not form.start or not self._schemas:
            self._step = self._text
            return True
        text, found, rest = self._rest.partition(form.start)
        if not found:
            text, rest = _without_part_of(form.start, text, is_last)
        self._rest = found + rest
        self._delta.content += self._said(text)
        if found:
            self._step = self._call
        return bool(found)

    def _text(self, is_last: bool) -> bool:  # noqa: ARG002 - as every step
        """Read content that has no calls."""
        self._delta.content += self._said(self._rest)
        self._rest = ""
        return False

    def _call(self, is_last: bool) -> bool:
        """Read a call up to its end."""
        form = self._form.calls
        assert form is not None
        start = self._rest.find(form.start) + len(form.start)
        if not form.start:
            start = len(self._rest) - len(self._rest.lstrip().removeprefix(form.also))
        end, is_missing = self._call_end(form, start, is_last)
        if end is None and not is_missing:
            return False
        calls = None if end is None else form.read(self._rest[start:end], self._schemas)
        self._end = _JsonEnd()
        if calls is None or not all(name in self._schemas for name, _ in calls):
            # it stays text
            self._delta.content += self._said(self._rest[:start])
            self._rest = self._rest[start:]
            self._step = self._content if form.start else self._text
            return True
        for name, arguments in calls:
            self._report(name, _text_of(arguments))
        self._rest = self._rest[end:]
        self._step = self._after_call
        return True

    def _call_end(self, form: ToolForm, start: int, is_last: bool) -> tuple[int | None, bool]:
        """Return where a call ends, and whether it never will."""
        if not form.is_json:
            end = self._rest.find(form.end, max(start, self._end.at))
            # the end may have begun
            self._end.at = max(start, len(self._rest) - len(form.end))
            if end < 0 and is_last:
                return len(self._rest), False
            return (None, False) if end < 0 else (end, False)
        if self._end.at < start:
            first = _json_start(self._rest, start)
            if first is None:
                return None, is_last or len(self._rest) - start > _MAX_HEAD
            self._end.at = first
        end_of_json = self._end.find(self._rest)
        return end_of_json, is_last and end_of_json is None

    def _after_call(self, is_last: bool) -> bool:
        """Read the end of a call, and white space."""
        form = self._form.calls
        assert form is not None
        text = self._rest.lstrip()
        if form.end and text.startswith(form.end):
            self._rest = text.removeprefix(form.end)
        elif form.end.startswith(text) and not is_last:
            return False
        self._space, self._drops_space = "", True
        self._step = self._content if form.start else self._next_bare_call
        return True

    def _next_bare_call(self, is_last: bool) -> bool:
        """Read whether another call without a start follows."""
        text = self._rest.lstrip()
        if not text and not is_last:
            return False
        self._step = self._call if text.startswith("{") else self._text
        return True

    def _forced_head(self, is_last: bool) -> bool:
        """Read a forced call up to its arguments."""
        found = _FORCED_HEAD.match(self._rest)
        if found is None:
            if is_last and not self.num_calls:
                # it was cut off
                self._delta.content += self._rest
                self._rest = ""
            return False
        self._report(json.loads(f'"{found[1]}"'), "")
        self._rest = self._rest[found.end() :]
        self._end = _JsonEnd()
        self._step = self._forced_arguments
        return True

    def _forced_arguments(self, is_last: bool) -> bool:  # noqa: ARG002 - as every step
        """Read the arguments of a forced call."""
        end = self._end.find(self._rest)
        text = self._rest[: self._end.at]
        last = self._delta.calls[-1] if self._delta.calls else None
        if last is not None:
            self._delta.calls[-1] = replace(last, arguments=last.arguments + text)
        elif text:
            self._delta.calls.append(Call(self.num_calls - 1, None, None, text))
        self._rest = self._rest[len(text) :]
        if end is None:
            self._end.at = 0
            return False
        self._step = self._forced_head
        return True

    def _report(self, name: str, arguments: str) -> None:
        if self.num_calls and not self._is_parallel:
            return
        call_id = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))
        self._delta.calls.append(Call(self.num_calls, call_id, name, arguments))
        self.num_calls += 1

    def _said(self, text: str) -> str:
        """Return text with white space before it; the space behind it waits for more."""
        text = self._space + text
        said = text.rstrip()
        self._space = text[len(said) :]
        if self._drops_space:
            said = said.lstrip()
            self._space = self._space if said else ""
            self._drops_space = not said
        return said


_FORCED_HEAD = re.compile(
    r'[\s\[,}]*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class _JsonEnd:
    """Finds the end of an object or list of JSON in a text that grows.

    Attributes:
        at: index where the search goes on.
    """

    _BRACKET, _IN_TEXT = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')

    def __init__(self) -> None:
        self.at = 0
        self._depth, self._is_in_text = 0, False

    def find(self, text: str) -> int | None:
        """Return where the value ends; None if it goes on."""
        while True:
            found = (self._IN_TEXT if self._is_in_text else self._BRACKET).search(text, self.at)
            if found is None:
                self.at = len(text)
                return None
            self.at = found.end()
            if found[0] == "\\":
                if self.at == len(text):
                    # the escaped character has not come
                    self.at -= 1
                    return None
                self.at += 1
            elif found[0] == '"':
                self._is_in_text = not self._is_in_text
            else:
                self._depth += 1 if found[0] in "{[" else -1
                if self._depth <= 0:
                    return self.at


def _json_start(text: str, start: int) -> int | None:
    """Return where the JSON of a call begins, perhaps behind the name of its function."""
    first = len(text) - len(text[start:].lstrip())
    if text[first : first + 1] == "[":
        return first
    found = text.find("{", start, start + _MAX_HEAD)
    return None if found < 0 else found


def _without_part_of(mark: str, text: str, is_last: bool) -> tuple[str, str]:
    """Divide a text before an end of it with which a mark may begin."""
    for size in () if is_last else range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-size:]):
            return text[:-size], text[-size:]
    return text, ""


def _text_of(arguments: Mapping[str, Any]) -> str:
    """Return arguments as JSON that UTF-8 can hold."""
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        # half a pair of surrogates
        return json.dumps(arguments)
    return text


# The grammar library's: white space as templates write it, so that no answer ends in white space.
_WHITE_SPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Fields of schemas that say nothing of a value, and fields whose values are schemas by name.
_NOTES = frozenset(
    ("title", "description", "examples", "default", "deprecated", "readOnly", "writeOnly")
)
_BY_NAME = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
)


def forced_schema(
    form: ToolForm, schemas: Schemas, *, name: str | None, is_parallel: bool
) -> dict[str, Any]:
    """Return the JSON schema of an answer that has to be a call.

    Args:
        name: function that is called; None is any.
        is_parallel: whether there may be several calls, in forms that are lists.
    """
    chosen = {each: schemas[each] for each in ([name] if name is not None else schemas)}
    # references of a schema begin at its root, which is a definition here
    definitions = {
        each: {"type": "object", **_schema(schema, f"#/$defs/{_pointer(each)}")}
        for each, schema in chosen.items()
    }
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": each},
                form.arguments: {"$ref": f"#/$defs/{_pointer(each)}"},
            },
            "required": ["name", form.arguments],
            "additionalProperties": False,
        }
        for each in chosen
    ]
    call: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if form.is_list:
        most = {} if is_parallel and name is None else {"maxItems": 1}
        call = {"type": "array", "items": call, "minItems": 1, **most}
    return {**call, "$defs": definitions, "x-guidance": _WHITE_SPACE}


def _pointer(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _schema(schema: Any, root: str) -> Any:
    """Return a schema without notes, and with references into `root`."""
    if isinstance(schema, list):
        return [_schema(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _NOTES or name == "$schema":
            continue
        if name in ("const", "enum"):
            found[name] = value
        elif name in _BY_NAME and isinstance(value, dict):
            found[name] = {each: _schema(inner, root) for each, inner in value.items()}
        elif name == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            found[name] = root + value[1:]
        else:
            found[name] = _schema(value, root)
    return found
