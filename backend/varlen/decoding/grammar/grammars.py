"""Structured output: answers that match a JSON schema, a regular expression or a grammar.

Each grammar has a process of its own (`varlen.sandbox.grammar`), which compiles it and computes the masks of its
answers while the model runs. Limits of time and memory end that process, and fail the requests of its grammar only.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping
from functools import partial
from hashlib import sha256
from threading import Lock
from typing import NamedTuple

from tokenizers import Tokenizer

from varlen.decoding.grammar.compiled_grammar import (
    Background,
    CompiledGrammar,
    Matcher,
    await_processes,
    refusal,
)
from varlen.errors import EngineError, QueueFullError, RequestError, VarlenError
from varlen.sandbox.process import Sandbox


class GrammarHold:
    """Keeps the process of a grammar for one request. Not for two threads at once."""

    def __init__(self, grammars: "Grammars", grammar: str) -> None:
        self._grammars = grammars
        self._content = grammar
        self._grammar: CompiledGrammar | None = None

    @property
    def num_characters(self) -> int:
        return len(self._content)

    def take(self) -> bool:
        """Hold the grammar if it is compiled; return whether it is."""
        if self._grammar is None:
            self._grammar = self._grammars.held_if_compiled(self._content)
        return self._grammar is not None and self._grammar.is_compiled

    def compile(self, wait_seconds: float) -> bool:
        """Hold the grammar, and compile it; return whether it is compiled."""
        if self._grammar is None:
            self._grammar = self._grammars.held(self._content)
        found = self._grammar
        if found.is_compiling and found.await_start(wait_seconds):
            await_processes([found], wait_seconds)
            found.receive()
        if found.error is not None:
            raise found.error
        return found.is_compiled

    def release(self) -> None:
        """Let the grammar go.

        It ends if it is not compiled and no other request needs it.
        """
        found, self._grammar = self._grammar, None
        if found is not None:
            self._grammars.let_go(found)


_log = logging.getLogger(__name__)

# Grammars that compile at the same time. The processors' time is shared evenly between them, so a quick one does not
# wait for slow ones.
MAX_COMPILING = 8
# Grammars without a request in progress that keep their process.
_MAX_IDLE = 16
# Refused grammars whose reason is kept: clients often send the same one again.
_MAX_REFUSED = 1024
# Longest wait for the answer of a process, which another thread may have read meanwhile.
_POLL_SECONDS = 0.02
_UNLOADED = "the model is being unloaded"
_NOT_STARTED = "the process of a grammar could not be started; the server's log says why"


class GrammarUse(NamedTuple):
    """Memory and number of the compiled grammars, and totals.

    Attributes:
        held_bytes: private memory of their processes.
        evictions: number of compiled grammars whose processes were ended to free memory.
    """

    held_bytes: int
    grammars: int
    started: int
    evictions: int


class Grammars:
    """The compiled grammars of one model. Thread-safe.

    No call waits for a process that starts or ends: a thread in the background does.
    """

    def __init__(self, sandbox: Sandbox, vocab_size: int, *, max_bytes: int) -> None:
        """Start without a grammar.

        Args:
            sandbox: starts the processes; its `tokens` are from `grammar_tokens`.
            max_bytes: largest memory of all processes.
        """
        self._sandbox = sandbox
        self._vocab_size = vocab_size
        self._max_bytes = max_bytes
        self._background = Background("varlen-grammars")
        self._lock = Lock()
        # the grammar that was used last comes last
        self._grammars: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        # grammars that wait to compile, and grammars that may have a process and do
        self._waiting: deque[CompiledGrammar] = deque()
        self._compiling: list[CompiledGrammar] = []
        self._refused: OrderedDict[bytes, VarlenError] = OrderedDict()
        self._started = self._evictions = 0

    def check(self, grammar: str) -> None:
        """Compile a grammar, unless it is compiled.

        Args:
            grammar: value of `GenerationOptions.grammar`.

        Raises:
            RequestError: it is not valid, or takes too much time or memory; the message has the reason.
            QueueFullError: other grammars that are in use take the memory.
            EngineError: its process ended for another reason, or the model is being unloaded.
        """
        hold = self.hold(grammar)
        try:
            while not hold.compile(_POLL_SECONDS):
                pass
        finally:
            hold.release()

    def hold(self, grammar: str) -> GrammarHold:
        return GrammarHold(self, grammar)

    def matcher(self, grammar: str) -> Matcher:
        return Matcher(partial(self.open, grammar), self._vocab_size)

    def open(self, grammar: str) -> tuple[CompiledGrammar, int]:
        """Return a grammar, which may still compile, and the number of a new answer.

        Raises:
            RequestError: it was refused before.
            EngineError: the model is being unloaded.
        """
        self._receive(grammar)
        with self._lock:
            found = self._open(grammar)
            return found, found.new_sequence()

    def held(self, grammar: str) -> CompiledGrammar:
        """Return a grammar, which may still compile, for a request that holds it."""
        self._receive(grammar)
        with self._lock:
            found = self._open(grammar)
            found.hold()
            return found

    def held_if_compiled(self, grammar: str) -> CompiledGrammar | None:
        """Hold a grammar for a request and return it; None unless it is compiled."""
        self._receive(grammar)
        with self._lock:
            found = self._grammars.get(_key(grammar))
            if found is None or not found.is_compiled or found.has_ended:
                return None
            found.hold()
            return found

    def let_go(self, found: CompiledGrammar) -> None:
        found.let_go()
        self._update()

    def use(self) -> GrammarUse:
        self._update()
        with self._lock:
            held = [each for each in self._grammars.values() if each.error is None]
            counts = self._started, self._evictions
        return GrammarUse(sum(each.num_bytes for each in held), len(held), *counts)

    def _receive(self, grammar: str) -> None:
        with self._lock:
            found = self._grammars.get(_key(grammar))
        if found is not None:
            found.receive()

    def _open(self, grammar: str) -> CompiledGrammar:
        if self._sandbox.is_closed:
            raise EngineError(_UNLOADED)
        self._forget_failed()
        key = _key(grammar)
        if key in self._refused:
            raise self._refused[key].with_traceback(None)
        found = self._grammars.get(key)
        # one that was killed after it compiled compiles again
        if found is None or (found.is_compiled and found.has_ended):
            found = CompiledGrammar(grammar, self._background, self._update)
            self._grammars[key] = found
            self._waiting.append(found)
            self._start_waiting()
        self._grammars.move_to_end(key)
        return found

    def _update(self) -> None:
        """End processes that are unused or too many, and start others."""
        with self._lock:
            self._forget_failed()
            self._end_unused()
            while (surplus := self._surplus()) is not None:
                key, error = surplus
                self._evictions += 1
                self._grammars.pop(key).end(error)
            self._start_waiting()

    def _forget_failed(self) -> None:
        for key in [key for key, each in self._grammars.items() if each.error is not None]:
            failed = self._grammars.pop(key)
            if isinstance(failed.error, RequestError) and not failed.is_compiled:
                self._refused[key] = failed.error
        while len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)

    def _end_unused(self) -> None:
        """Read what no request reads, and end grammars that compile for no request any more."""
        for key, each in [*self._grammars.items()]:
            if each.users():
                continue
            each.read()
            if each.is_compiling and not each.has_ended:
                del self._grammars[key]
                each.end(_unused())

    def _surplus(self) -> tuple[bytes, VarlenError] | None:
        """Return the grammar to end, if any, and the error of its answers.

        It is the one that was used longest ago, or the largest if all are in use.
        """
        held = self._grammars
        idle = [key for key, each in held.items() if each.is_compiled and not each.users()]
        if len(idle) > _MAX_IDLE:
            return idle[0], _unused()
        if sum(each.num_bytes for each in held.values()) <= self._max_bytes:
            return None
        if idle:
            return idle[0], _unused()
        return max(held, key=lambda key: held[key].num_bytes), QueueFullError(
            f"the grammars of requests in progress take more than {self._max_bytes} bytes of memory; try again later"
        )

    def _start_waiting(self) -> None:
        """Start processes while fewer grammars compile than may."""
        self._compiling = [each for each in self._compiling if each.is_compiling]
        self._waiting = deque(each for each in self._waiting if each.is_compiling)
        while self._waiting and len(self._compiling) < MAX_COMPILING:
            found = self._waiting.popleft()
            self._compiling.append(found)
            self._background.run(partial(self._start, found))

    def _start(self, found: CompiledGrammar) -> None:
        if not found.is_compiling:
            return
        try:
            if reason := self._sandbox.refusal("grammar"):
                raise refusal(reason)
            process = self._sandbox.fork("grammar")
        except Exception as error:
            found.end(_start_error(error))
            self._update()
            return
        with self._lock:
            self._started += 1
        found.start(process)


def grammar_tokens(
    tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]
) -> Mapping[str, object] | None:
    """Return the arguments of `GrammarServer`; None without an end token.

    Args:
        eos_ids: end tokens of the checkpoint; an answer ends with one of them.
    """
    ends = sorted(token_id for token_id in eos_ids if token_id < vocab_size)
    if not ends:
        return None
    num_tokens = max(vocab_size, tokenizer.get_vocab_size())
    return {"tokenizer": tokenizer.to_str(), "num_tokens": num_tokens, "ends": ends}


def _unused() -> VarlenError:
    """Return the error of a grammar that has no request, so no client gets it."""
    return EngineError("no request needed the grammar")


def _start_error(error: Exception) -> VarlenError:
    if isinstance(error, VarlenError):
        return error.with_traceback(None)
    _log.error("the process of a grammar could not be started", exc_info=error)
    return EngineError(_NOT_STARTED)


def _key(grammar: str) -> bytes:
    return sha256(grammar.encode(errors="surrogatepass")).digest()
