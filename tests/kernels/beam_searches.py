"""Random steps of searches with beams, and the same steps without tensors."""

import random
from itertools import count

import torch

from varlen_kernels.functions import (
    ENDS_WHEN_FULL,
    FOLLOW_COLUMNS,
    IS_LAST,
    NO_TOKEN,
    NOT_GIVEN,
)
from varlen_kernels.reference.beam import BeamCandidates
from varlen_kernels.reference.beam_search import SearchResults, SearchState

MOST_BEAMS, MOST_SLOTS, MOST_BLOCKS, BLOCK_SIZE = 5, 24, 6, 2


def new_state(device):
    return SearchState.new(MOST_SLOTS, MOST_BLOCKS, torch.device(device))


def ints(rows, *shape):
    return torch.tensor(rows, dtype=torch.int32).view(*shape)


class Searches:
    """Some searches in steps of one length: their arguments for ops, and what is right.

    Attributes:
        beams: number of beams of each.
        length: tokens of each beam.
    """

    def __init__(self, seed):
        self.rng = random.Random(seed)
        searches = self.rng.randint(1, 4)
        self.beams = [self.rng.randint(1, MOST_BEAMS) for _ in range(searches)]
        # in any order
        self.beam_slots = ints(self.rng.sample(range(MOST_SLOTS), sum(self.beams)), -1)
        self.vocabulary = self.rng.randint(1, 9)
        self.prompt = self.rng.randint(1, 3)
        self.last = self.rng.randint(1, 8)
        self.length = 0
        # of each search: live beams (score, parent, token), and answers (score, token, parent, length)
        self.live = [[(0.0, 0, 0)] for _ in self.beams]
        self.answers = [[] for _ in self.beams]
        self.blocks = count()
        # then only the first row counts
        self.begins_with_beams = self.rng.random() < 0.5

    @property
    def first_beams(self):
        return [sum(self.beams[:place]) for place in range(len(self.beams))]

    def rows(self):
        """Return the number of rows of each search: its beams, or its prompt."""
        has_beams = self.length or self.begins_with_beams
        return self.beams if has_beams else [1] * len(self.beams)

    def candidates(self):
        """Return the best tokens of each row, some of them equally good."""
        numbers = torch.Generator().manual_seed(self.rng.randrange(1 << 30))
        logits = torch.randn(sum(self.rows()), self.vocabulary, generator=numbers)
        if self.rng.random() < 0.4:
            logits = logits.round()
        logprobs = logits.log_softmax(1)
        if self.rng.random() < 0.2:
            logprobs[torch.rand(logits.shape, generator=numbers) < 0.4] = -torch.inf
        order = torch.sort(logprobs, dim=1, descending=True, stable=True)
        tokens = order.indices.int().masked_fill(order.values == -torch.inf, NO_TOKEN)
        return BeamCandidates(tokens, tokens, order.values.contiguous())

    def advance(self):
        """Return the arguments of `advance_searches`, without the state and the results."""
        found, counts = self.candidates(), self.rows()
        self.length += 1
        rows, first_row, divisors, ends = [], 0, [], []
        forced = self.rng.choice([NO_TOKEN] * 4 + [self.rng.randrange(self.vocabulary)])
        for place, (beams, num_rows) in enumerate(zip(self.beams, counts, strict=True)):
            own_ends = self.rng.sample(
                range(self.vocabulary), self.rng.randint(0, min(3, self.vocabulary))
            )
            flags = IS_LAST if self.length == self.last else 0
            flags |= ENDS_WHEN_FULL if self.rng.random() < 0.3 else 0
            of_ends = len(ends), len(ends) + len(own_ends)
            first_beam = self.first_beams[place]
            rows += [first_row, num_rows, beams, self.length, flags, forced]
            rows += [*of_ends, first_beam]
            ends += own_ends
            divisors += [self.rng.uniform(0.5, 3), self.rng.uniform(0.5, 3)]
            first_row += num_rows
        searches = ints(rows, len(self.beams), -1)
        return found, searches, self.beam_slots, torch.tensor(divisors).view(-1, 2), ints(ends, -1)

    def right(self, found, searches, _, divisors, ends):
        """Return what each search has chosen: live beams, answers, and whether it has ended."""
        results = []
        for place, search in enumerate(searches.tolist()):
            first, num_rows, beams, length, flags, forced, begin, end, _ = search
            candidates = []
            for beam, (score, _, _) in enumerate(self.live[place][:num_rows]):
                tokens, logprobs = found.tokens[first + beam], found.scores[first + beam]
                pairs = list(zip(tokens.tolist(), logprobs.tolist(), strict=True))
                for token, logprob in [(forced, 0.0)] if forced != NO_TOKEN else pairs:
                    total = float(torch.tensor(score) + torch.tensor(logprob))
                    if token != NO_TOKEN and total > -torch.inf:
                        candidates.append((total, beam, token))
            candidates.sort(key=lambda each: -each[0])
            own_ends = ends[begin:end].tolist()
            answers = self.answers[place]
            for total, beam, token in candidates[:beams]:
                if token in own_ends or flags & IS_LAST:
                    answers.append(
                        (float(torch.tensor(total) / divisors[place, 0]), token, beam, length)
                    )
            answers.sort(key=lambda each: -each[0])
            del answers[beams:]
            live = [each for each in candidates if each[2] not in own_ends][:beams]
            has_ended = not live or bool(flags & IS_LAST)
            if len(answers) == beams and not has_ended:
                can_improve = float(torch.tensor(live[0][0]) / divisors[place, 1]) > answers[-1][0]
                has_ended = bool(flags & ENDS_WHEN_FULL) or not can_improve
            self.live[place] = live + [(-torch.inf, 0, 0)] * (beams - len(live))
            results.append((self.live[place], answers, has_ended))
        return results

    def results(self):
        """Return memory for the results of a step."""
        return SearchResults.numbers(len(self.beams), sum(self.beams), torch.device("cpu"))

    def follow(self):
        """Return the arguments of `follow_beams` after the last tokens, without the state."""
        total, position = sum(self.beams), self.prompt + self.length - 1
        columns = position // BLOCK_SIZE + 1
        searches = [
            [first, beams, self.length, first]
            for first, beams in zip(self.first_beams, self.beams, strict=True)
        ]
        # new ones in every step
        blocks = ints([next(self.blocks) for _ in range(total * columns)], -1)
        given = torch.full((total, 2), NOT_GIVEN, dtype=torch.int32)
        if self.rng.random() < 0.3:
            place = self.rng.randrange(len(self.beams))
            self.live[place] = [
                (
                    score,
                    self.rng.randrange(self.beams[place] if self.length > 1 else 1),
                    self.rng.randrange(9),
                )
                for score, _, _ in self.live[place]
            ]
            own = slice(self.first_beams[place], self.first_beams[place] + self.beams[place])
            given[own] = ints([each[1:] for each in self.live[place]], -1, 2)
        return (
            ints(searches, -1, FOLLOW_COLUMNS),
            self.beam_slots,
            given,
            torch.zeros(total, dtype=torch.int32),
            torch.full((total,), position + 1, dtype=torch.int32),
            torch.arange(total + 1, dtype=torch.int32) * columns,
            blocks,
            torch.zeros(total, dtype=torch.int64),
            torch.zeros(total, 2, dtype=torch.int32),
        )
