"""Searches of the device have the same answers as searches of the host."""

import random
from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.backend.decoding.search.beam_oracles import TableModel
from tests.backend.decoding.sequences import sequences_of
from varlen.costs.model import BatchShape
from varlen.decoding.search.beam_search import BeamSearch, DeviceSearch, can_leave_to_device
from varlen.decoding.token_edits import NOTHING_FORBIDDEN, ForbiddenTokens, TokenRules
from varlen.execution.cpu.runner import tensors_of
from varlen.execution.packing import pack_step
from varlen.execution.token_state import DeviceSearches, choices_of
from varlen.request.generation import GenerationOptions
from varlen.scheduling.batch import Batch, Chunk
from varlen.scheduling.device_plan import NOT_TAKEN, DevicePlan
from varlen_kernels import cpu, reference

VOCABULARY = 12
END = 3


def random_rules(rng):
    rules = TokenRules((END, 5)[: rng.randint(0, 2)])
    if rng.random() < 0.3:
        rules = replace(rules, forced_first_id=rng.randrange(VOCABULARY))
    if rng.random() < 0.3:
        rules = replace(rules, forced_last_id=END)
    if rng.random() < 0.4:
        rules = replace(
            rules, suppressed_ids=tuple(rng.sample(range(VOCABULARY), rng.randint(1, 9)))
        )
    if rng.random() < 0.3:
        rules = replace(rules, first_suppressed_ids=tuple(rng.sample(range(VOCABULARY), 4)))
    return rules


def random_options(rng):
    num_beams, max_tokens = rng.randint(2, 5), rng.randint(1, 9)
    return {
        "num_beams": num_beams,
        "n": rng.randint(1, num_beams),
        "max_tokens": max_tokens,
        "min_tokens": rng.choice([0, 0, min(2, max_tokens)]),
        "early_stopping": rng.choice([True, False, "never"]),
        "length_penalty": rng.choice([-1.0, 0.0, 0.6, 1.0, 2.0]),
        "length_penalty_type": rng.choice(["hf", "gnmt"]),
        "stop_token_ids": rng.choice([(), (7,)]),
    }


class Steps:
    """Takes the steps of searches on a CPU.

    Attributes:
        searches: each with its number, by which its beams have places, its table of log probabilities and its
            sequence.
    """

    def __init__(self, ops, searches, *, renormalizes):
        self.searches = searches
        self.device = DeviceSearches(ops, torch.device("cpu"), rows=45, blocks=4, block_size=4)
        self.renormalizes = renormalizes
        # tokens of each beam, by search
        self.beams = {number: [[]] for number, *_ in searches}
        self.answers = {}

    def take(self):
        """Take a step of all searches without answers; return whether there were any."""
        live = [each for each in self.searches if each[0] not in self.answers]
        if not live:
            return False
        chunks, rules, rows = [], [], []
        for number, model, sequence, search in live:
            beams = self.beams[number]
            length = len(beams[0])
            num_beams = sequence.generation.num_beams if length else 0
            chunks.append(
                Chunk(
                    sequence,
                    sequence.num_tokens + length - 1 if length else 0,
                    (0,) * (num_beams or 1),
                    array("i", [0]) * (num_beams or 1),
                    (sequence,),
                    beam_slots=tuple(range(5 * number, 5 * number + sequence.generation.num_beams)),
                    beams=num_beams,
                )
            )
            assert chunks[-1].num_generated == length
            rules.append(search.rules(length))
            rows += [model.logprobs(beam) for beam in beams]
        step = Batch((), BatchShape.of([1]), 0.0, "", tuple(chunks))
        choice = DevicePlan(searches=rules, renormalizes=self.renormalizes)
        packed = pack_step(step, 64, choice)
        logits = torch.from_numpy(np.array(rows, np.float32))
        numbers = self.device.advance(logits, packed.searches, tensors_of(packed.searches))
        chosen = choices_of(numbers.numpy()[None], len(rules))
        beams = chosen.beams[0]
        first = 0
        for place, (number, _, sequence, search) in enumerate(live):
            own = slice(first, first + sequence.generation.num_beams)
            first = own.stop
            length = len(self.beams[number][0])
            of_search = chosen.ends[:, place].tolist(), chosen.beams[:, own], chosen.scores[:, own]
            found = search.read(length, *of_search)
            if found.answers is not None:
                self.answers[number] = found.answers
            before = self.beams[number]
            self.beams[number] = [
                [*before[parent], token] for parent, token in beams[own, :2].tolist()
            ]
        return True


@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("renormalizes", [False, True], ids=["", "renormalizes"])
@pytest.mark.parametrize("seed", range(25))
def test_answers_are_those_of_searches_on_the_host(ops, renormalizes, seed):
    rng = random.Random(seed)
    searches, expected = [], []
    for number in rng.sample(range(9), 3):
        options, rules = random_options(rng), random_rules(rng)
        model = TableModel(VOCABULARY, rng.randrange(1 << 30))
        sequence = sequences_of(0, **options)[0]
        if renormalizes:
            # without bans nothing is left to normalize, and the host normalizes elsewhere
            rules = replace(rules, suppressed_ids=(), first_suppressed_ids=())
            options["min_tokens"] = 0
            sequence = sequences_of(0, **options)[0]
        arguments = {"rules": rules, "vocab_size": VOCABULARY}
        on_host = BeamSearch(sequence.generation, [0], **arguments)
        expected.append(model.run(on_host))
        searches.append(
            (number, model, sequence, DeviceSearch(sequence.generation, [0], **arguments))
        )

    steps = Steps(ops, searches, renormalizes=renormalizes)
    while steps.take():
        pass

    for (number, *_), answers in zip(searches, expected, strict=True):
        found = steps.answers[number]
        assert [each.token_ids for each in found] == [each.token_ids for each in answers]
        assert [each.finish_reason for each in found] == [each.finish_reason for each in answers]
        # sums of at most nine numbers, in fp32
        assert [each.score for each in found] == pytest.approx(
            [each.score for each in answers], rel=1e-5
        )


def test_scores_are_normalized_again_without_banned_tokens():
    model = TableModel(VOCABULARY)
    sequence = sequences_of(0, num_beams=2, max_tokens=1, length_penalty=0.0)[0]
    rules = TokenRules((END,), suppressed_ids=(0, 4, 9))
    search = DeviceSearch(sequence.generation, [0], rules=rules, vocab_size=VOCABULARY)
    steps = Steps(cpu, [(0, model, sequence, search)], renormalizes=True)
    steps.take()

    logprobs = torch.from_numpy(model.logprobs([]))
    logprobs[[0, 4, 9]] = -torch.inf
    best = logprobs.log_softmax(0).max(0)
    [answer] = steps.answers[0]
    assert answer.token_ids == (int(best.indices),)
    assert answer.score == pytest.approx(float(best.values), rel=1e-5)


def test_a_step_that_was_taken_again_counts_once():
    sequence = sequences_of(0, num_beams=2, max_tokens=3)[0]
    search = DeviceSearch(sequence.generation, [0], rules=TokenRules((END,)), vocab_size=VOCABULARY)
    goes_on = np.array([[[0, 1, 0, 0, 0], [0, 2, 0, 0, 0]]], np.int32)
    scores = np.zeros((1, 2), np.float32)
    search.read(0, [[0, 0]], goes_on[:, ::-1], scores)
    search.read(0, [[0, 0]], goes_on, scores)
    last = np.array([[[0, 0, 8, 1, 2], [0, 0, 0, 0, 0]]], np.int32)

    step = search.read(1, [[1, 1]], last, scores)

    assert [answer.token_ids for answer in step.answers] == [(2, 8)]
    assert step.answers[0].finish_reason == "length"


def test_a_launch_counts_the_steps_that_ran():
    sequence = sequences_of(0, num_beams=2, max_tokens=9)[0]
    search = DeviceSearch(sequence.generation, [0], rules=TokenRules((END,)), vocab_size=VOCABULARY)
    first, second, none = [[0, 1], [0, 2]], [[1, 3], [0, 4]], [[0, 0], [0, 0]]
    beams = np.zeros((3, 2, 5), np.int32)
    beams[:, :, :2] = first, second, none
    scores = np.zeros((3, 2), np.float32)

    step = search.read(0, [[0, 0], [0, 0], [NOT_TAKEN, 0]], beams, scores)
    again = search.read(2, [[NOT_TAKEN, 0]], beams[2:], scores[2:])
    beams[0, 0, 2:] = END, 0, 3
    end = search.read(2, [[1, 1]], beams[:1], scores[:1])

    assert (step.count, step.parents, step.answers) == (2, (0, 0, 1, 0), None)
    assert (again.count, again.parents, again.answers) == (0, (), None)
    # the first beam has continued the second one
    assert end.answers[0].token_ids == (2, 3, END)


@pytest.mark.parametrize(
    ("options", "count", "is_alike"),
    [
        ({}, 5, True),
        # the step behind it is the last one
        ({}, 6, False),
        ({"min_tokens": 4}, 3, False),
        ({"min_tokens": 8}, 3, True),
        ({"suppress_tokens": (1,)}, 3, True),
        ({"early_stopping": "never", "length_penalty": 2.0}, 3, True),
    ],
)
def test_later_steps_of_a_launch_differ_in_their_divisors_alone(options, count, is_alike):
    sequence = sequences_of(0, **{"num_beams": 2, "max_tokens": 9, **options})[0]
    search = DeviceSearch(sequence.generation, [0], rules=TokenRules((END,)), vocab_size=VOCABULARY)
    first = search.rules(2)

    later = search.later(2, count)

    if not is_alike:
        assert later is None
        return
    rules = [search.rules(2 + i) for i in range(1, count + 1)]
    assert list(later) == [(each.divisor, each.best_divisor) for each in rules]
    assert all(str(each[:6]) == str(first[:6]) for each in rules)


@pytest.mark.parametrize(
    "options, is_left",
    [
        ({}, True),
        ({"min_tokens": 2, "suppress_tokens": (1,), "early_stopping": "never"}, True),
        ({"repetition_penalty": 1.1}, False),
        ({"no_repeat_ngram_size": 2}, False),
        ({"logit_bias": ((1, 2.0),)}, False),
        ({"do_sample": True}, False),
        ({"num_beam_groups": 2, "diversity_penalty": 0.5}, False),
        ({"diversity_type": "sibling", "diversity_penalty": 0.5}, False),
    ],
    ids=str,
)
def test_what_depends_on_tokens_or_chance_is_left_to_the_host(options, is_left):
    options = GenerationOptions(num_beams=4, max_tokens=5, **options)

    assert can_leave_to_device(options, NOTHING_FORBIDDEN) == is_left
    assert can_leave_to_device(options, ForbiddenTokens.of([(1,)], VOCABULARY)) == is_left
    assert not can_leave_to_device(options, ForbiddenTokens.of([(1, 2)], VOCABULARY))
