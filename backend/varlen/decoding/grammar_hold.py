"""Hold of a request on its grammar, whose process lives until the request is answered."""

from typing import Protocol

from varlen.decoding.compiled_grammar import CompiledGrammar, await_processes


class HeldGrammars(Protocol):
    """Grammars that count the requests that hold them: a part of `Grammars`."""

    def held(self, grammar: str) -> CompiledGrammar:
        """Return a grammar, which may still compile, for a request that holds it."""

    def held_if_compiled(self, grammar: str) -> CompiledGrammar | None:
        """Hold a grammar for a request and return it; None unless it is compiled."""

    def let_go(self, found: CompiledGrammar) -> None:
        """End the hold of a request."""


class GrammarHold:
    """Keeps the process of a grammar for one request. Not for two threads at once."""

    def __init__(self, grammars: HeldGrammars, grammar: str) -> None:
        self._grammars = grammars
        self._content = grammar
        self._grammar: CompiledGrammar | None = None

    @property
    def num_characters(self) -> int:
        """Length of the grammar."""
        return len(self._content)

    def take(self) -> bool:
        """Hold the grammar if it is compiled; return whether it is."""
        if self._grammar is None:
            self._grammar = self._grammars.held_if_compiled(self._content)
        return self._grammar is not None and self._grammar.is_compiled

    def compile(self, *, wait_seconds: float) -> bool:
        """Hold the grammar, and compile it; return whether it is compiled.

        Args:
            wait_seconds: longest time to wait for the process.

        Raises:
            VarlenError: see `Grammars.check`.
        """
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
