"""Parts of layers: each rank reads what belongs to its heads, features and tokens."""

from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from varlen.errors import ConfigError
from varlen.models.blocks.heads import suppress_tokens
from varlen.models.checkpoint.layers import LayerReader, Linear
from varlen.models.checkpoint.weights import CheckpointWeights
from varlen.program.rank import AttentionHeads, Rank

HIDDEN = 6
SIZES = st.integers(2, 4)


@pytest.fixture(scope="module")
def read_of(tmp_path_factory):
    """Return a function that saves tensors and yields the reader of each of `size` ranks."""
    folder = tmp_path_factory.mktemp("weights")
    path = folder / "model.safetensors"

    def readers(tensors, size):
        # not save_file, which waits for the disk
        stored = {
            name: each.clone(memory_format=torch.contiguous_format)
            for name, each in tensors.items()
        }
        # a new file, since the former one may still be mapped
        path.unlink(missing_ok=True)
        path.write_bytes(save(stored))
        with CheckpointWeights(folder) as weights:
            yield from (
                LayerReader(weights, torch.float32, torch.device("cpu"), rank=Rank(number, size))
                for number in range(size)
            )

    return readers


def numbered(*shape):
    """Return a tensor whose elements all differ."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


@st.composite
def head_layouts(draw):
    """Return numbers of ranks, query heads and key heads that go together."""
    size, keys = draw(st.sampled_from([(2, 2), (2, 1), (2, 4), (3, 1), (3, 3), (4, 2), (4, 1)]))
    queries = max(size, keys) * draw(st.integers(1, 3))
    return size, queries, keys


@settings(max_examples=30)
@given(layout=head_layouts(), dim=st.integers(1, 3))
def test_ranks_read_their_query_heads_and_the_key_heads_that_these_attend_to(read_of, layout, dim):
    size, queries, keys = layout
    counts = {"q": queries, "k": keys, "v": keys}
    tensors = {
        f"{name}.{part}": index + 10 * numbered(count * dim, *shape)
        for index, (name, count) in enumerate(counts.items())
        for part, shape in (("weight", (HIDDEN,)), ("bias", ()))
    }

    for number, read in enumerate(read_of(tensors, size)):
        widths = [count * dim for count in counts.values()]
        layer = read.linear([*counts], HIDDEN, widths, split="outputs", units=[*counts.values()])
        own = range(number * queries // size, (number + 1) * queries // size)
        attended = sorted({head * keys // queries for head in own})
        rows = [
            (name, head * dim + feature)
            for name, heads in (("q", own), ("k", attended), ("v", attended))
            for head in heads
            for feature in range(dim)
        ]
        assert torch.equal(
            layer.weight.t(), torch.stack([tensors[f"{n}.weight"][i] for n, i in rows])
        )
        assert torch.equal(layer.bias, torch.stack([tensors[f"{n}.bias"][i] for n, i in rows]))
        heads = read.heads(AttentionHeads(queries, keys, dim))
        assert (heads.queries, heads.keys) == (len(own), len(attended))


@settings(max_examples=30)
@given(
    size=SIZES,
    heads=st.integers(1, 3),
    dim=st.integers(1, 3),
    parts=st.integers(1, 3),
    is_saved_by_input=st.booleans(),
)
def test_parts_of_a_layer_with_several_meanings_are_divided_one_by_one(
    read_of, size, heads, dim, parts, is_saved_by_input
):
    heads *= size
    whole, bias = numbered(parts * heads * dim, HIDDEN), numbered(parts * heads * dim)
    tensors = {"x.weight": whole.t() if is_saved_by_input else whole, "x.bias": bias}

    layers = [
        read.linear(
            ["x"],
            HIDDEN,
            [len(whole)],
            split="outputs",
            units=[heads],
            parts=parts,
            is_saved_by_input=is_saved_by_input,
        )
        for read in read_of(tensors, size)
    ]

    # [rank, part, features]: the parts of all ranks, part by part, are the whole
    for found, expected in (
        (torch.cat([layer.weight.t().reshape(parts, -1, HIDDEN) for layer in layers], 1), whole),
        (torch.cat([layer.bias.reshape(parts, -1) for layer in layers], 1), bias),
    ):
        assert torch.equal(found.reshape(expected.shape), expected)


@settings(max_examples=20)
@given(size=SIZES, features=st.integers(1, 5), is_saved_by_input=st.booleans(), x=st.integers(0, 9))
def test_partial_sums_of_all_ranks_are_the_sum(read_of, size, features, is_saved_by_input, x):
    whole, bias = numbered(HIDDEN, features * size), numbered(HIDDEN)
    tensors = {"x.weight": whole.t() if is_saved_by_input else whole, "x.bias": bias}
    given_features = (numbered(1, features * size) + x) % 7

    total = torch.zeros(1, HIDDEN)
    for read in read_of(tensors, size):
        layer = read.linear(
            ["x"],
            features * size,
            [HIDDEN],
            split="inputs",
            is_saved_by_input=is_saved_by_input,
        )
        first, last = read.rank.bounds(features * size)
        assert layer.is_partial
        assert layer.weight.shape == (features, HIDDEN)
        total += given_features[:, first:last] @ layer.weight
        total += 0 if layer.bias is None else layer.bias

    # whole numbers, so fp32 is exact
    assert torch.equal(total, given_features @ whole.t() + bias)


@settings(max_examples=40)
@given(size=SIZES, tokens=st.integers(1, 30))
def test_ranks_divide_any_vocabulary_that_has_a_token_for_each(read_of, size, tokens):
    whole, bias = numbered(tokens, HIDDEN) + 1, numbered(1, tokens)
    tensors = {"table": whole, "lm_head.weight": whole, "bias": bias}
    tables, outputs, biases = [], [], []

    def load():
        for read in read_of(tensors, size):
            tables.append(read.token_table("table", tokens, HIDDEN))
            outputs.append(read.output("lm_head", HIDDEN, tokens))
            biases.append(read.vocabulary_bias("bias", 1, tokens))

    if -(-tokens // size) * (size - 1) >= tokens:
        with pytest.raises(
            ConfigError, match=f"tensor_parallel is {size}; {tokens} tokens leave none"
        ):
            load()
        return
    load()

    assert torch.equal(torch.cat([table.rows for table in tables]), whole)
    assert torch.equal(torch.cat([output.weight for output in outputs], 1), whole.t())
    assert torch.equal(torch.cat(biases), bias[0])
    for table in tables:
        assert table.vocab_size == tokens
        assert not table.weight[len(table.rows) :].any()
        assert len(table.weight) == len(table.rows) + 1


@settings(max_examples=20)
@given(
    size=SIZES,
    tokens=st.integers(12, 20),
    suppressed=st.sets(st.integers(0, 11)),
    biased=st.booleans(),
)
def test_each_rank_suppresses_its_tokens(size, tokens, suppressed, biased):
    weight, bias = numbered(HIDDEN, tokens), numbered(tokens) if biased else None
    before = None if bias is None else bias.clone()
    places = [Rank(number, size).bounds(tokens) for number in range(size)]

    layers = [
        suppress_tokens(
            Linear(weight[:, first:last], None if bias is None else bias[first:last]),
            sorted(suppressed),
            first,
        )
        for first, last in places
    ]

    found = torch.cat(
        [
            torch.zeros(layer.weight.shape[1]) if layer.bias is None else layer.bias
            for layer in layers
        ]
    )
    expected = torch.zeros(tokens) if before is None else before.clone()
    expected[sorted(suppressed)] = -inf
    assert torch.equal(found, expected)
    assert bias is None or torch.equal(bias, before)


@settings(max_examples=20)
@given(size=SIZES, heads=st.integers(1, 3), rows=st.integers(1, 4))
def test_ranks_read_the_columns_of_their_heads(read_of, size, heads, rows):
    whole = numbered(rows, heads * size)

    parts = [
        read.head_columns("bias", rows, heads * size) for read in read_of({"bias": whole}, size)
    ]

    assert torch.equal(torch.cat(parts, 1), whole)


@pytest.mark.parametrize(
    "size, queries, keys", [(4, 6, 6), (3, 6, 2), (4, 4, 3), (2, 3, 1), (6, 12, 4)]
)
def test_heads_that_ranks_cannot_divide_are_refused(read_of, size, queries, keys):
    message = (
        f"tensor_parallel is {size}; this model has {queries} query heads and {keys} key heads"
    )
    for read in read_of({"x": numbered(1)}, size):
        with pytest.raises(ConfigError, match=message):
            read.heads(AttentionHeads(queries, keys, 4))
