"""Structured output: answers that match a JSON schema, a regular expression or a grammar.

Each grammar has a process of its own (`varlen.sandbox.grammar`), which compiles it and computes the masks of its
answers while the model runs. Limits of time and memory end that process, and fail the requests of its grammar only.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from multiprocessing.connection import wait
from threading import Lock
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from varlen.decoding.compiled_grammar import CompiledGrammar, refusal
from varlen.errors import QueueFullError, RequestError, VarlenError
from varlen.sandbox.process import Sandbox

BoolArray: TypeAlias = npt.NDArray[np.bool_]

# Grammars without an answer in progress that keep their process.
_MAX_IDLE = 16
# Refused grammars whose reason is kept: clients often send the same one again.
_MAX_REFUSED = 1024
# Longest wait for the answer of a process, which another thread may have read meanwhile.
_POLL_SECONDS = 0.02


class GrammarUse(NamedTuple):
    """Memory and number of the compiled grammars, and totals.

    Attributes:
        held_bytes: private memory of their processes.
        grammars: number of processes.
        started: number of processes that were started.
        evictions: number of processes that were ended to free memory.
    """

    held_bytes: int
    grammars: int
    started: int
    evictions: int


class Matcher:
    """Position of one answer in its grammar. Not for two threads at once."""

    def __init__(self, grammars: "Grammars", grammar: str, vocab_size: int) -> None:
        self._grammars = grammars
        self._content = grammar
        self._vocab_size = vocab_size
        self._grammar: CompiledGrammar | None = None
        self._number = 0
        # tokens that the process has got, and the last of them
        self._num_sent = 0
        self._last = 0
        self._mask: BoolArray | None = None

    def advance(self, token_ids: Sequence[int], begin: int) -> None:
        """Start to compute the mask after the tokens of the answer, unless that is done.

        Args:
            token_ids: tokens of the prompt and of the answer.
            begin: place of the first token of the answer.

        Raises:
            VarlenError: the grammar cannot be compiled again.
        """
        num_sent = begin + self._num_sent
        # a step that chose another token may have been repeated
        is_ahead = num_sent > len(token_ids) or (
            self._num_sent > 0 and token_ids[num_sent - 1] != self._last
        )
        if self._grammar is None or is_ahead:
            self._release()
            self._grammar = self._grammars.open(self._content)
            self._number = self._grammar.new_sequence()
            self._send(token_ids[begin:])
        elif num_sent < len(token_ids):
            self._send(token_ids[num_sent:])

    def expect(self, token_id: int) -> None:
        """Start to compute the mask after one more token, which was chosen now."""
        self._send([token_id])

    def allowed_tokens(self) -> BoolArray | None:
        """Return the tokens that may come next, `[vocabulary]`; None if they are not known yet.

        End tokens are among them where the answer may end.

        Raises:
            VarlenError: the grammar takes too much time or memory, or became too complex.
        """
        if self._mask is None and self._grammar is not None:
            mask = self._grammar.take_mask(self._number)
            if mask is not None:
                bits = np.frombuffer(mask, np.uint8)
                self._mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(
                    np.bool_
                )
        return self._mask

    def fileno(self) -> int:
        """Return the descriptor, which becomes readable when the mask comes."""
        assert self._grammar is not None
        return self._grammar.fileno()

    def __del__(self) -> None:
        self._release()

    def _send(self, token_ids: Sequence[int]) -> None:
        assert self._grammar is not None
        self._grammar.advance(self._number, token_ids)
        self._mask = None
        if token_ids:
            self._num_sent += len(token_ids)
            self._last = token_ids[-1]

    def _release(self) -> None:
        if self._grammar is not None:
            self._grammar.forget(self._number)
        self._grammar = None
        self._num_sent = 0


class Grammars:
    """The compiled grammars of one model. Thread-safe."""

    def __init__(self, sandbox: Sandbox, vocab_size: int, *, max_bytes: int) -> None:
        """Start without a grammar.

        Args:
            sandbox: starts the processes; its `tokens` are from `grammar_tokens`.
            vocab_size: width of the logits.
            max_bytes: largest memory of all processes.
        """
        self._sandbox = sandbox
        self._vocab_size = vocab_size
        self._max_bytes = max_bytes
        self._lock = Lock()
        # the grammar that was used last comes last
        self._grammars: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._refused: OrderedDict[bytes, VarlenError] = OrderedDict()
        self._started = self._evictions = 0

    def is_compiled(self, grammar: str) -> bool:
        """Return whether a grammar is compiled."""
        with self._lock:
            found = self._grammars.get(_key(grammar))
        return found is not None and found.error is None and found.is_compiled

    def check(self, grammar: str) -> None:
        """Compile a grammar, and keep it for the sequences of its request.

        Args:
            grammar: value of `GenerationOptions.grammar`.

        Raises:
            RequestError: it is not valid, or takes too much time or memory; the message has the reason.
            QueueFullError: other grammars that are in use take the memory.
        """
        while not self.compile(grammar, wait_seconds=_POLL_SECONDS):
            pass

    def compile(self, grammar: str, *, wait_seconds: float) -> bool:
        """Start to compile a grammar, unless it is compiled; return whether it is.

        Args:
            grammar: value of `GenerationOptions.grammar`.
            wait_seconds: longest time to wait for the process.

        Raises:
            RequestError, QueueFullError: see `check`.
        """
        found = self.open(grammar)
        if not found.is_compiled:
            _wait([found], wait_seconds)
            found.receive()
        if found.error is not None:
            self._forget(grammar, found)
            raise found.error
        return found.is_compiled

    def matcher(self, grammar: str) -> Matcher:
        """Return the start of an answer to a grammar that was checked."""
        return Matcher(self, grammar, self._vocab_size)

    def open(self, grammar: str) -> CompiledGrammar:
        """Return a grammar with its process, which may still compile.

        Raises:
            RequestError: it was refused before, or the model has no grammars.
        """
        key = _key(grammar)
        with self._lock:
            found = self._grammars.get(key)
            if found is not None and found.error is None:
                self._grammars.move_to_end(key)
                return found
            if key in self._refused:
                raise self._refused[key]
            if reason := self._sandbox.refusal("grammar"):
                raise refusal(reason)
            self._started += 1
            found = CompiledGrammar(self._sandbox.fork("grammar"), grammar, self._trim)
            self._grammars[key] = found
            return found

    def use(self) -> GrammarUse:
        """Return memory and number of the compiled grammars, and totals."""
        with self._lock:
            held = [each for each in self._grammars.values() if each.error is None]
            counts = self._started, self._evictions
        for each in held:
            # releases answers that have ended
            each.users()
            each.receive()
        return GrammarUse(sum(each.num_bytes for each in held), len(held), *counts)

    def _forget(self, grammar: str, failed: CompiledGrammar) -> None:
        """Forget a grammar that has failed; remember why, if it always would."""
        key = _key(grammar)
        with self._lock:
            if self._grammars.get(key) is failed:
                del self._grammars[key]
            if isinstance(failed.error, RequestError):
                self._refused[key] = failed.error
                while len(self._refused) > _MAX_REFUSED:
                    self._refused.popitem(last=False)

    def _trim(self) -> None:
        """End processes while too many are unused, or all together have too much memory."""
        with self._lock:
            for key in [key for key, each in self._grammars.items() if each.error is not None]:
                del self._grammars[key]
            while (surplus := self._surplus()) is not None:
                self._evictions += 1
                self._grammars.pop(surplus).end(
                    QueueFullError(
                        f"the grammars of requests in progress take more than {self._max_bytes} bytes of memory;"
                        " try again later"
                    )
                )

    def _surplus(self) -> bytes | None:
        """Return the grammar to end, if any.

        It is the one that was used longest ago, or the largest if all are in use.
        """
        held = self._grammars
        idle = [key for key, each in held.items() if each.is_compiled and not each.users()]
        if len(idle) > _MAX_IDLE:
            return idle[0]
        if sum(each.num_bytes for each in held.values()) <= self._max_bytes:
            return None
        return idle[0] if idle else max(held, key=lambda key: held[key].num_bytes)


def wait_for_masks(matchers: Sequence[Matcher], seconds: float) -> None:
    """Wait until the process of any answer says something, or the time is over."""
    _wait(matchers, seconds)


def grammar_tokens(
    tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]
) -> Mapping[str, object] | None:
    """Return the arguments of `GrammarServer`; None without an end token.

    Args:
        tokenizer: tokenizer of the checkpoint.
        vocab_size: width of the logits.
        eos_ids: end tokens of the checkpoint; an answer ends with one of them.
    """
    ends = sorted(token_id for token_id in eos_ids if token_id < vocab_size)
    if not ends:
        return None
    num_tokens = max(vocab_size, tokenizer.get_vocab_size())
    return {"tokenizer": tokenizer.to_str(), "num_tokens": num_tokens, "ends": ends}


def _wait(sources: Sequence[CompiledGrammar] | Sequence[Matcher], seconds: float) -> None:
    try:
        # sequences may share a process; one that was ended has no descriptor, and reading it says so
        wait({each.fileno() for each in sources} - {-1}, seconds)
    except (OSError, ValueError):
        # ended meanwhile
        return


def _key(grammar: str) -> bytes:
    return sha256(grammar.encode(errors="surrogatepass")).digest()
