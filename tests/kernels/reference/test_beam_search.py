"""What searches do before and after the model, in plain torch and compiled for CPUs."""

import pytest
import torch

from tests.kernels.beam_searches import BLOCK_SIZE, Searches, new_state
from varlen_kernels import cpu, reference
from varlen_kernels.reference.beam_search import SearchResults

OPS = pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])


@OPS
@pytest.mark.parametrize("seed", range(40))
def test_searches_choose_beams_and_answers_as_without_tensors(ops, seed):
    searches, state = Searches(seed), new_state("cpu")
    while searches.length < searches.last:
        arguments = searches.advance()
        numbers = searches.results()
        results = SearchResults.views(numbers, len(searches.beams))
        right = searches.right(*arguments)

        ops.advance_searches(*arguments, state, results)

        for place, (live, answers, has_ended) in enumerate(right):
            first, beams = searches.first_beams[place], searches.beams[place]
            own, found = results.beams[first : first + beams], len(answers)
            assert results.ends[place].tolist() == [has_ended, found]
            assert own[:, :2].tolist() == [[parent, token] for _, parent, token in live]
            assert own[:found, 2:].tolist() == [list(each[1:]) for each in answers]
            scores = results.scores[first : first + found].tolist()
            assert scores == [score for score, *_ in answers]


@OPS
@pytest.mark.parametrize("seed", range(40))
def test_beams_read_the_tokens_of_the_beams_that_they_continue(ops, seed):
    searches, state = Searches(seed), new_state("cpu")
    # what each block holds: the token at each place, or -1 of a prompt
    memory, contexts = {}, [[[] for _ in range(beams)] for beams in searches.beams]
    while searches.length < searches.last - 1:
        arguments = searches.advance()
        results = SearchResults.views(searches.results(), len(searches.beams))
        searches.right(*arguments)
        ops.advance_searches(*arguments, state, results)
        step = searches.follow()
        token_ids, context_lens, cu_blocks, block_ids, slots, copies = step[3:]

        ops.follow_beams(state, *step, block_size=BLOCK_SIZE)

        if searches.length == 1 and searches.prompt % BLOCK_SIZE:
            ends = [block_ids[cu_blocks[first + 1] - 1] for first in searches.first_beams]
            memory |= {int(block): {0: -1} for block in ends}
        copied = {copy: memory.get(source) for source, copy in copies.tolist() if source != copy}
        assert not {source for source, copy in copies.tolist() if source != copy} & copied.keys()
        memory |= {block: dict(held) for block, held in copied.items() if held is not None}
        for place, first in enumerate(searches.first_beams):
            live = searches.live[place]
            before = contexts[place] if searches.length > 1 else [[]] * len(live)
            contexts[place] = [[*before[parent], token] for _, parent, token in live]
            for beam, context in enumerate(contexts[place]):
                row = first + beam
                table = block_ids[cu_blocks[row] : cu_blocks[row + 1]].tolist()
                last, at = divmod(int(context_lens[row]) - 1, BLOCK_SIZE)
                assert int(token_ids[row]) == context[-1]
                assert int(slots[row]) == table[last] * BLOCK_SIZE + at
                memory.setdefault(table[last], {})[at] = context[-1]
        written = [int(slot) // BLOCK_SIZE for slot in slots]
        assert len(set(written)) == len(written)
        for place, first in enumerate(searches.first_beams):
            for beam, context in enumerate(contexts[place]):
                row = first + beam
                table = block_ids[cu_blocks[row] : cu_blocks[row + 1]].tolist()
                positions = range(searches.prompt, searches.prompt + len(context))
                held = [memory[table[p // BLOCK_SIZE]][p % BLOCK_SIZE] for p in positions]
                assert held == context
                if searches.prompt % BLOCK_SIZE:
                    assert memory[table[searches.prompt // BLOCK_SIZE]][0] == -1


@OPS
@pytest.mark.parametrize("seed", range(5))
def test_a_step_that_runs_again_changes_nothing(ops, seed):
    searches, state = Searches(seed), new_state("cpu")
    while searches.length < 4:
        arguments = searches.advance()
        found = []
        for _ in range(2):
            results = SearchResults.views(searches.results().zero_(), len(searches.beams))
            ops.advance_searches(*arguments, state, results)
            found.append(results)
        searches.right(*arguments)
        assert all(map(torch.equal, *found))
        step = searches.follow()
        followed = [[each.clone() for each in step] for _ in range(2)]
        for each in followed:
            ops.follow_beams(state, *each, block_size=BLOCK_SIZE)
        assert all(map(torch.equal, *followed))
