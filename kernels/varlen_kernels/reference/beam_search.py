"""What searches with beams do in a step, apart from the model, in plain torch.

`advance_searches` comes after the model: out of the best tokens of each beam, it chooses the beams of the next step and
the answers, and finds searches that have ended. `follow_beams` comes before the next step of the model: each beam
takes the block table of the beam that it continues.

All that a search needs is where the model runs, so a step can start before anyone has read what the one before it
chose. A step that failed may run again: it reads only what the step before it wrote.

Source of the finish rule: `_beam_search` of Hugging Face's `generate`, version 5.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from varlen_kernels.reference.beam import NO_TOKEN, BeamCandidates

# Columns of `follow_beams`: number of the search, row of its first beam, number of beams, tokens of each beam with the
# one of this step, and place of its first beam among all beams.
FOLLOW_COLUMNS = 5
# Columns of `advance_searches`: number of the search, its first row of candidates, and their number; number of beams;
# tokens of each beam with the one that is chosen; flags; the only token that may be chosen, or NO_TOKEN; from where and
# up to where its end tokens are among all of them; place of its first beam among all beams.
ADVANCE_COLUMNS = 10
# Flags: the token that is chosen is the last one; the search ends once there are as many answers as beams.
IS_LAST, ENDS_WHEN_FULL = 1, 2
# A token that is chosen on the device.
NOT_GIVEN = -1


class SearchState(NamedTuple):
    """What each search keeps from one step to the next.

    There are two rows for each search: one while its beams have an even number of tokens, and one while it is odd. Rows
    of even numbers come first, by number of the search.

    Attributes:
        tables: `[rows, beams, blocks]` int32, the block table of each beam.
        parents: `[rows, beams]` int32, the beam of the step before that each beam continues.
        tokens: `[rows, beams]` int32, the token that it continues it with.
        scores: `[rows, beams]` fp32, its sum of log probabilities; -inf for a beam that is not alive.
        num_answers: `[rows]` int32.
        answers: `[rows, beams, 3]` int32, the best ones first: last token, beam before it, number of tokens.
        answer_scores: `[rows, beams]` fp32, divided by the length penalty.
    """

    tables: Tensor
    parents: Tensor
    tokens: Tensor
    scores: Tensor
    num_answers: Tensor
    answers: Tensor
    answer_scores: Tensor

    @classmethod
    def new(cls, searches: int, beams: int, blocks: int, device: torch.device) -> "SearchState":
        """Return the state of searches that have not begun.

        Args:
            searches: largest number of them.
            beams: largest number of beams of one.
            blocks: longest block table.
            device: device of the logits.
        """
        each = 2 * searches, beams

        def ids(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            tables=ids(*each, blocks),
            parents=ids(*each),
            tokens=ids(*each),
            scores=torch.zeros(each, device=device),
            num_answers=ids(2 * searches),
            answers=ids(*each, 3),
            answer_scores=torch.zeros(each, device=device),
        )

    def of(self, number: int, length: int) -> "SearchState":
        """Return what one search has of beams with this number of tokens."""
        row = length % 2 * (len(self.tables) // 2) + number
        return SearchState(*(each[row] for each in self))


class SearchResults(NamedTuple):
    """What a step has chosen, for all beams of its searches, one search after another.

    Attributes:
        ends: `[searches, 2]` int32: whether the search has ended, and its number of answers.
        beams: `[beams, 5]` int32: beam that each beam of the next step continues, and the token; then token, beam
            before it and number of tokens of the answer of this place, best first.
        scores: `[beams]` fp32, of the answer of this place.
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
        """Return uninitialised memory for the results of searches that have so many beams together."""
        return torch.empty(2 * searches + 6 * beams, dtype=torch.int32, device=device)


def follow_beams(
    state: SearchState,
    searches: Tensor,
    given: Tensor,
    token_ids: Tensor,
    position_ids: Tensor,
    cu_blocks: Tensor,
    block_ids: Tensor,
    slots: Tensor,
    copies: Tensor,
    *,
    block_size: int,
) -> None:
    """Give each beam its token and its block table.

    The first step after the prompt has whole tables; the end of the prompt is in the block of the first beam, and is
    copied into those of the others. After that, a table is the one of the beam that it continues. Of the beams that
    continue the same one, the first keeps the block that is not full; each other one takes the block of a beam that no
    one continues, into which that block is copied. Blocks that begin are in the step.

    Args:
        state: tables, parents and tokens are changed.
        searches: `[searches, FOLLOW_COLUMNS]` int32.
        given: `[beams, 2]` int32, the beam that each beam continues and the token, or NOT_GIVEN: chosen on the device.
        token_ids, position_ids: `[rows]` int32 of the step; tokens of beams are written.
        cu_blocks, block_ids: `[rows + 1]` and `[blocks]` int32, the block table of each row; written for beams.
        slots: `[rows]` int64, block · block_size + place of each token; written for beams.
        copies: `[beams, 2]` int32, written: block to copy and its copy, before the model; a block of one beam alone is
            copied to itself where there is nothing to copy.
        block_size: tokens of a block.
    """
    for number, first_row, beams, length, first_beam in searches.tolist():
        now, before = state.of(number, length), state.of(number, length - 1)
        of_search = given[first_beam : first_beam + beams]
        for kept, choices in zip((now.parents, now.tokens), of_search.unbind(1), strict=True):
            kept[:beams] = choices.where(choices != NOT_GIVEN, kept[:beams])
        parents = now.parents[:beams].tolist()
        last, place = divmod(int(position_ids[first_row]), block_size)
        unused = iter(sorted(set(range(beams)).difference(parents)))
        for beam, parent in enumerate(parents):
            row = first_row + beam
            table = block_ids[int(cu_blocks[row]) : int(cu_blocks[row]) + last + 1]
            if length > 1:
                begun = last if place == 0 else last + 1
                table[:begun] = before.tables[parent, :begun]
            source = int(table[last])
            if length == 1 and place:
                source = int(block_ids[int(cu_blocks[first_row]) + last])
            elif place and parent in parents[:beam]:
                table[last] = before.tables[next(unused), last]
            copies[first_beam + beam] = torch.stack((torch.tensor(source), table[last]))
            now.tables[beam, : last + 1] = table
            token_ids[row] = now.tokens[beam]
            slots[row] = int(table[last]) * block_size + place


def advance_searches(
    found: BeamCandidates,
    searches: Tensor,
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
        divisors: `[searches, 2]` fp32: length penalty of an answer of this length, and of the one that a beam may
            become.
        ends: `[ends]` int32, end tokens of all searches.
        state: changed, except for the tables. A search whose beams get their first token begins.
        out: written.
    """
    rows = [each.tolist() for each in found]
    for place, search in enumerate(searches.tolist()):
        number, first, num_rows, beams, length, flags, forced, first_end, end, first_beam = search
        now, before = state.of(number, length), state.of(number, length - 1)
        if length == 1:
            before.scores[0] = 0
            before.num_answers.fill_(0)
        for kept, old in zip(now[4:], before[4:], strict=True):
            kept.copy_(old)
        candidates = []
        for beam in range(num_rows):
            tokens, _, logprobs = (each[first + beam] for each in rows)
            if forced != NO_TOKEN:
                tokens, logprobs = [forced], [0.0]
            scores = (before.scores[beam] + torch.tensor(logprobs)).tolist()
            candidates += [
                (score, beam, token)
                for score, token in zip(scores, tokens, strict=True)
                if score > -torch.inf and token != NO_TOKEN
            ]
        # stable
        candidates.sort(key=lambda candidate: candidate[0], reverse=True)
        of_search, (divisor, best_divisor) = set(ends[first_end:end].tolist()), divisors[place]
        for score, parent, token in candidates[:beams]:
            if flags & IS_LAST or token in of_search:
                answer_score = float(torch.tensor(score) / divisor)
                _insert_answer(now, beams, answer_score, (token, parent, length))
        live = [each for each in candidates if each[2] not in of_search][:beams]
        live += [(-torch.inf, 0, 0)] * (beams - len(live))
        for kept, column in ((now.scores, 0), (now.parents, 1), (now.tokens, 2)):
            kept[:beams] = torch.tensor([each[column] for each in live], dtype=kept.dtype)
        count, best = int(now.num_answers), now.scores[0]
        has_ended = bool(flags & IS_LAST) or best == -torch.inf
        if count == beams and not has_ended:
            worst = now.answer_scores[beams - 1]
            has_ended = bool(flags & ENDS_WHEN_FULL) or best / best_divisor <= worst
        own = slice(first_beam, first_beam + beams)
        out.ends[place] = torch.tensor([int(has_ended), count])
        out.beams[own, 0], out.beams[own, 1] = now.parents[:beams], now.tokens[:beams]
        out.beams[own, 2:] = now.answers[:beams]
        out.scores[own] = now.answer_scores[:beams]


def _insert_answer(
    search: SearchState, beams: int, score: float, answer: tuple[int, int, int]
) -> None:
    """Insert an answer after those that are better or equal; the worst one falls out."""
    count, scores, answers = int(search.num_answers), search.answer_scores, search.answers
    place = int((scores[:count] >= score).sum())
    if place == beams:
        return
    count = min(count + 1, beams)
    scores[place + 1 : count] = scores[place : count - 1].clone()
    answers[place + 1 : count] = answers[place : count - 1].clone()
    scores[place], answers[place] = score, torch.tensor(answer)
    search.num_answers.fill_(count)
