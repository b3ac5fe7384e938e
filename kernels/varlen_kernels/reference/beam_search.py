"""What searches with beams do in a step, apart from the model, in plain torch.

`advance_searches` comes after the model: out of the best tokens of each beam, it chooses the beams of the next step and
the answers, and finds searches that have ended. `follow_beams` comes before the next step of the model: each beam
takes the block table of the beam that it continues.

All that a search needs is where the model runs, so a step can start before anyone has read what the one before it
chose. A step that failed may run again: it reads only what the step before it wrote.

Source of the finish rule: `_beam_search` of Hugging Face's `generate`, version 5.
"""

from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from varlen_kernels.functions import ENDS_WHEN_FULL, IS_LAST, NO_TOKEN, NOT_GIVEN
from varlen_kernels.reference.beam import BeamCandidates

__all__ = ["advance_searches", "follow_beams"]

# Beams of the largest search.
MAX_BEAMS = 32
# Columns of `advance_searches`: first row of candidates of a search, and their number; number of beams; tokens of each
# beam with the one that is chosen; flags; the only token that may be chosen, or NO_TOKEN; from where and up to where
# its end tokens are among all of them; number of the first beam among all beams.
ADVANCE_COLUMNS = 9


class SearchState(NamedTuple):
    """What beams keep from one step to the next.

    Each beam has a slot of its own, in any order, as long as its search runs. There are two of everything: for beams
    with an even number of tokens, and for beams with an odd one.

    Attributes:
        tables: `[2, beam slots, blocks]` int32, the block table of each beam.
        parents: `[2, beam slots]` int32, the beam of the step before that each beam continues.
        tokens: `[2, beam slots]` int32, the token that it continues it with.
        scores: `[2, beam slots]` fp32, its sum of log probabilities; -inf for a beam that is not alive.
        answers: `[2, beam slots, 3]` int32, the best answers of the search in the slots of its beams: last token, beam
            before it, number of tokens.
        answer_scores: `[2, beam slots]` fp32, divided by the length penalty.
        num_answers: `[2, beam slots]` int32, in the slot of the first beam.
    """

    tables: Tensor
    parents: Tensor
    tokens: Tensor
    scores: Tensor
    answers: Tensor
    answer_scores: Tensor
    num_answers: Tensor

    @classmethod
    def new(cls, beam_slots: int, blocks: int, device: torch.device) -> "SearchState":
        """Return the state of beams that have not begun.

        Args:
            beam_slots: largest number of beams at the same time.
            blocks: longest block table.
        """

        def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(2, beam_slots, *shape, dtype=dtype, device=device)

        return cls(
            tables=numbers(blocks),
            parents=numbers(),
            tokens=numbers(),
            scores=numbers(dtype=torch.float32),
            answers=numbers(3),
            answer_scores=numbers(dtype=torch.float32),
            num_answers=numbers(),
        )


class SearchResults(NamedTuple):
    """What a step has chosen, for all beams of its searches, one search after another.

    Attributes:
        ends: `[searches, 2]` int32: whether the search has ended, and its number of answers.
        beams: `[beams, 5]` int32: beam that each beam of the next step continues, and the token; then token, beam
            before it and number of tokens of the answer of this slot, best first.
        scores: `[beams]` fp32, of the answer of this slot.
    """

    ends: Tensor
    beams: Tensor
    scores: Tensor

    @classmethod
    def views(cls, numbers: Tensor, searches: int) -> "SearchResults":
        """Return results in this memory, `[2 · searches + 6 · beams]` int32."""
        beams = (len(numbers) - 2 * searches) // 6
        sizes = [2 * searches, 5 * beams, beams]
        ends, of_beams, scores = torch.split_with_sizes(numbers, sizes)
        return cls(ends.view(-1, 2), of_beams.view(-1, 5), scores.view(torch.float32))

    @staticmethod
    def numbers(searches: int, beams: int, device: torch.device) -> Tensor:
        """Return uninitialised memory for the results of searches, given all their beams."""
        return torch.empty(2 * searches + 6 * beams, dtype=torch.int32, device=device)


def follow_beams(
    state: SearchState,
    searches: Tensor,
    beam_slots: Tensor,
    given: Tensor,
    token_ids: Tensor,
    context_lens: Tensor,
    cu_blocks: Tensor,
    block_ids: Tensor,
    slots: Tensor,
    copies: Tensor,
    *,
    block_size: int,
) -> None:
    """Give each beam its token and its block table.

    The first step after the prompt has whole tables; the end of the prompt is in the block of the first beam, and is
    copied into the blocks of the others. After that, a table is the one of the beam that it continues. Among the
    beams that continue the same one, the first keeps the block that is not full; each other one takes the block of a
    beam that no one continues, into which that block is copied. Blocks that begin are in the step.

    Args:
        state: tables, parents and tokens are changed.
        searches: `[searches, FOLLOW_COLUMNS]` int32.
        beam_slots: `[beams]` int32, slot of each beam in the state.
        given: `[beams, 2]` int32, the beam that each beam continues and the token, or NOT_GIVEN: chosen on the device.
        token_ids: `[rows]` int32 of the step; written for beams.
        context_lens: `[rows]` int32, number of tokens of each row's sequence with the one of this step.
        cu_blocks, block_ids: `[rows + 1]` and `[blocks]` int32, the block table of each row; written for beams.
        slots: `[rows]` int64, block · block_size + place of each token; written for beams.
        copies: `[beams, 2]` int32, written: block to copy and its copy, before the model; a block of one beam alone is
            copied to itself where there is nothing to copy.
    """
    for first_row, beams, length, first_beam in searches.tolist():
        at = beam_slots[first_beam : first_beam + beams].long()
        now, before = length % 2, (length - 1) % 2
        of_search = given[first_beam : first_beam + beams]
        for kept, choices in zip((state.parents, state.tokens), of_search.unbind(1), strict=True):
            kept[now, at] = choices.where(choices != NOT_GIVEN, kept[now, at])
        parents = state.parents[now, at].tolist()
        last, place = divmod(int(context_lens[first_row]) - 1, block_size)
        unused = iter(sorted(set(range(beams)).difference(parents)))
        for beam, parent in enumerate(parents):
            row = first_row + beam
            table = block_ids[int(cu_blocks[row]) : int(cu_blocks[row]) + last + 1]
            if length > 1:
                begun = last if place == 0 else last + 1
                table[:begun] = state.tables[before, at[parent], :begun]
            source = int(table[last])
            if length == 1 and place:
                source = int(block_ids[int(cu_blocks[first_row]) + last])
            elif place and parent in parents[:beam]:
                table[last] = state.tables[before, at[next(unused)], last]
            copies[first_beam + beam] = torch.stack((torch.tensor(source), table[last]))
            state.tables[now, at[beam], : last + 1] = table
            token_ids[row] = state.tokens[now, at[beam]]
            slots[row] = int(table[last]) * block_size + place


def advance_searches(
    found: BeamCandidates,
    searches: Tensor,
    beam_slots: Tensor,
    divisors: Tensor,
    ends: Tensor,
    state: SearchState,
    out: SearchResults,
) -> None:
    """Choose the beams of the next step, and the answers.

    Candidates are the best tokens of all beams, by higher score, then lower beam, then better token of it. The best
    ones that do not end an answer are the next beams. One that ends an answer is an answer if it is among the best as
    many as there are beams. A search has ended if no beam is left, at the last token, or when there are as many answers
    as beams and, if it does not end with the last of them, no beam can be better than the worst answer.

    Args:
        found: the best tokens of each row, and log probabilities as their scores: `[rows, width]`. A row has at least
            as many as there are beams and end tokens of its search, or all tokens that are possible.
        searches: `[searches, ADVANCE_COLUMNS]` int32.
        beam_slots: `[beams]` int32, slot of each beam in the state.
        divisors: `[searches, 2]` fp32, not 0: length penalty of an answer of this length, and of the one that a beam
            may become.
        ends: `[ends]` int32, end tokens of all searches.
        state: changed, except for the tables. A search whose beams get their first token begins, with its first row.
    """
    rows = [each.tolist() for each in found]
    for index, search in enumerate(searches.tolist()):
        first, num_rows, beams, length, flags, forced, first_end, end, first_beam = search
        own = slice(first_beam, first_beam + beams)
        at, now, before = beam_slots[own].long(), length % 2, (length - 1) % 2
        begun = length == 1
        scores_before = [0.0] if begun else state.scores[before, at]
        count = 0 if begun else int(state.num_answers[before, at[0]])
        answers = [
            (float(state.answer_scores[before, each]), *state.answers[before, each].tolist())
            for each in at[:count]
        ]
        candidates = []
        for beam in range(1 if begun else num_rows):
            tokens, _, logprobs = (each[first + beam] for each in rows)
            if forced != NO_TOKEN:
                tokens, logprobs = [forced], [0.0]
            scores = (scores_before[beam] + torch.tensor(logprobs)).tolist()
            candidates += [
                (score, beam, token)
                for score, token in zip(scores, tokens, strict=True)
                if score > -torch.inf and token != NO_TOKEN
            ]
        # sorts are stable
        candidates.sort(key=itemgetter(0), reverse=True)
        of_search, (divisor, best_divisor) = set(ends[first_end:end].tolist()), divisors[index]
        for score, parent, token in candidates[:beams]:
            if flags & IS_LAST or token in of_search:
                answers.append((float(torch.tensor(score) / divisor), token, parent, length))
        answers.sort(key=itemgetter(0), reverse=True)
        del answers[beams:]
        live = [each for each in candidates if each[2] not in of_search][:beams]
        live += [(-torch.inf, 0, 0)] * (beams - len(live))
        for kept, column in ((state.scores, 0), (state.parents, 1), (state.tokens, 2)):
            values = [each[column] for each in live]
            kept[now, at] = torch.tensor(values, dtype=kept.dtype, device=kept.device)
        state.num_answers[now, at[0]] = len(answers)
        for each, (score, *answer) in zip(at, answers, strict=False):
            state.answer_scores[now, each] = score
            state.answers[now, each] = torch.tensor(answer, dtype=torch.int32)
        best = state.scores[now, at[0]]
        has_ended = bool(flags & IS_LAST) or best == -torch.inf
        if len(answers) == beams and not has_ended:
            worst = state.answer_scores[now, at[-1]]
            has_ended = bool(flags & ENDS_WHEN_FULL) or best / best_divisor <= worst
        out.ends[index] = torch.tensor([int(has_ended), len(answers)])
        out.beams[own, 0], out.beams[own, 1] = state.parents[now, at], state.tokens[now, at]
        out.beams[own, 2:] = state.answers[now, at]
        out.scores[own] = state.answer_scores[now, at]
