"""The workloads: sequences that are the same for a seed on every machine."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

_UNIFORM_SHORTEST, _UNIFORM_LONGEST = 5, 500
_QUERY_SHORTEST, _QUERY_LONGEST = 3, 30
# Batches of equal sequences, as in the evaluation of TurboTransformers (arXiv:2010.05680).
GRID_BATCHES, _GRID_TOKENS = (1, 20), (10, 100, 200, 500)
# Tokens of a measured pass at least.
_GRID_PASS_TOKENS = 2000

# Templates of search queries, and the words that fill them.
_QUERIES: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("queries.json").read_text(encoding="utf-8")
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Token ids of sequences in order of arrival.

    Attributes:
        batch_sizes, batch_tokens: batch sizes to try, in sequences or tokens.
        times: number of runs of a measured pass.
    """

    name: str
    sequences: list[list[int]]
    batch_sizes: Sequence[int]
    batch_tokens: Sequence[int]
    times: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences, without padding."""
        return sum(map(len, self.sequences))

    def thinned(self, step: int) -> tuple[Workload, list[int]]:
        """Return every `step`-th sequence by length, in order of arrival, and their indices."""
        by_length = sorted(range(len(self.sequences)), key=lambda i: len(self.sequences[i]))
        kept = sorted(by_length[step // 2 :: step] or by_length[:1])
        return replace(self, sequences=[self.sequences[i] for i in kept]), kept

    def with_fewer_sizes(self) -> Workload:
        """Return the same sequences with every second batch size."""
        return replace(
            self, batch_sizes=self.batch_sizes[1::2], batch_tokens=self.batch_tokens[1::2]
        )


def uniform_workload(model: Path, count: int, seed: int = 0) -> Workload:
    """Return sequences of random words, 5-500 tokens or the model's limit."""
    draw = random.Random(seed)
    make = _maker(model, draw)
    longest = min(_UNIFORM_LONGEST, _position_limit(model))
    sequences = [make(draw.randint(_UNIFORM_SHORTEST, longest)) for _ in range(count)]
    return Workload("uniform", sequences, (1, 4, 8, 16, 32), (512, 1024, 2048, 4096, 8192))


def grid_workloads(model: Path, seed: int = 0) -> list[Workload]:
    """Return batches of equal sequences, named by sequences and tokens, such as `20x100`."""
    make = _maker(model, random.Random(seed))
    limit = _position_limit(model)
    workloads = []
    for size in GRID_BATCHES:
        for length in dict.fromkeys(min(tokens, limit) for tokens in _GRID_TOKENS):
            sequences = [make(length) for _ in range(size)]
            tokens = size * length
            times = -(-_GRID_PASS_TOKENS // tokens)
            workloads.append(Workload(f"{size}x{length}", sequences, (size,), (tokens,), times))
    return workloads


def short_workload(model: Path, count: int, seed: int = 0) -> Workload:
    """Return tokenized search queries of 3-30 tokens, special tokens included."""
    tokenizer = _tokenizer(model)
    longest = min(_QUERY_LONGEST, _position_limit(model))
    draw = random.Random(seed)
    sequences: list[list[int]] = []
    while len(sequences) < count:
        ids = tokenizer.encode(_query(draw)).ids
        if _QUERY_SHORTEST <= len(ids) <= longest:
            sequences.append(ids)
    return Workload("short", sequences, (1, 4, 8, 16, 32, 64), (256, 512, 1024, 2048, 4096))


def _maker(model: Path, draw: random.Random) -> Callable[[int], list[int]]:
    """Return a function that makes a sequence of random words, of a length in tokens."""
    tokenizer = _tokenizer(model)
    before, after = _special_tokens(tokenizer)
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    words = sorted(i for t, i in vocabulary.items() if i not in added and t[0] not in "[<")

    def make(length: int) -> list[int]:
        inner = length - len(before) - len(after)
        return [*before, *draw.choices(words, k=inner), *after]

    return make


def _query(draw: random.Random) -> str:
    subject, other = draw.sample(_QUERIES["subjects"], 2)
    place, place2 = draw.sample(_QUERIES["places"], 2)
    return draw.choice(_QUERIES["templates"]).format(
        subject=subject,
        other=other,
        place=place,
        place2=place2,
        verb=draw.choice(_QUERIES["verbs"]),
        quality=draw.choice(_QUERIES["qualities"]),
        tail=draw.choice(_QUERIES["tails"]),
    )


def _position_limit(model: Path) -> int:
    # a worker process of another engine must not load varlen
    from varlen.models.checkpoint_folder import Checkpoint

    return Checkpoint.open(model).position_limit


def _special_tokens(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the token ids that the tokenizer puts before and after every text."""
    encoding = tokenizer.encode("a")
    words = [at for at, special in enumerate(encoding.special_tokens_mask) if not special]
    if not words:
        raise ValueError('the tokenizer gives no token for the text "a"')
    return encoding.ids[: words[0]], encoding.ids[words[-1] + 1 :]


def _tokenizer(model: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
