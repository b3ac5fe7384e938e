"""The inputs of a step are those that a loop over tokens makes."""

from array import array
from itertools import accumulate, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from varlen.costs.model import BatchShape
from varlen.execution.packing import pack_step, searches_of_step, step_arrays, step_dims
from varlen.request.generation import GenerationOptions
from varlen.request.request import Prompt, Request, RequestOptions, Source
from varlen.scheduling.batch import Batch, Chunk, GeneratedSequence, RequestState
from varlen.scheduling.device_plan import DevicePlan, SearchRules


def sequence_of_source(length):
    """Return a sequence that translates a source text of this length."""
    prompt = Prompt(np.zeros(1, np.int32), payload=Source(np.zeros(length, np.int32)))
    request = RequestState(
        Request((prompt,), RequestOptions(generation=GenerationOptions())), None, 0.0
    )
    return GeneratedSequence(request, 0, prompt, 1)


@st.composite
def steps(draw, *, sources=False):
    block_size = draw(st.sampled_from([1, 4, 16]))
    chunks = []
    for _ in range(draw(st.integers(1, 6))):
        start, count = draw(st.integers(0, 40)), draw(st.integers(1, 20))
        tokens = tuple(draw(st.lists(st.integers(0, 99), min_size=count, max_size=count)))
        blocks = -(-(start + count) // block_size)
        table = array("i", draw(st.lists(st.integers(0, 500), min_size=blocks, max_size=blocks)))
        samples = (None,) * draw(st.integers(0, 3))
        sequence, source = None, ()
        if sources:
            sequence = sequence_of_source(draw(st.integers(1, 40)))
            count = -(-sequence.prompt.num_source_tokens // block_size)
            source = tuple(draw(st.lists(st.integers(0, 500), min_size=count, max_size=count)))
        chunks.append(Chunk(sequence, start, tokens, table, samples, source))
    return chunks, block_size


@given(steps())
def test_each_token_has_its_position_and_its_slot(step):
    chunks, block_size = step

    inputs = {name: array.tolist() for name, array in step_arrays(chunks, block_size).items()}

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


@given(steps(sources=True))
def test_each_token_is_a_row_that_reads_its_whole_source(step):
    chunks, block_size = step

    inputs = {name: array.tolist() for name, array in step_arrays(chunks, block_size).items()}

    rows = [chunk for chunk in chunks for _ in chunk.token_ids]
    assert inputs["source_rows"] == list(range(len(rows) + 1))
    assert inputs["source_lens"] == [row.sequence.prompt.num_source_tokens for row in rows]
    bounds = inputs["cu_source_blocks"]
    assert bounds[0] == 0
    assert [tuple(inputs["source_block_ids"][begin:end]) for begin, end in pairwise(bounds)] == [
        row.source_block_ids for row in rows
    ]
    # the rest is as without sources
    others = step_arrays([chunk._replace(source_block_ids=()) for chunk in chunks], block_size)
    assert inputs == inputs | {name: tensor.tolist() for name, tensor in others.items()}


@given(st.booleans().flatmap(lambda sources: steps(sources=sources)))
def test_the_dimensions_are_those_of_the_inputs(step):
    chunks, block_size = step

    inputs = step_arrays(chunks, block_size)
    dims = step_dims(inputs)

    assert dims == {
        "tokens": sum(len(chunk.token_ids) for chunk in chunks),
        "sequences": len(chunks),
        "blocks": sum(len(chunk.block_ids) for chunk in chunks),
        "source_blocks": sum(len(c.token_ids) * len(c.source_block_ids) for c in chunks),
        "logit_rows": sum(len(chunk.samples) for chunk in chunks),
    }
    sizes = [
        ("token_ids", dims["tokens"]),
        ("slots", dims["tokens"]),
        ("context_lens", dims["sequences"]),
        ("cu_seqlens", dims["sequences"] + 1),
        ("block_ids", dims["blocks"]),
        ("logit_rows", dims["logit_rows"]),
    ]
    if "source_rows" in inputs:
        sizes += [
            ("source_rows", dims["tokens"] + 1),
            ("source_lens", dims["tokens"]),
            ("source_block_ids", dims["source_blocks"]),
            ("cu_source_blocks", dims["tokens"] + 1),
        ]
    for name, size in sizes:
        assert len(inputs[name]) == size


def test_the_prompt_of_a_search_has_one_row_before_those_of_its_beams():
    begins, goes_on = sequence_of_source(0), sequence_of_source(0)
    chunks = (
        Chunk(begins, 0, (7, 7), array("i", [3, 4]), (begins,), beam_slots=(0, 1), beams=2),
        Chunk(
            goes_on, 1, (0, 0, 0), array("i", [5, 6, 8]), (goes_on,), beam_slots=(4, 2, 3), beams=3
        ),
    )
    banned = np.array([9], np.int32)
    rules = [SearchRules(beams, False, False, None, (0,), banned, 1.0, 1.0) for beams in (2, 3)]
    batch = Batch((begins, goes_on), BatchShape.of([1] * 5), 0.0, "", chunks)

    step = pack_step(batch, 4, DevicePlan(None, rules, is_whole=True))
    assert searches_of_step(step, 0, 2) is step
    step = searches_of_step(step, 0, 2, begins=True)

    assert step.inputs["token_ids"].tolist() == [7, 0, 0, 0]
    assert step.inputs["position_ids"].tolist() == [0, 1, 1, 1]
    assert step.inputs["block_ids"].tolist() == [3, 5, 6, 8]
    assert step.inputs["cu_blocks"].tolist() == [0, 1, 2, 3, 4]
    assert step.searches["searches"][:, :4].tolist() == [[0, 1, 2, 1], [1, 3, 3, 2]]
    assert step.searches["beam_slots"].tolist() == [0, 1, 4, 2, 3]
    assert step.searches["banned_rows"].tolist() == [0, 1, 2, 3]
    assert step.beams["searches"].tolist() == [[1, 3, 1, 0]]
    assert step.beams["beam_slots"].tolist() == [4, 2, 3]
    assert searches_of_step(step, 0, 2, begins=True) is step
