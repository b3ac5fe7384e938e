"""Position of an answer in its grammar: the tokens that may come next."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from varlen.decoding.grammar.compiled_grammar import CompiledGrammar, await_processes

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


def wait_for_masks(matchers: Sequence[Matcher], seconds: float) -> None:
    """Wait until the process of any answer says something, or the time is over."""
    await_processes(matchers, seconds)
