"""Chat messages to the text of a prompt, with the checkpoint's own template.

Templates are written for transformers in the language of Jinja. They get the same names, filters and settings here, in
a sandbox: a template comes with a checkpoint and is not trusted.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from varlen.errors import CheckpointError, RequestError, shorten

MAX_MESSAGES = 1024


class ChatTemplate:
    """The chat template of a checkpoint. Thread-safe."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, max_characters: int
    ) -> None:
        """Compile a template.

        Args:
            source: Jinja source of the template.
            special_tokens: texts of special tokens by name, such as `bos_token`.
            max_characters: longest text of a prompt.

        Raises:
            CheckpointError: it is not valid.
        """
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise CheckpointError(f"the chat template cannot be read: {error}") from None
        self._special_tokens = dict(special_tokens)
        self._max_characters = max_characters

    def render(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a prompt, special tokens included, up to where the answer begins.

        Args:
            messages: objects of JSON with a role and what else the template reads, mostly a content.
            add_generation_prompt: whether the template begins the answer.

        Raises:
            RequestError: the messages are not valid, or too long, or the template refuses them.
        """
        _check(messages)
        parts: list[str] = []
        length = 0
        try:
            for part in self._template.generate(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            ):
                parts.append(part)
                length += len(part)
                if length > self._max_characters:
                    break
        # a template may fail in any way on messages that it does not expect
        except Exception as error:
            reason = shorten(str(error)) or type(error).__name__
            raise RequestError(
                f"the chat template of this model refuses the messages: {reason}"
            ) from None
        if length > self._max_characters:
            raise RequestError(
                f"the messages have more than {self._max_characters} characters with the chat template;"
                " send fewer or shorter ones"
            )
        return "".join(parts)


class _Generation(Extension):
    """The block `generation`, which marks answers for training and has no effect here."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - the type in the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the names, filters and settings that templates expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _check(messages: Sequence[Mapping[str, object]]) -> None:
    if not isinstance(messages, (list, tuple)) or not 1 <= len(messages) <= MAX_MESSAGES:
        came = f"{len(messages)} messages" if isinstance(messages, (list, tuple)) else "no list"
        raise RequestError(f"messages has {came}; allowed: a list of 1 to {MAX_MESSAGES}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"message {index} is {shorten(repr(message))}; send an object with role and content"
            )


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as it is: the filter of Jinja escapes it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
