"""Chat messages, or pairs of texts, to prompts, with the checkpoint's own template.

A process of the sandbox renders it (`varlen.sandbox.template`), since a template may ask for any time and memory.

A known form has the texts around a pair, or the chat template has them. With the template a pair is, as in
sentence-transformers, two messages with the roles query and document, behind an instruction with the role system. A
pair that is cut keeps the end of the prompt, which the score is read from.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from threading import Lock
from types import MappingProxyType
from typing import Protocol

import numpy as np

from varlen.errors import CheckpointError, EngineError, RequestError, shorten
from varlen.intake.tokenization import Tokenized
from varlen.models.checkpoint.ranking import LogitScore, PairForm
from varlen.models.checkpoint.tokenizer_files import DEFAULT_TEMPLATE
from varlen.request.request import Int32Array
from varlen.sandbox.frames import INVALID, REFUSED, TEXT, UNREAD
from varlen.sandbox.process import Sandbox, SandboxProcess

MAX_MESSAGES = 1024

# Processes that stay between two prompts: about as many as threads that tokenize.
_MAX_IDLE = 2
# Name of the template among its variables, where transformers has it too.
_NAME = "chat_template"
# Whether variables that the template does not read are ignored, as in vLLM.
_IGNORE = "ignore_unread"
# A short conversation that every template should know.
_EXAMPLE = [{"role": "user", "content": "Hello!"}]


class ChatTemplate:
    """The chat template of a checkpoint, or several with names. Thread-safe."""

    def __init__(self, sandbox: Sandbox, names: Sequence[str], *, max_characters: int) -> None:
        """Prepare a template.

        Args:
            sandbox: starts the processes that render it; its `template` is from `template_setup`.
        """
        self._sandbox = sandbox
        self._names = sorted(names)
        self._max_characters = max_characters
        self._lock = Lock()
        self._idle: list[SandboxProcess] = []

    def check(self) -> None:
        """Render a short conversation.

        A template may refuse it: some need messages of another form.

        Raises:
            CheckpointError: the template is not valid, or takes too much time or memory.
        """
        for name in self._names:
            try:
                answer = self._answer(_order(_EXAMPLE, name, add_generation_prompt=True))
            except RequestError as error:
                raise CheckpointError(f"{error}, for one message of one word") from None
            if answer[0] == INVALID:
                reason = shorten(answer[1:].decode(errors="replace"))
                raise CheckpointError(f"the chat template cannot be read: {reason}")

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        variables: Mapping[str, object] = MappingProxyType({}),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text of a prompt, special tokens included, up to where the answer begins.

        Args:
            messages: objects of JSON with a role and what else the template reads, mostly a content.
            variables: values of other variables of the template, as JSON has them; also of `add_generation_prompt`.
                `chat_template` is the name of the template, `ignore_unread` whether others may be unread.
            add_generation_prompt: whether the template begins the answer, where no variable says it.

        Raises:
            RequestError: the messages are not valid, or too long, or the template refuses them, or takes too much time
                or memory; or it does not read one of the variables.
        """
        _check(messages)
        variables = dict(variables)
        name = self._name(variables.pop(_NAME, None))
        ignore = variables.pop(_IGNORE, False) is True
        answer = self._answer(
            _order(messages, name, variables, ignore, add_generation_prompt=add_generation_prompt)
        )
        kind, text = answer[0], answer[1:].decode(errors="surrogatepass")
        if kind == TEXT:
            return text
        if kind == UNREAD:
            name, read = json.loads(text)
            names = shorten(", ".join(read)) or "none"
            raise RequestError(
                f"chat_template_kwargs has {shorten(repr(name))}; the chat template of this model reads: {names}"
            )
        if kind in (REFUSED, INVALID):
            raise RequestError(
                f"the chat template of this model refuses the messages: {shorten(text)}"
            )
        raise RequestError(
            f"the messages have more than {self._max_characters} characters with the chat template;"
            " send fewer or shorter ones"
        )

    def _name(self, given: object) -> str:
        """Return the name of the template that a request asks for; None is the default."""
        name = DEFAULT_TEMPLATE if given is None else given
        if isinstance(name, str) and name in self._names:
            return name
        names = shorten(", ".join(self._names))
        if given is None:
            raise RequestError(
                f"the checkpoint has several chat templates, and none is the default; send {_NAME} with one of their"
                f" names: {names}"
            )
        raise RequestError(
            f"{_NAME} is {shorten(repr(name))}; allowed: names of the checkpoint's own templates: {names}"
        )

    def _answer(self, order: bytes) -> bytes:
        """Return the answer of a process.

        Raises:
            RequestError: it took too much time or memory.
        """
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is not None:
            try:
                return self._answer_of(process, order)
            except EngineError:
                # it may have been killed since its last prompt
                pass
        return self._answer_of(self._sandbox.fork("template"), order)

    def _answer_of(self, process: SandboxProcess, order: bytes) -> bytes:
        try:
            process.send(order)
            while not (answers := process.receive()):
                process.wait()
        except EOFError:
            raise process.failure("the chat template of this model takes") from None
        except BaseException:
            process.end()
            raise
        with self._lock:
            is_kept = len(self._idle) < _MAX_IDLE
            if is_kept:
                self._idle.append(process)
        if not is_kept:
            process.end()
        return answers[0]


def template_setup(
    sources: Mapping[str, str], special_tokens: Mapping[str, str], *, max_characters: int
) -> Mapping[str, object]:
    """Return the arguments of `TemplateServer`.

    Args:
        special_tokens: texts of special tokens by name, such as `bos_token`.
    """
    return {
        "sources": dict(sources),
        "special_tokens": dict(special_tokens),
        "max_characters": max_characters,
    }


def _order(
    messages: Sequence[Mapping[str, object]],
    name: str,
    variables: Mapping[str, object] = MappingProxyType({}),
    ignore_unread: bool = False,
    *,
    add_generation_prompt: bool,
) -> bytes:
    order = {
        "ignore_unread": ignore_unread,
        "template": name,
        "messages": messages,
        "variables": dict(variables),
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        return json.dumps(order).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"messages are no JSON: {shorten(str(error))}") from None


def _check(messages: Sequence[Mapping[str, object]]) -> None:
    if not isinstance(messages, (list, tuple)) or not 1 <= len(messages) <= MAX_MESSAGES:
        came = f"{len(messages)} messages" if isinstance(messages, (list, tuple)) else "no list"
        raise RequestError(f"messages has {came}; allowed: a list of 1 to {MAX_MESSAGES}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"message {index} is {shorten(repr(message))}; send an object with role and content"
            )


# Stand for texts; no tokenizer gives their last tokens the same ids.
_FILLERS = ("0", "1 2 3 4")
# Parts of a form that are tokenized once: forms have few, and instructions of clients are not kept.
_MAX_FIXED = 16

Tokenize = Callable[[str], Tokenized]


class Renderer(Protocol):
    """Makes the text of a prompt out of chat messages."""

    def render(
        self, messages: list[Mapping[str, object]], /, *, add_generation_prompt: bool
    ) -> str:
        """Return the text, special tokens included, or raise RequestError."""


class ChatPairTemplate:
    """Makes the prompts of pairs with a chat template. Thread-safe.

    Attributes:
        ending: `[tokens]` int32, the last tokens of every prompt.
    """

    def __init__(self, template: Renderer, score: LogitScore, tokenize: Tokenize) -> None:
        """Check the template.

        Args:
            score: format of the messages for a pair.
            tokenize: returns the tokens of a text, without special ones.

        Raises:
            CheckpointError: the template leaves out the query or the document.
        """
        self._template, self._score, self._tokenize = template, score, tokenize
        try:
            first, second = (self._pair(filler, filler, None).token_ids for filler in _FILLERS)
            text = self._render("a-query", "a-document", "an-instruction")
        except RequestError as error:
            raise CheckpointError(str(error)) from None
        if "a-query" not in text or "a-document" not in text:
            raise CheckpointError(
                "the chat template leaves out messages of the role query or document; the task rerank of a model that"
                " answers in words needs both"
            )
        self.takes_instruction = "an-instruction" in text
        self.ending = _common_ending(first, second)

    def tokens(
        self, query: str, document: str, instruction: str | None, _max_tokens: int | None, /
    ) -> Tokenized:
        return self._pair(query, document, instruction)

    def _pair(self, query: str, document: str, instruction: str | None) -> Tokenized:
        return self._tokenize(self._render(query, document, instruction))

    def _render(self, query: str, document: str, instruction: str | None) -> str:
        messages = [("query", query), ("document", document)]
        system = self._score.system if instruction is None else instruction
        if system:
            messages.insert(0, ("system", system))
        return self._template.render(
            [{"role": role, "content": self._content(text)} for role, text in messages],
            add_generation_prompt=False,
        )

    def _content(self, text: str) -> object:
        return [{"type": "text", "text": text}] if self._score.has_parts else text


class FormPairTemplate:
    """Makes the prompts of pairs in a known form. Thread-safe.

    Attributes:
        ending: `[tokens]` int32, the last tokens of every prompt.
        takes_instruction: whether a request may have an instruction.
    """

    def __init__(self, form: PairForm, tokenize: Tokenize) -> None:
        self._form, self._tokenize = form, tokenize
        self.takes_instruction = bool(form.instruction)
        self._fixed = lru_cache(_MAX_FIXED)(lambda text: tokenize(text).token_ids)
        self.ending = np.concatenate([self._fixed(text) for text in form.ending])

    def tokens(
        self, query: str, document: str, instruction: str | None, max_tokens: int | None, /
    ) -> Tokenized:
        form = self._form
        instruction = form.default_instruction if instruction is None else instruction
        before = form.instruction.format(instruction) if instruction else ""
        opening = self._fixed(form.opening)
        asked = self._tokenize(before + form.query.format(query)).token_ids
        if max_tokens is not None:
            room = max_tokens - len(opening) - len(self.ending)
            asked = asked[: max(0, int(room * form.query_part))]
        between = [self._fixed(form.between)] if form.between else []
        found = self._tokenize(form.document.format(document))
        parts = [opening, asked, *between, found.token_ids, self.ending]
        return Tokenized(np.concatenate(parts), None, found.is_complete)


def _common_ending(first: Int32Array, second: Int32Array) -> Int32Array:
    size = min(len(first), len(second))
    same = first[len(first) - size :] == second[len(second) - size :]
    count = size - (int(np.flatnonzero(~same)[-1]) + 1 if not same.all() else 0)
    return first[len(first) - count :]
