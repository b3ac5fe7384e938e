"""The engine's side of a grammar: messages of its process, and the positions of answers."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing.connection import wait
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen.errors import RequestError, VarlenError
from varlen.sandbox.frames import ADVANCE, COMPILED, FORGET, HEAD, MASK, MEMORY
from varlen.sandbox.process import SandboxProcess

if TYPE_CHECKING:
    from _typeshed import HasFileno

_log = logging.getLogger(__name__)


class Background:
    """Runs calls one after another in a thread, which lives while there are any. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = Lock()
        self._calls: deque[Callable[[], object]] = deque()
        self._is_running = False

    def run(self, call: Callable[[], object]) -> None:
        """Run a call later, after those that came before."""
        with self._lock:
            self._calls.append(call)
            if self._is_running:
                return
            self._is_running = True
        try:
            Thread(target=self._loop, name=self._name, daemon=True).start()
        except RuntimeError:
            _log.exception("no thread can be started; the next call tries again")
            self._is_running = False

    def _loop(self) -> None:
        while (call := self._next()) is not None:
            try:
                call()
            except Exception:
                _log.exception("a call in the background failed")

    def _next(self) -> Callable[[], object] | None:
        with self._lock:
            if self._calls:
                return self._calls.popleft()
            self._is_running = False
            return None


# Characters of the library's explanation that an error repeats.
_MAX_REASON = 300
_TOO_MUCH = "structured_outputs cannot be served: the grammar takes"


class CompiledGrammar:
    """A grammar with its process, once that has started. Thread-safe, and never blocks.

    Attributes:
        is_compiled: whether it has answers; False until the process says so.
        has_ended: whether its process has ended; `error` may follow.
        error: reason why it is not served any more.
        num_bytes: memory of the process, as it last said.
    """

    def __init__(self, content: str, background: Background, changed: Callable[[], None]) -> None:
        """Make a grammar whose process starts later.

        Args:
            content: value of `GenerationOptions.grammar`.
            changed: called when it has compiled, failed, or has other memory.
        """
        self._process: SandboxProcess | None = None
        # orders from before the process starts
        self._unsent = [content.encode()]
        self._background = background
        self._changed = changed
        self._started = Event()
        self._lock = Lock()
        self._number = COMPILED
        # requests that need it, and answers in progress
        self._holders = 0
        self._answers: set[int] = set()
        # by answer; only what has not been read
        self._masks: dict[int, bytes] = {}
        self._errors: dict[int, VarlenError] = {}
        # answers to release: garbage is collected in any thread, perhaps one that holds the lock
        self._forgotten: deque[int] = deque()
        self.is_compiled = False
        self.has_ended = False
        self.error: VarlenError | None = None
        self.num_bytes = 0

    @property
    def is_compiling(self) -> bool:
        return not self.is_compiled and self.error is None

    def start(self, process: SandboxProcess) -> None:
        with self._lock:
            self._process = process
            has_ended = self.has_ended
            for order in () if has_ended else self._unsent:
                process.send(order)
            self._unsent.clear()
        if has_ended:
            process.end()
        self._started.set()

    def await_start(self, seconds: float) -> bool:
        """Wait until the process has started, or the time is over; return whether it has."""
        return self._started.wait(seconds)

    def fileno(self) -> int:
        """Return the descriptor, which becomes readable when the process answers; -1 without a process."""
        return -1 if self._process is None or self.has_ended else self._process.fileno()

    def hold(self) -> None:
        with self._lock:
            self._holders += 1

    def let_go(self) -> None:
        with self._lock:
            self._holders -= 1

    def new_sequence(self) -> int:
        with self._lock:
            self._release_forgotten()
            self._number += 1
            self._answers.add(self._number)
            return self._number

    def advance(self, number: int, tokens: Sequence[int]) -> None:
        """Ask for the mask after more tokens of an answer."""
        with self._lock:
            self._send(HEAD.pack(ADVANCE, number) + np.array(tokens, np.int32).tobytes())

    def forget(self, number: int) -> None:
        """Release an answer, at the latest when the next one begins."""
        self._forgotten.append(number)

    def users(self) -> int:
        with self._lock:
            self._release_forgotten()
            return self._holders + len(self._answers)

    def take_mask(self, number: int) -> bytes | None:
        """Return the mask that an answer asked for; None if it has not come.

        Raises:
            VarlenError: the grammar, or this answer, failed.
        """
        self.receive()
        with self._lock:
            if error := self._errors.get(number) or self.error:
                raise error
            return self._masks.pop(number, None)

    def receive(self) -> None:
        if self.read():
            self._changed()

    def read(self) -> bool:
        """Read the answers of the process; return whether `changed` should be called."""
        with self._lock:
            if self._process is None or self.has_ended:
                return False
            try:
                messages = self._process.receive()
            except EOFError:
                self.has_ended = True
                self._background.run(partial(self._explain, self._process))
                return False
            return sum(self._read(message) for message in messages) > 0

    def end(self, error: VarlenError) -> None:
        with self._lock:
            self._end(error)

    def _end(self, error: VarlenError) -> None:
        if self.error is None:
            self.error = error
            self.num_bytes = 0
        if self._process is not None and not self.has_ended:
            self._background.run(self._process.end)
        self.has_ended = True

    def _explain(self, process: SandboxProcess) -> None:
        self.end(process.failure(_TOO_MUCH))
        self._changed()

    def _send(self, order: bytes) -> None:
        if self.has_ended:
            return
        if self._process is None:
            self._unsent.append(order)
        else:
            self._process.send(order)

    def _release_forgotten(self) -> None:
        while self._forgotten:
            number = self._forgotten.popleft()
            self._answers.discard(number)
            self._masks.pop(number, None)
            self._errors.pop(number, None)
            self._send(HEAD.pack(FORGET, number))

    def _read(self, message: bytes) -> bool:
        """Read an answer; return whether memory or state of the grammar changed."""
        kind, number = HEAD.unpack_from(message)
        content = message[HEAD.size :]
        if kind == MEMORY:
            self.num_bytes = int.from_bytes(content, "little")
            self.is_compiled = True
        elif number == COMPILED:
            self._end(refusal(content.decode()))
        elif number not in self._answers:
            # it was released while this was on its way
            return False
        elif kind == MASK:
            self._masks[number] = content
            return False
        else:
            self._errors[number] = refusal(content.decode())
            return False
        return True


def await_processes(sources: Iterable[HasFileno], seconds: float) -> None:
    """Wait until the process of any grammar answers, or the time is over."""
    try:
        # answers may share a process; one that was ended has no descriptor, and reading it says so
        wait({each.fileno() for each in sources} - {-1}, seconds)
    except (OSError, ValueError):
        # ended meanwhile
        return


def refusal(reason: str) -> RequestError:
    """Return the error of a grammar that is not served."""
    reason = " ".join(reason.split())[:_MAX_REASON]
    return RequestError(f"structured_outputs cannot be served: {reason}")


BoolArray: TypeAlias = npt.NDArray[np.bool_]
# Returns a grammar and the number of a new answer, or raises VarlenError.
OpenGrammar: TypeAlias = Callable[[], tuple[CompiledGrammar, int]]


class Matcher:
    """Position of one answer in its grammar. Not for two threads at once."""

    def __init__(self, open_grammar: OpenGrammar, vocab_size: int) -> None:
        """Start before the first token of the answer.

        Args:
            open_grammar: opens the grammar, which compiles again if its process has ended.
        """
        self._open = open_grammar
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
            self._grammar, self._number = self._open()
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
