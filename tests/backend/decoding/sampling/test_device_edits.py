"""Biases, bans and penalties on the device give the tokens that the host chooses."""

import gc
from weakref import ref

import numpy as np
import pytest
import torch

from tests.backend.decoding.sandboxes import new_grammars
from tests.backend.decoding.sequences import sample, sequence_of
from tests.backend.decoding.text.small_tokenizers import byte_level
from varlen.decoding.sampling.sampling import Sampler
from varlen.decoding.token_edits import BadWords
from varlen.execution.cpu.runner import tensors_of
from varlen.execution.packing import begun_arrays, draw_arrays
from varlen.execution.token_state import DeviceEdits
from varlen.scheduling.device_plan import EditLimits
from varlen_kernels import cpu
from varlen_kernels.reference.logit_edits import KEPT

VOCABULARY, EOS, CPU = 402, 3, torch.device("cpu")
LENGTH = 12
NONE, ENOUGH = EditLimits(0, 0), EditLimits(8, VOCABULARY)


def new_sampler(limits=NONE):
    tokenizer = byte_level()
    grammars = new_grammars(tokenizer, VOCABULARY, [])
    bad_words = BadWords(tokenizer, VOCABULARY, [EOS])
    return Sampler(VOCABULARY, [EOS], grammars, bad_words, CPU, limits)


class Device:
    """A sampler with a device, which has lists of edited tokens."""

    def __init__(self, limits=ENOUGH):
        self.sampler = new_sampler(limits)
        self.edits = DeviceEdits(cpu, CPU, limits)

    def run(self, draws, logits, token_ids):
        """Return the tokens that the device draws, given the last tokens."""
        token_ids = torch.tensor(token_ids, dtype=torch.int32)
        if draws.edits is not None:
            rows, penalties = map(torch.from_numpy, draws.edits[:2])
            begun = tensors_of(begun_arrays(draws.edits))
            every_row = torch.arange(len(logits), dtype=torch.int32)
            self.edits.apply(logits, token_ids, every_row, rows, penalties, **begun)
        if draws.uniform is None:
            return logits.argmax(1).tolist()
        return cpu.sample_tokens(logits, **tensors_of(draw_arrays(draws))).tolist()


def random_options(rng, *, needs_host):
    """Return random options of a sequence; with `needs_host` perhaps some that only the host serves."""
    choices = {
        "temperature": [0.0, 0.7, 1.5],
        "top_k": [0, 3],
        "repetition_penalty": [1.0, 1.0, 1.7, 0.6],
        "presence_penalty": [0.0, 0.0, 1.2],
        "frequency_penalty": [0.0, 0.0, -0.8, 2.0],
        "logit_bias": [(), (), ((7, 4.5), (EOS, 3.0), (9, -100.0))],
        "min_tokens": [0, 0, 3],
        "stop_token_ids": [(), (8, 20)],
        "bad_words": [(), ("1", "the"), ("zq",)] if needs_host else [(), ("1", "the")],
        "logprobs": [None, 1] if needs_host else [None],
    }
    found = {name: each[int(rng.integers(len(each)))] for name, each in choices.items()}
    return {"seed": int(rng.integers(9)), "max_tokens": LENGTH, **found}


def random_sequences(seed, count):
    rng = np.random.default_rng(seed)
    made = [
        (rng.integers(0, 40, int(rng.integers(1, 9))), random_options(rng, needs_host=not number))
        for number in range(count)
    ]
    return [sequence_of(*prompt.tolist(), **options) for prompt, options in made]


def logits_of(number, length):
    """Return the logits of a sequence at this length; few are large."""
    found = np.random.default_rng([number, length]).normal(size=VOCABULARY)
    found[:40] += 2
    return found.astype(np.float32)


def expected_answers(sequences):
    """Return the answers that the host chooses, token by token."""
    sampler = new_sampler()
    for number, sequence in enumerate(sequences):
        for length in range(LENGTH):
            [token] = sample(sampler, torch.from_numpy(logits_of(number, length))[None], [sequence])
            sequence.token_ids.append(token.token_id)
    return [each.token_ids for each in sequences]


@pytest.mark.parametrize("slots", [0, 2, 8])
@pytest.mark.parametrize("seed", range(15))
def test_steps_ahead_that_fail_and_run_again_give_the_tokens_of_the_host(seed, slots):
    count = 6
    expected = expected_answers(random_sequences(seed, count))
    sequences, rng = random_sequences(seed, count), np.random.default_rng(seed)
    device, in_flight, drawn = Device(EditLimits(slots, VOCABULARY)), None, 0

    def run(step):
        members, lengths, draws = step
        logits = torch.from_numpy(np.stack([*map(logits_of, members, lengths)]))
        own = [sequences[each] for each in members]
        if draws is None:
            return [token.token_id for token in device.sampler.sample(logits, own, lengths)]
        return device.run(draws, logits, [each.token_ids[-1] for each in own])

    while unfinished := [n for n in range(count) if sequences[n].status != "finished"]:
        # every running sequence is in every step, but the size of a step changes
        members = rng.permutation(unfinished)[: rng.integers(1, 4)].tolist()
        ahead = () if in_flight is None else in_flight[0]
        lengths = [sequences[each].num_generated + (each in ahead) for each in members]
        draws = device.sampler.draws([sequences[each] for each in members], lengths)
        drawn += draws is not None
        step = members, lengths, draws
        if in_flight is not None and rng.random() < 0.15:
            # the device may have run both, but nothing has read them
            if in_flight[2] is not None and rng.random() < 0.5:
                run(in_flight)
            in_flight = None
            if rng.random() < 0.2:
                device.sampler.forget()
            continue
        if in_flight is not None:
            for each, token in zip(in_flight[0], run(in_flight), strict=True):
                if sequences[each].status != "finished":
                    sequences[each].token_ids.append(token)
                    if sequences[each].num_generated == LENGTH:
                        sequences[each].finish()
        in_flight = step

    assert [each.token_ids for each in sequences] == expected
    assert drawn or slots == 0


@pytest.mark.parametrize("slots", [0, 2, 8])
@pytest.mark.parametrize("seed", range(5))
def test_rows_of_drafted_tokens_give_the_tokens_of_the_host(seed, slots):
    count, accepted, drawn = 5, 0, 0
    expected = expected_answers(random_sequences(seed, count))
    sequences, rng = random_sequences(seed, count), np.random.default_rng(seed)
    device = Device(EditLimits(slots, VOCABULARY))
    while unfinished := [n for n in range(count) if sequences[n].num_generated < LENGTH]:
        members = rng.permutation(unfinished)[: rng.integers(1, 4)].tolist()
        unknown, drafts, rows = [], {}, []
        for number in members:
            sequence = sequences[number]
            length, options = sequence.num_generated, sequence.generation
            guesses = expected[number][len(sequence.token_ids) :][: rng.integers(0, 4)]
            if options.bad_words or length < options.min_tokens or len(guesses) + length == LENGTH:
                guesses = []
            if guesses and rng.random() < 0.2:
                guesses[-1] = 1 + guesses[-1]
            if length and rng.random() < 0.5:
                # the step before it has chosen a token that only the device knows
                unknown.append((sequence, sequence.token_ids.pop()))
                drafted = [unknown[-1][1], *guesses]
            else:
                drafted = guesses
            ends = range(len(drafted) - len(guesses) + 1, len(drafted) + 1)
            drafts[number] = guesses
            rows += [(number, length + i, drafted[:end]) for i, end in enumerate(ends, 1)]
        rows += [(number, sequences[number].num_generated, ()) for number in members]
        held = {id(sequence) for sequence, _ in unknown}
        rows = [
            (n, length + (not drafted and id(sequences[n]) in held), drafted)
            for n, length, drafted in rows
        ]
        numbers, lengths, drafted = zip(*rows, strict=True)
        own = [sequences[number] for number in numbers]
        draws = device.sampler.draws(own, lengths, drafted)
        for sequence, token in unknown:
            sequence.token_ids.append(token)
        logits = torch.from_numpy(np.stack([*map(logits_of, numbers, lengths)]))
        if draws is None:
            tokens = [
                each.token_id for each in device.sampler.sample(logits, own, lengths, drafted)
            ]
        else:
            drawn += any(drafted)
            inputs = [
                (guesses or sequence.token_ids)[-1]
                for sequence, guesses in zip(own, drafted, strict=True)
            ]
            tokens = device.run(draws, logits, inputs)
        found = dict(zip(zip(numbers, lengths, strict=True), tokens, strict=True))
        for number in members:
            sequence = sequences[number]
            sequence.token_ids.append(found[number, sequence.num_generated])
            for guess in drafts[number]:
                if sequence.token_ids[-1] != guess:
                    break
                accepted += 1
                sequence.token_ids.append(found[number, sequence.num_generated])

    assert [each.token_ids for each in sequences] == expected
    assert accepted
    assert drawn or slots < 8


def test_a_list_is_sent_once_and_again_after_a_step_that_did_not_count():
    device = Device()
    sequence = sequence_of(1, 2, seed=1, frequency_penalty=0.5, repetition_penalty=1.1)

    def columns(length):
        draws = device.sampler.draws([sequence], [length])
        _, _, is_added, _, _, end = draws.edits.rows[0].tolist()
        return bool(is_added), end == KEPT, draws.edits.tokens.tolist()

    assert columns(0) == (False, False, [1, 2])
    assert columns(1) == (True, True, [])
    # the same step again, before and after its token is known
    assert columns(1) == (True, False, [1, 2])
    sequence.token_ids.append(5)
    assert columns(1) == (False, False, [1, 2, 5])
    # the last token is known, too, but the list has not got it
    sequence.token_ids.append(6)
    assert columns(2) == (True, True, [])
    # the host has chosen a token meanwhile
    assert columns(4) == (True, False, [1, 2, 5, 6])


def test_a_list_of_biases_alone_does_not_grow():
    device = Device()
    sequence = sequence_of(1, 2, seed=1, logit_bias=((4, 1.0),), min_tokens=2)
    found = [device.sampler.draws([sequence], [length]).edits for length in range(3)]

    assert [each.rows[0, 2:4].tolist() for each in found] == [[0, 1], [0, 1], [0, 0]]
    assert [each.tokens.tolist() for each in found] == [[EOS, 4], [], []]


def test_places_are_free_once_their_sequences_have_ended():
    device = Device(EditLimits(1, VOCABULARY))
    first, second = (sequence_of(1, 2, seed=1, presence_penalty=1.0) for _ in range(2))

    assert device.sampler.draws([first], [0]).edits is not None
    assert device.sampler.draws([first, second], [1, 0]) is None
    # the first one is preempted, and comes back
    assert device.sampler.draws([second], [0]).edits.rows[:, 1].tolist() == [0]
    assert device.sampler.draws([first], [1]).edits.rows[:, 4].tolist() != [KEPT]
    first.finish()
    # a step that was scheduled before has both
    assert device.sampler.draws([first, second], [2, 0]).edits.rows[:, 0].tolist() == [1]


def test_a_sequence_that_has_ended_is_not_kept():
    device = Device()
    sequence = sequence_of(1, 2, seed=1, presence_penalty=1.0)
    device.sampler.draws([sequence], [0])
    state = ref(sequence.sampler_state)

    sequence.finish()
    gc.collect()

    assert state() is None


def test_the_host_goes_on_before_the_token_of_the_device_is_appended():
    device = Device()
    edited, other = sequence_of(1, seed=1, presence_penalty=1.0), sequence_of(1, logprobs=0)
    logits = torch.from_numpy(np.stack([logits_of(0, 0), logits_of(0, 1)]))
    draws = device.sampler.draws([edited], [0])
    [first] = device.run(draws, logits[:1].clone(), [1])

    device.sampler.note([edited], [0], [first])
    second, _ = device.sampler.sample(logits[[1, 0]], [edited, other], [1, 0])

    assert not second.is_pending
    expected = sequence_of(1, seed=1, presence_penalty=1.0)
    expected.token_ids.append(first)
    [again] = sample(new_sampler(), logits[1:], [expected])
    assert second.token_id == again.token_id


def test_a_list_that_may_become_too_long_is_the_host_s():
    device = Device(EditLimits(1, 10))
    fits, is_long = (
        sequence_of(1, 2, seed=1, presence_penalty=1.0, max_tokens=count) for count in (7, 8)
    )

    assert device.sampler.draws([is_long], [0]) is None
    # one end token, the prompt and the answer
    assert device.sampler.draws([fits], [0]) is not None


def test_a_list_is_sent_again_after_a_choice_of_the_host():
    device = Device()
    edited, other = sequence_of(1, seed=1, presence_penalty=1.0), sequence_of(1, logprobs=0)
    device.sampler.draws([edited], [0])

    # the step fails before it runs, and the host chooses the token
    assert device.sampler.draws([edited, other], [0, 0]) is None
    edited.token_ids.append(7)

    assert device.sampler.draws([edited], [1]).edits.tokens.tolist() == [7]
