"""Structured output: answers that match a JSON schema, a regular expression or a grammar.

The llguidance library knows which tokens may come next; all others are masked in the logits.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Collection, Iterator
from threading import Lock
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from varlen.errors import RequestError

BoolArray: TypeAlias = npt.NDArray[np.bool_]

# Compiled grammars that are kept: clients often send the same one.
_MAX_CACHED = 64
# Characters of the library's explanation that an error repeats.
_MAX_REASON = 300
# A step of one sequence must not delay the others: about 5 ms by the library's own figures.
_LIMITS = LLParserLimits(
    step_lexer_fuel=50_000,
    step_max_items=50_000,
    max_items_in_row=10_000,
    max_lexer_states=10_000,
    verbose_errors=False,
)
# Largest regular expression, in characters once its counted repetitions are written in full. The library's limits do
# not hold for those: a step of (a{1000}){1000} takes seconds.
_MAX_EXPANDED = 10_000

# Parts of a regular expression: groups, counted repetitions, and characters or sets of them.
_SYMBOL = re.compile(
    r"(?P<open>\()|(?P<close>\))|(?P<count>\{[0-9]{1,9}(?:,[0-9]{0,9})?\})|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.",
    re.DOTALL,
)


class Matcher:
    """Position of one answer in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, mask_words: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._mask = np.empty(mask_words, dtype=np.int32)

    @property
    def has_failed(self) -> bool:
        """Whether the grammar became too complex, or a token did not match it."""
        return bool(self._matcher.is_error())

    def read(self, token_id: int) -> None:
        """Move on by a token of the answer."""
        self._matcher.consume_token(token_id)

    def allowed_tokens(self) -> BoolArray:
        """Return whether each token may come next, `[vocabulary]`; end tokens too."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        bits = np.unpackbits(self._mask.view(np.uint8), count=self._vocab_size, bitorder="little")
        return bits.view(np.bool_)


class Grammars:
    """Compiles the grammars of requests to one model. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]) -> None:
        """Prepare the tokens.

        Args:
            tokenizer: tokenizer of the checkpoint.
            vocab_size: width of the logits.
            eos_ids: end tokens of the checkpoint; an answer ends with one of them.
        """
        self._vocab_size = vocab_size
        self._num_tokens = max(vocab_size, tokenizer.get_vocab_size())
        self._tokens: LLTokenizer | None = None
        # why no grammar is accepted
        self._reason = "this model has no end token"
        ends = sorted(token_id for token_id in eos_ids if token_id < vocab_size)
        if ends:
            try:
                self._tokens = LLTokenizer(
                    tokenizer.to_str(), n_vocab=self._num_tokens, eos_token=ends
                )
            except ValueError:
                self._reason = "the tokens of this model are no parts of texts"
        self._lock = Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def check(self, grammar: str) -> None:
        """Compile a grammar, and keep it for the sequences of its request.

        Args:
            grammar: value of `GenerationOptions.grammar`.

        Raises:
            RequestError: it is not valid, or too large; the message has the reason.
        """
        self._compile(grammar)

    def matcher(self, grammar: str) -> Matcher:
        """Return the start of an answer to a grammar that was checked."""
        words = (self._num_tokens + 31) // 32
        return Matcher(self._compile(grammar).deep_copy(), self._vocab_size, words)

    def _compile(self, grammar: str) -> LLMatcher:
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
        if self._tokens is None:
            raise _refused(self._reason)
        try:
            text = _library_grammar(grammar)
            matcher = LLMatcher(self._tokens, text, log_level=0, limits=_LIMITS)
        except ValueError as error:
            raise _refused(str(error)) from None
        except RecursionError:
            raise _refused("the schema is nested too deeply") from None
        if matcher.is_error():
            raise _refused(matcher.get_error())
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > _MAX_CACHED:
                self._compiled.popitem(last=False)
        return matcher


def _refused(reason: str) -> RequestError:
    reason = " ".join(reason.split())[:_MAX_REASON]
    return RequestError(f"structured_outputs cannot be served: {reason}")


def _library_grammar(grammar: str) -> str:
    """Return a grammar of ours in the form of the library."""
    [(kind, content)] = json.loads(grammar).items()
    if kind == "choice":
        # one token of the library's lexer: a rule of its parser would have an alternative for each text
        texts = " | ".join(json.dumps(each) for each in dict.fromkeys(content))
        return f"start: CHOICE\nCHOICE: {texts}"
    patterns = [content] if kind == "regex" else list(_patterns(content))
    size = max(map(_expanded_size, patterns), default=0)
    if size > _MAX_EXPANDED:
        raise ValueError(
            f"a regular expression has {size} characters with its repetitions written in full; allowed: up to"
            f" {_MAX_EXPANDED}"
        )
    if kind == "regex":
        return LLMatcher.grammar_from_regex(content)
    return LLMatcher.grammar_from_json_schema(content)


def _patterns(schema: object) -> Iterator[str]:
    """Yield the regular expressions of a JSON schema."""
    if isinstance(schema, list):
        for each in schema:
            yield from _patterns(each)
    elif isinstance(schema, dict):
        if isinstance(pattern := schema.get("pattern"), str):
            yield pattern
        if isinstance(properties := schema.get("patternProperties"), dict):
            yield from properties
        for each in schema.values():
            yield from _patterns(each)


def _expanded_size(pattern: str) -> int:
    """Return about how long a regular expression is with its counted repetitions written in full."""
    # sizes of the open groups, and of the last item, which a count multiplies
    groups = [0]
    last = 0
    for symbol in _SYMBOL.finditer(pattern):
        if symbol["open"]:
            groups.append(0)
            last = 0
        elif symbol["close"]:
            last = groups.pop() if len(groups) > 1 else 0
            groups[-1] += last
        elif symbol["count"]:
            added = last * (max(map(int, re.findall(r"[0-9]+", symbol["count"]))) - 1)
            groups[-1] += max(added, 0)
            last += max(added, 0)
        else:
            last = 1
            groups[-1] += 1
    return sum(groups)
