"""The engine's side of a grammar: the messages to and from its process."""

from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock

import numpy as np

from varlen.errors import RequestError, VarlenError
from varlen.sandbox.process import SandboxProcess
from varlen.sandbox.protocol import ADVANCE, COMPILED, FORGET, HEAD, MASK, MEMORY

# Characters of the library's explanation that an error repeats.
_MAX_REASON = 300
_TOO_MUCH = "structured_outputs cannot be served: the grammar takes"


class CompiledGrammar:
    """A grammar with its process. Thread-safe.

    Attributes:
        is_compiled: whether it has answers; False until the process says so.
        error: reason why it is not served any more.
        num_bytes: memory of the process, as it last said.
    """

    def __init__(self, process: SandboxProcess, content: str, changed: Callable[[], None]) -> None:
        self._process = process
        self._changed = changed
        self._lock = Lock()
        self._number = COMPILED
        # by sequence; only what has not been read
        self._masks: dict[int, bytes] = {}
        self._errors: dict[int, VarlenError] = {}
        self._users = 0
        # answers to release: garbage is collected in any thread, perhaps one that holds the lock
        self._forgotten: deque[int] = deque()
        self.is_compiled = False
        self.error: VarlenError | None = None
        self.num_bytes = 0
        process.send(content.encode())

    def fileno(self) -> int:
        """Return the descriptor, which becomes readable when the process answers."""
        return self._process.fileno()

    def new_sequence(self) -> int:
        """Return the number of a new answer."""
        with self._lock:
            self._release_forgotten()
            self._number += 1
            self._users += 1
            return self._number

    def advance(self, number: int, tokens: Sequence[int]) -> None:
        """Ask for the mask after more tokens of an answer."""
        with self._lock:
            if self.error is None:
                order = HEAD.pack(ADVANCE, number) + np.array(tokens, np.int32).tobytes()
                self._process.send(order)

    def forget(self, number: int) -> None:
        """Release an answer, at the latest when the next one begins."""
        self._forgotten.append(number)

    def users(self) -> int:
        """Return the number of answers that use the grammar."""
        with self._lock:
            self._release_forgotten()
            return self._users

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
        """Read what the process has answered."""
        has_grown = False
        with self._lock:
            if self.error is not None:
                return
            try:
                messages = self._process.receive()
            except EOFError:
                self.error = self._process.failure(_TOO_MUCH)
                self.num_bytes = 0
                return
            for message in messages:
                has_grown |= self._read(message)
        if has_grown:
            self._changed()

    def end(self, error: VarlenError) -> None:
        """End the process; its answers get an error."""
        with self._lock:
            if self.error is None:
                self.error = error
                self.num_bytes = 0
                self._process.end()

    def _release_forgotten(self) -> None:
        while self._forgotten:
            number = self._forgotten.popleft()
            self._users -= 1
            self._masks.pop(number, None)
            self._errors.pop(number, None)
            if self.error is None:
                self._process.send(HEAD.pack(FORGET, number))

    def _read(self, message: bytes) -> bool:
        """Read an answer; return whether it says how much memory the process has."""
        kind, number = HEAD.unpack_from(message)
        content = message[HEAD.size :]
        if kind == MEMORY:
            self.num_bytes = int.from_bytes(content, "little")
            self.is_compiled = True
        elif kind == MASK:
            self._masks[number] = content
        elif number == COMPILED:
            self.error = refusal(content.decode())
            self._process.end()
        else:
            self._errors[number] = refusal(content.decode())
        return bool(kind == MEMORY)


def refusal(reason: str) -> RequestError:
    """Return the error of a grammar that is not served."""
    reason = " ".join(reason.split())[:_MAX_REASON]
    return RequestError(f"structured_outputs cannot be served: {reason}")
