"""The process that makes prompts of chat messages with the checkpoint's template.

Templates are written for transformers in the language of Jinja. They get the same names, filters and settings here, in
a sandbox of Jinja's: a template comes with a checkpoint and is not trusted.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from varlen.sandbox.frames import INVALID, REFUSED, TEXT, TOO_LONG, UNREAD, Frames
from varlen.sandbox.limits import SandboxLimits, start_timer, stop_timer

_MAX_REASON = 10_000


class TemplateServer:
    """Renders the templates of a checkpoint in a forked process."""

    def __init__(
        self, sources: Mapping[str, str], special_tokens: Mapping[str, str], max_characters: int
    ) -> None:
        """Prepare templates, which each process compiles itself: that may take any memory.

        Args:
            special_tokens: texts of special tokens by name, such as `bos_token`.
        """
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._max_characters = max_characters

    def serve(self, frames: Frames, limits: SandboxLimits) -> None:
        """Render the messages of each order until the engine closes the connection."""
        compiled: dict[str, tuple[Template, list[str]]] = {}
        while True:
            frame = frames.receive()
            start_timer(limits.seconds)
            try:
                order = json.loads(frame)
                name = order.pop("template")
                if name not in compiled:
                    compiled[name] = self._compile(self._sources[name])
                kind, text = self._answer(*compiled[name], order)
            except (TemplateError, SyntaxError, RecursionError) as error:
                # messages have a limit of depth, so only a template is nested that deeply
                kind, text = INVALID, str(error)[:_MAX_REASON]
            answer = bytes([kind]) + text.encode(errors="surrogatepass")
            stop_timer()
            frames.send(answer)

    def _compile(self, source: str) -> tuple[Template, list[str]]:
        """Return the template, and the names of the variables that requests may set."""
        environment = _environment()
        template = environment.from_string(source)
        fixed = {"messages", *self._special_tokens, *environment.globals}
        return template, sorted(meta.find_undeclared_variables(environment.parse(source)) - fixed)

    def _answer(
        self, template: Template, read: list[str], order: dict[str, Any]
    ) -> tuple[int, str]:
        given, ignore = order.pop("variables"), order.pop("ignore_unread")
        unread = [name for name in given if name not in read]
        if unread and not ignore:
            return UNREAD, json.dumps([unread[0], read])
        # a request may set no other names, such as the names of special tokens
        allowed = {name: value for name, value in given.items() if name in read}
        return self._render(template, {**order, **allowed})

    def _render(self, template: Template, variables: dict[str, object]) -> tuple[int, str]:
        parts: list[str] = []
        length = 0
        try:
            for part in template.generate(
                **{"tools": None, "documents": None, **self._special_tokens, **variables}
            ):
                parts.append(part)
                length += len(part)
                if length > self._max_characters:
                    return TOO_LONG, ""
            return TEXT, "".join(parts)
        except MemoryError:
            raise
        # a template may fail in any way on messages that it does not expect
        except Exception as error:
            return REFUSED, str(error)[:_MAX_REASON] or type(error).__name__


class _Generation(Extension):
    """The block `generation`, which marks answers for training and has no effect here."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - the type in the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


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
