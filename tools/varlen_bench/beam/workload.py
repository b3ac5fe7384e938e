"""Sentences to translate: sources, lengths of answers, and when they arrive."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

from varlen_bench.harness.arrivals import exponential_times
from varlen_tools.train_demo.dates import FORMS, held_out_examples
from varlen_tools.workloads import Mix, token_ids

# Words of a sentence of WMT's newstest: the median, and the length that a tenth exceeds.
_MEDIAN_WORDS, _LONG_WORDS = 21, 38
_TOKENS_PER_WORD = 1.3
# Number of quantiles of the log-normal distribution in the mix of lengths.
_QUANTILES = 1000
# A date in ISO form has 11 tokens with the end.
_DATE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival.

    Attributes:
        label: description for tables and rows.
        sources: token ids of each request, with the end token.
        limits: most tokens of each answer; an answer of a model that never ends has as many.
        due: when each request arrives, in seconds from the beginning, ascending.
    """

    label: str
    sources: list[list[int]]
    limits: list[int]
    due: list[float]

    def arriving(self, rate: float, seed: int) -> Workload:
        """Return the same requests as a Poisson process of `rate` requests/s."""
        return replace(self, due=exponential_times(len(self.sources), rate, seed))

    def part(self, requests: list[int]) -> Workload:
        """Return some of the requests, all at once."""
        return Workload(
            self.label,
            [self.sources[request] for request in requests],
            [self.limits[request] for request in requests],
            [0.0] * len(requests),
        )


def news_workload(count: int, vocabulary: int, positions: int, seed: int) -> Workload:
    """Return random sentences with lengths like those of news, all at once.

    An answer has as many tokens as its source without the end, so batches that are sorted by source length waste
    nothing on answers that end early.
    """
    deviation = math.log(_LONG_WORDS / _MEDIAN_WORDS) / NormalDist().inv_cdf(0.9)
    words = NormalDist(math.log(_MEDIAN_WORDS), deviation)
    lengths = [
        max(1, min(positions - 1, round(_TOKENS_PER_WORD * math.exp(words.inv_cdf(share)))))
        for share in ((2 * i + 1) / (2 * _QUANTILES) for i in range(_QUANTILES))
    ]
    limits = Mix("news", "", tuple(lengths)).take(count, seed)
    # tokens 0 and 1 end and pad
    sources = [[token + 1 for token in ids] for ids in token_ids(limits, vocabulary - 1, seed)]
    label = f"words p50 {_MEDIAN_WORDS}, p90 {_LONG_WORDS}; {_TOKENS_PER_WORD} tokens each"
    return Workload(label, [[*ids, 0] for ids in sources], limits, [0.0] * count)


def date_workload(checkpoint: Path, count: int, seed: int) -> Workload:
    """Return dates that training never shows, in random written forms, all at once."""
    from tokenizers import Tokenizer

    numbers = random.Random(seed)
    examples = held_out_examples(-(-count // len(FORMS)), numbers)
    texts = [example.source for example in numbers.sample(examples, count)]
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    sources = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    return Workload("dates in written forms", sources, [_DATE_TOKENS] * count, [0.0] * count)
