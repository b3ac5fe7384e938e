"""The two lists of sequences that the benchmark embeds: the same for a seed on any machine."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from varlen_bench.peers.checkpoints import max_positions

UNIFORM_SHORTEST, UNIFORM_LONGEST = 5, 500
QUERY_SHORTEST, QUERY_LONGEST = 3, 30

_SUBJECTS = (
    "python, kubernetes, sourdough bread, houseplants, a used car, noise cancelling headphones, "
    "mortgage rates, electric bikes, the french revolution, type 2 diabetes, solar panels, "
    "linear regression, a leaking tap, green tea, travel insurance, postgresql, running shoes, "
    "back pain, compound interest, the northern lights, wool sweaters, vitamin d deficiency, "
    "a standing desk, jazz guitar, toddlers, cast iron pans, the stock market, macbook air, "
    "photosynthesis, wedding speeches, a kitchen renovation, rescue dogs, contact lenses, "
    "excel pivot tables, remote work, plantar fasciitis, espresso machines, tax returns"
).split(", ")
_VERBS = (
    "clean, install, choose, repair, understand, store, compare, sell, learn about, deal with, "
    "take care of, get started with, save money on, write about, troubleshoot, measure"
).split(", ")
_PLACES = (
    "london, new york, berlin, tokyo, sydney, toronto, lisbon, austin, nairobi, mumbai, "
    "san francisco, dublin, reykjavik, buenos aires"
).split(", ")
_QUALITIES = (
    "best, cheap, quiet, lightweight, organic, second hand, waterproof, beginner friendly, "
    "long lasting, eco friendly, small, affordable"
).split(", ")
_TAILS = (
    "for beginners, near me, under 200 dollars, step by step, without tools, reddit, in 2024, "
    "for small apartments, at home, explained simply, vs renting, before winter, for seniors, "
    "that actually work according to people who have tried them for more than a year"
).split(", ")
_TEMPLATES = (
    "{subject}",
    "{subject} {tail}",
    "{quality} {subject} in {place}",
    "how to {verb} {subject}",
    "how do i {verb} {subject} {tail}?",
    "what is the difference between {subject} and {other}?",
    "why is {subject} so expensive in {place}",
    "is {subject} worth it {tail}",
    "{quality} {subject} {tail}",
    "{place} weather tomorrow",
    "flights from {place} to {place2} {tail}",
    "can you {verb} {subject} if you already have {other}, and how long does it take {tail}?",
    "{subject} meaning",
    "{place}",
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Sequences of token ids in order of arrival, and the batch sizes worth trying on them."""

    name: str
    sequences: list[list[int]]
    batch_sizes: tuple[int, ...]
    batch_tokens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Real tokens of all sequences."""
        return sum(map(len, self.sequences))


def uniform_workload(model: Path, count: int, seed: int = 0) -> Workload:
    """Return `count` sequences of vocabulary ids with lengths uniform in 5-500.

    A model that takes fewer positions gets lengths up to what it takes.

    Raises:
        ValueError: the tokenizer has no [CLS] and [SEP].
    """
    tokenizer = _tokenizer(model)
    cls, sep = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    if cls is None or sep is None:
        raise ValueError(f"{model} has no [CLS] and [SEP] tokens; the benchmark is for BERT models")
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    words = sorted(i for token, i in vocabulary.items() if not token.startswith("["))
    longest = min(UNIFORM_LONGEST, max_positions(model))
    draw = random.Random(seed)
    sequences = []
    for _ in range(count):
        length = draw.randint(UNIFORM_SHORTEST, longest)
        sequences.append([cls, *draw.choices(words, k=length - 2), sep])
    return Workload("uniform", sequences, (1, 4, 8, 16, 32), (512, 1024, 2048, 4096, 8192))


def short_workload(model: Path, count: int, seed: int = 0) -> Workload:
    """Return `count` tokenised search queries of 3-30 tokens, [CLS] and [SEP] counted."""
    tokenizer = _tokenizer(model)
    longest = min(QUERY_LONGEST, max_positions(model))
    draw = random.Random(seed)
    sequences: list[list[int]] = []
    while len(sequences) < count:
        ids = tokenizer.encode(_query(draw)).ids
        if QUERY_SHORTEST <= len(ids) <= longest:
            sequences.append(ids)
    return Workload("short", sequences, (1, 4, 8, 16, 32, 64), (256, 512, 1024, 2048, 4096))


def every_kth_by_length(sequences: list[list[int]], step: int) -> list[int]:
    """Return the indices of every `step`-th sequence by length, in order of arrival."""
    by_length = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    return sorted(by_length[step // 2 :: step] or by_length[:1])


def _query(draw: random.Random) -> str:
    subject, other = draw.sample(_SUBJECTS, 2)
    place, place2 = draw.sample(_PLACES, 2)
    return draw.choice(_TEMPLATES).format(
        subject=subject,
        other=other,
        place=place,
        place2=place2,
        verb=draw.choice(_VERBS),
        quality=draw.choice(_QUALITIES),
        tail=draw.choice(_TAILS),
    )


def _tokenizer(model: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
