"""Chat messages to the text of a prompt, with the checkpoint's own template.

A process of the sandbox renders it (`varlen.sandbox.template`), since a template may ask for any time and memory.
"""

import json
from collections.abc import Mapping, Sequence
from threading import Lock
from types import MappingProxyType

from varlen.errors import CheckpointError, EngineError, RequestError, shorten
from varlen.models.checkpoint.tokenizer_files import DEFAULT_TEMPLATE
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
