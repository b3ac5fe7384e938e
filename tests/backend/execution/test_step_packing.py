"""The inputs of a step are those that a loop over tokens makes."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from varlen.execution.step_packing import step_dims, step_inputs
from varlen.sequence import Chunk


@st.composite
def steps(draw):
    block_size = draw(st.sampled_from([1, 4, 16]))
    chunks = []
    for _ in range(draw(st.integers(1, 6))):
        start, count = draw(st.integers(0, 40)), draw(st.integers(1, 20))
        tokens = tuple(draw(st.lists(st.integers(0, 99), min_size=count, max_size=count)))
        blocks = -(-(start + count) // block_size)
        table = tuple(draw(st.lists(st.integers(0, 500), min_size=blocks, max_size=blocks)))
        samples = (None,) * draw(st.integers(0, 3))
        chunks.append(Chunk(None, start, tokens, table, samples))
    return chunks, block_size


@given(steps())
def test_each_token_has_its_position_and_its_slot(step):
    chunks, block_size = step

    inputs = {name: tensor.tolist() for name, tensor in step_inputs(chunks, block_size).items()}

    places = [(c, c.start + i) for c in chunks for i in range(len(c.token_ids))]
    assert inputs["token_ids"] == [token for c in chunks for token in c.token_ids]
    assert inputs["position_ids"] == [position for _, position in places]
    assert inputs["slots"] == [
        c.block_ids[position // block_size] * block_size + position % block_size
        for c, position in places
    ]
    assert inputs["context_lens"] == [c.start + len(c.token_ids) for c in chunks]
    assert inputs["block_ids"] == [block for c in chunks for block in c.block_ids]
    ends = list(accumulate(len(c.token_ids) for c in chunks))
    assert inputs["cu_seqlens"] == [0, *ends]
    assert inputs["cu_blocks"] == [0, *accumulate(len(c.block_ids) for c in chunks)]
    assert inputs["logit_rows"] == [
        end - 1 for c, end in zip(chunks, ends, strict=True) for _ in c.samples
    ]


@given(steps())
def test_the_dimensions_are_those_of_the_inputs(step):
    chunks, block_size = step

    inputs, dims = step_inputs(chunks, block_size), step_dims(chunks)

    for name, size in (
        ("token_ids", dims["tokens"]),
        ("slots", dims["tokens"]),
        ("context_lens", dims["sequences"]),
        ("cu_seqlens", dims["sequences"] + 1),
        ("block_ids", dims["blocks"]),
        ("logit_rows", dims["logit_rows"]),
    ):
        assert len(inputs[name]) == size
