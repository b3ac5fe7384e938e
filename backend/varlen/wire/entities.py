"""The entities of texts: tokens with their labels, joined into spans with character offsets.

Source: TokenClassificationPipeline of transformers, whose answers these are.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import SupportsFloat, TypeAlias

import numpy as np

from varlen.intake.tokenization import TextTokens, WordRules
from varlen.request.request import Float32Array
from varlen.request.row_parameters import AggregationStrategy

# Tokens outside every entity have this label.
_OUTSIDE = "O"
# Bytes of the JSON of an entity without its word and label.
_ENTITY_BYTES = 128


@dataclass(frozen=True, slots=True)
class _Token:
    index: int
    word: str
    scores: Float32Array
    start: int
    end: int
    is_subword: bool


@dataclass(frozen=True, slots=True)
class _Labelled:
    label: str
    score: np.float32
    index: int
    word: str
    start: int
    end: int


Entity: TypeAlias = dict[str, str | int | float]


@dataclass(frozen=True, slots=True)
class EntityReader:
    """Makes the entities of a request's texts out of the scores of their tokens.

    Attributes:
        tokens_of: returns the tokens of texts, cut as the model got them.
    """

    strategy: AggregationStrategy
    texts: Sequence[str]
    tokens_of: Callable[[Sequence[str]], Sequence[TextTokens | None]]
    rules: WordRules

    def num_bytes(self, row: int, tokens: int, longest_label: int) -> int:
        """Return the largest size of the entities of a row, in bytes.

        Args:
            longest_label: length of the longest name of a label in UTF-8.
        """
        # a text of n characters has n more bytes at most in words, and up to 6 bytes for a character
        return 4 + tokens * (_ENTITY_BYTES + longest_label) + 6 * len(self.texts[row])

    def json_of(self, row: int, scores: Float32Array, labels: Sequence[str]) -> bytes:
        """Return the entities of a row as JSON.

        Args:
            scores: `[tokens, labels]` fp32, probabilities.
        """
        (found,) = self.tokens_of(self.texts[row : row + 1])
        # a part with too few tokens was refused as a prompt
        assert found is not None
        tokens = list(_tokens(self.texts[row], found, scores, self.rules))
        entities = _entities(tokens, labels, self.strategy, self.rules)
        return json.dumps(entities, ensure_ascii=False, separators=(",", ":")).encode()


def _tokens(
    text: str, found: TextTokens, scores: Float32Array, rules: WordRules
) -> Iterator[_Token]:
    """Yield the tokens of a text, without special ones."""
    for index, (start, end) in enumerate(found.offsets):
        if found.is_special[index]:
            continue
        word, reference = found.tokens[index], text[start:end]
        if rules.has_word_pieces:
            is_subword = len(word) != len(reference)
        else:
            is_subword = start > 0 and " " not in text[start - 1 : start + 1]
        if found.token_ids[index] == rules.unknown:
            word, is_subword = reference, False
        yield _Token(index, word, scores[index], start, end, is_subword)


def _entities(
    tokens: Sequence[_Token],
    labels: Sequence[str],
    strategy: AggregationStrategy,
    rules: WordRules,
) -> list[Entity]:
    if strategy in ("none", "simple"):
        labelled = [_labelled([token], token.scores, token.word, labels) for token in tokens]
    else:
        labelled = [_word(group, labels, strategy, rules) for group in _words(tokens)]
    if strategy == "none":
        return [_token_entity(each) for each in labelled if each.label != _OUTSIDE]
    groups = (_group_entity(group, rules) for group in _groups(labelled))
    return [each for each in groups if each["entity_group"] != _OUTSIDE]


def _words(tokens: Sequence[_Token]) -> Iterator[list[_Token]]:
    word: list[_Token] = []
    for token in tokens:
        if word and not token.is_subword:
            yield word
            word = []
        word.append(token)
    if word:
        yield word


def _word(
    tokens: list[_Token],
    labels: Sequence[str],
    strategy: AggregationStrategy,
    rules: WordRules,
) -> _Labelled:
    if strategy == "first":
        scores = tokens[0].scores
    elif strategy == "max":
        scores = max(tokens, key=lambda token: token.scores.max()).scores
    else:
        scores = np.nanmean(np.stack([token.scores for token in tokens]), axis=0)
    return _labelled(tokens, scores, rules.join([token.word for token in tokens]), labels)


def _labelled(
    tokens: Sequence[_Token], scores: Float32Array, word: str, labels: Sequence[str]
) -> _Labelled:
    best = int(scores.argmax())
    first, last = tokens[0], tokens[-1]
    return _Labelled(labels[best], scores[best], first.index, word, first.start, last.end)


def _groups(labelled: Sequence[_Labelled]) -> Iterator[list[_Labelled]]:
    """Yield neighbours of one label; one that begins with B- begins a group."""
    group: list[_Labelled] = []
    for each in labelled:
        begins, tag = _tag(each.label)
        if group and (begins or tag != _tag(group[-1].label)[1]):
            yield group
            group = []
        group.append(each)
    if group:
        yield group


def _tag(label: str) -> tuple[bool, str]:
    """Return whether a label begins an entity, and its name."""
    is_marked = label.startswith(("B-", "I-"))
    return label.startswith("B-"), label[2:] if is_marked else label


def _token_entity(token: _Labelled) -> Entity:
    return {
        "entity": token.label,
        "score": _number(token.score),
        "index": token.index,
        "word": token.word,
        "start": token.start,
        "end": token.end,
    }


def _group_entity(group: list[_Labelled], rules: WordRules) -> Entity:
    return {
        "entity_group": group[0].label.split("-", 1)[-1],
        "score": _number(np.nanmean([each.score for each in group])),
        "word": rules.join([each.word for each in group]),
        "start": group[0].start,
        "end": group[-1].end,
    }


def _number(score: SupportsFloat) -> float:
    return float(f"{float(score):.9g}")
