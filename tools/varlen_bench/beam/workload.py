"""Sentences to translate."""

from __future__ import annotations

import math
import random
from pathlib import Path
from statistics import NormalDist

from varlen_bench.compare.passes import Requests
from varlen_tools.train_demo.dates import FORMS, held_out_examples
from varlen_tools.workloads import Mix, token_ids

# Words of a sentence of WMT's newstest: the median, and the length that a tenth exceeds.
_MEDIAN_WORDS, _LONG_WORDS = 21, 38
_TOKENS_PER_WORD = 1.3
# Number of quantiles of the log-normal distribution in the mix of lengths.
_QUANTILES = 1000
# A date in ISO form has 11 tokens with the end.
_DATE_TOKENS = 16


def news_requests(count: int, vocabulary: int, positions: int, seed: int) -> Requests:
    """Return random sentences with lengths as in news, all at once.

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
    return Requests.at_once(label, [[*ids, 0] for ids in sources], limits)


def date_requests(checkpoint: Path, count: int, seed: int) -> Requests:
    """Return dates that training never shows, in random written forms, all at once."""
    from tokenizers import Tokenizer

    numbers = random.Random(seed)
    examples = held_out_examples(-(-count // len(FORMS)), numbers)
    texts = [example.source for example in numbers.sample(examples, count)]
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    sources = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    return Requests.at_once("dates in written forms", sources, [_DATE_TOKENS] * count)
