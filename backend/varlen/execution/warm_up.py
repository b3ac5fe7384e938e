"""Random batches that show whether a GPU computes numbers, before a model is ready.

The batch of a capture has no sequence, so it runs little of attention: a fault there would show in service first.
"""

import logging
from functools import partial

import numpy as np

from varlen.errors import ConfigError
from varlen.execution.cuda.buckets import Bucket
from varlen.execution.cuda.runner import CudaRunner
from varlen.execution.cuda.timeout import call_within
from varlen.execution.model_info import ModelInfo
from varlen.request.request import Int32Array, Prompt, RequestOptions

_log = logging.getLogger(__name__)


def check_numbers(runner: CudaRunner, info: ModelInfo, timeout: float = 0.0) -> None:
    """Run a random batch in the largest graph of each mean length.

    Args:
        runner: runs them.
        info: of the model.
        timeout: longest time of each, in seconds; 0 is no limit.

    Raises:
        ConfigError: an answer holds NaN.
        ModelFaultError: the GPU does not end a batch.
    """
    numbers = np.random.default_rng(0)
    buckets = runner.buckets.largest_of_each_class()
    for bucket in buckets:
        lengths = random_lengths(bucket, info.max_sequence_tokens, numbers)
        prompts = [
            Prompt(
                numbers.integers(0, info.vocab_size, length, dtype=np.int32),
                numbers.integers(0, info.type_vocab_size, length, dtype=np.int32),
                payload=info.most_masks(length),
            )
            for length in lengths.tolist()
        ]
        options = [RequestOptions(normalize=index % 2 == 0) for index in range(len(prompts))]
        answers = call_within(timeout, partial(runner.run, prompts, options))
        if any(np.isnan(answer).any() for answer in answers):
            raise ConfigError(
                f"a random batch of {len(prompts)} sequences, {int(lengths.sum())} tokens, has answers with NaN in"
                f" {info.dtype} on {info.device_name}: set dtype to bf16 or fp32, or device to cpu"
            )
    _log.info("%d random batches have no NaN in their answers", len(buckets))


def random_lengths(bucket: Bucket, longest: int, numbers: np.random.Generator) -> Int32Array:
    """Return random lengths that fill a bucket, none above `longest`."""
    tokens, count = bucket.tokens, bucket.sequences
    lengths = np.full(count, tokens // count, dtype=np.int32)
    lengths[: tokens % count] += 1
    lengths = np.minimum(lengths, longest)
    # tokens move from one half of the sequences to the other
    half = count // 2
    gains, gives = lengths[:half], lengths[count - half :]
    moved = numbers.integers(0, np.minimum(longest - gains, gives - 1), endpoint=True)
    gains += moved.astype(np.int32)
    gives -= moved.astype(np.int32)
    return lengths
