"""Bounds on the difference of two results, from dtype and number of roundings."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def assert_close(
    actual: npt.ArrayLike | torch.Tensor,
    expected: npt.ArrayLike | torch.Tensor,
    *,
    roundings: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Fail unless all elements differ by less than rounding explains.

    A machine chooses the order of the additions in a sum: by the width of its vector registers, its number of
    threads, and the shape of the batch. So two correct results differ in their last bits. The bound follows from
    two facts:

    * Each rounding has a relative error of at most eps / 2, half a unit in the last place. Errors of n roundings
      partly cancel, like the steps of a random walk: together they stay near sqrt(n) * eps / 2 (Higham and Mary
      2019, "A new approach to probabilistic rounding error analysis"). Two results that err on their own differ by
      at most twice that: sqrt(n) * eps.
    * The error of a sum is relative to its addends, not to the sum, which may be almost zero. So all elements are
      judged by the largest magnitude in `expected`. NaN and infinities must be equal.

    Args:
        actual, expected: arrays of one shape. `expected` may have a higher precision than `dtype`.
        roundings: number that follow each other between the inputs and one element of the result, where a
            sum of n products counts as n; see `encoder_roundings`.
        dtype: dtype of the computation, or the less precise one of two.
    """
    actual, expected = _float64(actual), _float64(expected)
    assert actual.shape == expected.shape
    magnitude = np.abs(expected[np.isfinite(expected)]).max(initial=0)
    np.testing.assert_allclose(
        actual, expected, rtol=0, atol=relative_error(roundings, dtype) * magnitude
    )


def assert_rows_close(
    actual: Sequence[npt.ArrayLike | torch.Tensor],
    expected: Sequence[npt.ArrayLike | torch.Tensor],
    *,
    roundings: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Compare rows of different shapes, relative to their common largest magnitude."""
    assert [np.shape(row) for row in actual] == [np.shape(row) for row in expected]
    flat = [np.concatenate([_float64(row).ravel() for row in rows]) for rows in (actual, expected)]
    assert_close(*flat, roundings=roundings, dtype=dtype)


def relative_error(roundings: int, dtype: torch.dtype = torch.float32) -> float:
    """Return the bound of `assert_close`, relative to the largest magnitude."""
    return math.sqrt(roundings) * torch.finfo(dtype).eps


def encoder_roundings(checkpoint: Path, dtype: torch.dtype = torch.float32) -> int:
    """Return the number of roundings on the longest path through a model.

    In fp32 the sums of each layer count: seven over `hidden_size` (queries, scores, the product after attention,
    the first one of the feed-forward part, a mean and a variance twice, which is one more), one over
    `intermediate_size`, and two over the tokens of a sequence (the softmax and the mix of values). The embeddings,
    the pooling and the head are at most one layer more. In a half precision sums are still in fp32. What
    counts there are the results of ops, rounded to `dtype`: ten a layer, each from operands rounded as often.
    """
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] == "t5gemma":
        # with the attention to its source, a decoder's layer counts as two
        first, second = (config[part]["num_hidden_layers"] for part in ("encoder", "decoder"))
        config = {**config["decoder"], "num_hidden_layers": first + 2 * second}
    if "n_layer" in config:
        sizes = [config["n_layer"], config["n_embd"], config["n_inner"], config["n_positions"]]
    elif "encoder_layers" in config:
        # with the attention to its source, a decoder's layer counts as two
        layers = config["encoder_layers"] + 2 * config["decoder_layers"]
        inner = max(config["encoder_ffn_dim"], config["decoder_ffn_dim"])
        sizes = [layers, config["d_model"], inner, config["max_position_embeddings"]]
    elif "num_decoder_layers" in config:
        layers = config["num_layers"] + 2 * config["num_decoder_layers"]
        longest = config["relative_attention_max_distance"]
        sizes = [layers, config["d_model"], config["d_ff"], longest]
    elif "n_layers" in config:
        sizes = [config[name] for name in ("n_layers", "dim", "hidden_dim")]
        sizes.append(config["max_position_embeddings"])
    else:
        names = "num_hidden_layers hidden_size intermediate_size max_position_embeddings".split()
        sizes = [config[name] for name in names]
    layers, hidden, inner, tokens = sizes
    # heads may be wider than hidden_size, or the inner layer left out
    hidden = max(hidden, config.get("num_attention_heads", 1) * (config.get("head_dim") or 1))
    layers, inner = layers + 1, inner or 4 * hidden
    return 2 * 10 * layers if dtype != torch.float32 else layers * (8 * hidden + inner + 2 * tokens)


def _float64(values: npt.ArrayLike | torch.Tensor) -> npt.NDArray[np.float64]:
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)
