"""Rules of tokenizer.json that would take very long for a short text, which are refused.

The tokenizers library matches patterns by backtracking (Oniguruma), in threads that cannot be ended. So the shape of a
pattern has to bound its steps: at most about the square of the text's length. No text is measured. The patterns of the
families that are served, and of the tokenizers that they come from, all have such a shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from varlen.errors import CheckpointError
from varlen.models.checkpoint.files import Json, show

_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_MOST_CHARACTERS = 10_000
_MOST_DEPTH = 20
# Repetitions before an item that may fail: each multiplies the steps by the length of the text.
_MOST_LOOPS = 1
# Ways to match what is before it otherwise, with such a repetition and without.
_MOST_WAYS = (10_000, 100)
# A longer repetition counts as one without an end.
_SHORT = 16
# Characters of a text for each one that it replaces, of all replacements together.
_MOST_GROWTH = 100
# Characters of a word that WordPiece splits, of a piece of Unigram, and of what is put before and after parts of words.
_MOST_WORD = 1000
_MOST_PIECE = 256
_MOST_AFFIX = 100

_QUANTIFIER = re.compile(r"[*+?]|\{(?P<low>\d*)(?P<comma>,?)(?P<high>\d*)\}")
# An escape of one character, or between two; not of an earlier group.
_ESCAPE = re.compile(
    r"\\(?:[pP]\{\^?[\w =]+\}|x\{[0-9A-Fa-f ]+\}|x[0-9A-Fa-f]{1,2}|u[0-9A-Fa-f]{4}|[^\w]|[wWsSdDhHtnrfvaebBAZzG])"
)
_CLASS_WITH_BRACKET = re.compile(r"\[\^?\]")
_LOOK = re.compile(r"\?(?:=|!|<=|<!)")
_ATOMIC = re.compile(r"\?>")
_GROUP = re.compile(r"\?(?:[imx]*(?:-[imx]+)?:|<[A-Za-z_]\w*>)")


def check_rules(tokenizer: Json) -> None:
    """Raise CheckpointError if a rule of tokenizer.json may take very long for a short text."""
    growth = 1
    for part in _PARTS:
        for rule in _objects(tokenizer.get(part)):
            pattern = rule.get("Regex")
            if isinstance(pattern, str):
                _check_pattern(pattern)
            content = rule.get("content")
            if rule.get("type") == "Replace" and isinstance(content, str):
                growth *= max(len(content), 1)
    if growth > _MOST_GROWTH:
        raise CheckpointError(
            f"the replacements of tokenizer.json make a text {growth} times as long; allowed: {_MOST_GROWTH} times"
        )
    model = tokenizer.get("model")
    if isinstance(model, dict):
        _check_model(model)


def _check_model(model: Json) -> None:
    longest = model.get("max_input_chars_per_word")
    if isinstance(longest, int) and longest > _MOST_WORD:
        raise CheckpointError(
            f"tokenizer.json has max_input_chars_per_word {longest}; allowed: at most {_MOST_WORD}"
        )
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = model.get(name)
        if isinstance(affix, str) and len(affix) > _MOST_AFFIX:
            raise CheckpointError(
                f"tokenizer.json has {name} {show(affix)}; allowed: at most {_MOST_AFFIX} characters"
            )
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, list):
        # of Unigram, which looks at all pieces that a text begins with
        pieces = (each[0] for each in vocabulary if isinstance(each, list) and each)
        size = max((len(piece) for piece in pieces if isinstance(piece, str)), default=0)
        if size > _MOST_PIECE:
            raise CheckpointError(
                f"tokenizer.json has a piece of {size} characters; allowed: at most {_MOST_PIECE}"
            )


def _objects(value: object) -> Iterator[Json]:
    """Yield the objects in a value, itself included."""
    if isinstance(value, dict):
        yield value
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _objects(each)


def _check_pattern(pattern: str) -> None:
    try:
        if len(pattern) > _MOST_CHARACTERS:
            raise _UnknownError(f"has more than {_MOST_CHARACTERS} characters")
        cost = _Parser(pattern).parse()
    except _UnknownError as error:
        raise CheckpointError(f"the pattern {show(pattern)} of tokenizer.json {error}") from None
    if cost.own_loops > _MOST_LOOPS or cost.own_ways > _MOST_WAYS[cost.own_loops]:
        raise CheckpointError(
            f"the pattern {show(pattern)} of tokenizer.json may take very long for a short text; allowed before a part"
            f" that may fail: one repetition, of what matches a text in one way, and {_MOST_WAYS[1]} ways otherwise"
        )


class _UnknownError(Exception):
    """A pattern has a part that is not known; ends a message about the pattern."""


@dataclass(frozen=True, slots=True)
class _Cost:
    """How often a part of a pattern may be tried at one character.

    Attributes:
        own_loops: repetitions, each as long as the text may be, that are tried before the part has failed or matched.
        loops: repetitions in it that are tried again if what follows fails.
        is_wild: whether a text of one length is matched in many ways, which are all tried then.
    """

    own_loops: int = 0
    own_ways: int = 1
    loops: int = 0
    ways: int = 1
    is_wild: bool = False
    may_fail: bool = True

    @property
    def is_fixed(self) -> bool:
        """Whether it matches a text in one way only."""
        return not self.loops and self.ways == 1 and not self.is_wild

    def settled(self) -> _Cost:
        """Return the cost of a part that is not tried again."""
        return replace(
            self, own_loops=max(self.own_loops, min(self.loops, 1)), loops=0, ways=1, is_wild=False
        )


# More than any pattern may have.
_ENDLESS = _MOST_LOOPS + 1
_NOTHING = _Cost(may_fail=False)


def _sequence(items: list[_Cost]) -> _Cost:
    before = _NOTHING
    for item in items:
        own_loops = before.own_loops
        # what costs something by itself costs it again each time that an earlier part is tried again
        if item.may_fail or item.own_loops:
            tried = _ENDLESS if before.is_wild else before.loops + item.own_loops
            own_loops = max(own_loops, tried)
        before = _Cost(
            own_loops,
            max(before.own_ways, before.ways * item.own_ways),
            before.loops + item.loops,
            before.ways * item.ways,
            before.is_wild or item.is_wild,
            before.may_fail or item.may_fail,
        )
    return before


def _choice(parts: list[_Cost]) -> _Cost:
    return _Cost(
        max(each.own_loops for each in parts),
        sum(each.own_ways for each in parts),
        max(each.loops for each in parts),
        sum(each.ways for each in parts),
        any(each.is_wild for each in parts),
        all(each.may_fail for each in parts),
    )


def _repeated(part: _Cost, low: int, high: int | None) -> _Cost:
    """Return the cost of a part that is repeated; `high` is None without an end."""
    may_fail = part.may_fail and low > 0
    if high is not None and high <= 1:
        return replace(part, ways=part.ways + (low == 0), may_fail=may_fail)
    is_short = high is not None and high <= _SHORT
    if part.is_fixed:
        if is_short:
            assert high is not None
            return replace(part, ways=high - low + 1, may_fail=may_fail)
        # a number of times that is as good as endless takes as many steps
        own_loops = max(part.own_loops, 1) if low > _SHORT else part.own_loops
        return replace(part, own_loops=own_loops, loops=1, may_fail=may_fail)
    if is_short and not part.loops and not part.is_wild:
        assert high is not None
        ways = (part.ways + 1) ** high
        return replace(part, own_ways=part.own_ways * ways, ways=ways, may_fail=may_fail)
    # the first of several times is tried again if the second fails
    own_loops = _ENDLESS if low > 1 else part.own_loops
    return replace(part, own_loops=own_loops, loops=part.loops + 1, is_wild=True, may_fail=may_fail)


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

    def parse(self) -> _Cost:
        cost = self._alternatives(0)
        if self._at < len(self._text):
            raise _UnknownError("has a parenthesis too many")
        return cost

    def _alternatives(self, depth: int) -> _Cost:
        if depth > _MOST_DEPTH:
            raise _UnknownError(f"has more than {_MOST_DEPTH} levels of groups")
        parts, items = [], list[_Cost]()
        while self._at < len(self._text) and self._text[self._at] != ")":
            if self._text[self._at] == "|":
                self._at += 1
                parts.append(_sequence(items))
                items = []
                continue
            items.append(self._quantified(self._item(depth)))
        return _choice([*parts, _sequence(items)])

    def _item(self, depth: int) -> _Cost:
        sign = self._text[self._at]
        if sign == "\\":
            escape = _ESCAPE.match(self._text, self._at)
            if escape is None:
                raise _UnknownError(
                    f"has {self._text[self._at : self._at + 3]}, which is not served"
                )
            self._at = escape.end()
            return _Cost()
        if sign == "[":
            self._skip_class()
            return _Cost()
        if sign == "(":
            return self._group(depth)
        if sign in "*+?":
            raise _UnknownError("repeats nothing")
        self._at += 1
        return _Cost()

    def _group(self, depth: int) -> _Cost:
        self._at += 1
        only_looks = self._accept(_LOOK)
        # what it has matched is not tried again
        is_atomic = not only_looks and self._accept(_ATOMIC)
        is_known = only_looks or is_atomic or self._accept(_GROUP)
        if not is_known and self._text.startswith("?", self._at):
            raise _UnknownError(
                f"has the group ({self._text[self._at : self._at + 3]}, which is not served"
            )
        cost = self._alternatives(depth + 1)
        if self._at >= len(self._text):
            raise _UnknownError("has a parenthesis too few")
        self._at += 1
        if only_looks:
            return replace(cost.settled(), may_fail=True)
        return cost.settled() if is_atomic else cost

    def _quantified(self, cost: _Cost) -> _Cost:
        while found := _QUANTIFIER.match(self._text, self._at):
            sign = found[0]
            if sign in "*+?":
                low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
            elif not found["low"] and not found["high"]:
                # not a repetition
                return cost
            else:
                low = int(found["low"] or 0)
                high = int(found["high"]) if found["high"] else None if found["comma"] else low
                if high is not None and high < low:
                    raise _UnknownError(f"has {sign}, which is not served")
            self._at = found.end()
            cost = _repeated(cost, low, high)
            after = self._text[self._at : self._at + 1]
            if after == "?":
                # the shortest first: as many steps
                self._at += 1
            elif after == "+" and sign in "*+?":
                self._at += 1
                cost = cost.settled()
        return cost

    def _skip_class(self) -> None:
        depth = 0
        while self._at < len(self._text):
            sign = self._text[self._at]
            if sign == "\\":
                self._at += 1
            elif sign == "[":
                depth += 1
                # a bracket at the beginning is a character
                if found := _CLASS_WITH_BRACKET.match(self._text, self._at):
                    self._at = found.end() - 1
            elif sign == "]":
                depth -= 1
            self._at += 1
            if not depth:
                return
        raise _UnknownError("has a class without an end")

    def _accept(self, form: re.Pattern[str]) -> bool:
        found = form.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return found is not None
