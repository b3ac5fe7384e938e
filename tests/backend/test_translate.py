"""Beam search by the whole engine gives the answers and scores of transformers."""

import random

import pytest
import torch
import transformers

from tests.checkpoints import change_tensors, save_checkpoint, set_fields
from tests.threads import arriving_together
from varlen.decoding.checkpoint_rules import search_rules
from varlen.in_process.generator import Generator
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.loading import load_decoder
from varlen.request.generation import GenerationOptions

from .decoding.search.beam_oracles import EOS, REQUEST_NAMES, Oracle, are_equal, is_tie, random_case

VOCABULARY, LAYERS = 263, 2
SMALL = {"encoder_layers": 1, "decoder_layers": 2, "eos_token_id": EOS}
# Class, fields of config.json, fields of generation_config.json.
MODELS = {
    "marian": ("MarianMTModel", SMALL, {}),
    "marian-renormalized": ("MarianMTModel", SMALL, {"renormalize_logits": True}),
    "marian-masked": (
        "MarianMTModel",
        SMALL,
        {"renormalize_logits": True, "bad_words_ids": [[1], [8]]},
    ),
    "bart": (
        "BartForConditionalGeneration",
        SMALL,
        # beside them, a request has its own suppressed tokens
        {"bad_words_ids": [[token] for token in range(60, VOCABULARY, 3)]},
    ),
    "m2m": ("M2M100ForConditionalGeneration", SMALL, {"forced_bos_token_id": 7}),
    "t5": (
        "T5ForConditionalGeneration",
        {"num_layers": 2, "num_decoder_layers": 2, "eos_token_id": EOS},
        {},
    ),
    "gpt2": ("GPT2LMHeadModel", {"n_layer": 2, "eos_token_id": EOS, "pad_token_id": 1}, {}),
}
SEARCHES = [
    (1, False),
    *((width, early) for width in (2, 4, 5, 8) for early in (True, False, "never")),
]
# Blocks hold few tokens, so that beams often copy one, and there are few more of them than the largest search needs.
BLOCK_TOKENS, BLOCKS = 4, 37
SETTINGS = {
    "device": "cpu",
    "dtype": "fp32",
    "max_running_sequences": 40,
    "max_step_tokens": 64,
    "max_sequence_tokens": 40,
    "kv_block_tokens": BLOCK_TOKENS,
}


# "marian-masked" renormalizes too, and `test_beam_search.py` forces first tokens.
_ONLY_FULL = ("marian-renormalized", "m2m")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.full) if name in _ONLY_FULL else name
        for name in MODELS
    ],
)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def folder(name, tmp_path_factory):
    kind, config, generation = MODELS[name]
    folder = save_checkpoint(tmp_path_factory.mktemp(name), kind, **config)
    set_fields(folder, "generation_config.json", **generation)
    change_tensors(folder, favor_the_end)
    return folder


@pytest.fixture(scope="module")
def oracle(folder):
    checkpoint = Checkpoint.open(folder)
    model = getattr(transformers, checkpoint.architecture).from_pretrained(folder)
    rules = search_rules(checkpoint)
    names = ("forced_first_id", "forced_last_id", "banned_ids")
    return Oracle(model, {name: getattr(rules, name) for name in names})


@pytest.fixture(scope="module")
def cases(name, oracle):
    """Return random cases, each with the answers of transformers to its prompts."""
    cases = [random_case(name, *each, random.Random(f"{name} {each}")) for each in SEARCHES]
    if name == "marian-masked":
        # the mask comes before the penalty, in transformers it comes after it
        for case in cases:
            case.options.pop("repetition_penalty", None)
    return [(case, oracle.generate(case)) for case in cases]


def favor_the_end(tensors):
    """Make logits of the end token large, positive or negative."""
    for tensor in tensors.values():
        if tensor.ndim == 2 and len(tensor) == VOCABULARY:
            tensor[EOS] *= 3


def generator_of(folder, policy):
    checkpoint = Checkpoint.open(folder)
    heads = load_decoder(checkpoint, torch.float32, torch.device("cpu")).attention_heads
    block_bytes = 2 * LAYERS * heads.keys * heads.dim * BLOCK_TOKENS * 4
    return Generator.from_pretrained(
        folder, **SETTINGS, kv_policy=policy, kv_bytes=BLOCKS * block_bytes
    )


def submit(generator, prompt, options):
    """Start to generate; return the future of the answers."""
    return generator.submit(prompt, GenerationOptions(**{"temperature": 0.0, **options}))


def submit_case(generator, case, row):
    """Start to search; return a function that waits for the answers."""
    named = {REQUEST_NAMES[name]: each for name, each in case.rules.items() if name != "end_ids"}
    options = {**case.options, **named, "n": case.num_beams, "stop_token_ids": case.end_ids}
    future = submit(generator, case.prompts[row], options)
    # where there are fewer answers than beams, the others have no tokens
    return lambda: [answer for answer in future.result(60) if answer.token_ids]


def assert_equal_but_for_ties(case, row, expected, actual, oracle):
    """Compare the answers to one prompt; return whether rounding errors decided about them."""
    if case.num_beams == 1:
        # transformers has no scores of one beam
        assert [answer.token_ids for answer in actual] == [expected[0][0]]
        return False
    if are_equal(expected, actual):
        return False
    assert is_tie(case, row, expected, oracle), (case, row, expected, actual)
    return True


@pytest.mark.parametrize("policy", ["reserve", "optimistic"])
def test_answers_and_scores_of_mixed_searches_are_those_of_transformers(
    folder, oracle, cases, policy
):
    rows = [(case, row, found[row]) for case, found in cases for row in range(len(found))]
    random.Random(0).shuffle(rows)

    with generator_of(folder, policy) as generator:
        with arriving_together(generator):
            waits = [submit_case(generator, case, row) for case, row, _ in rows]
        answers = [wait() for wait in waits]
        end = generator.snapshot()

    ties = sum(
        assert_equal_but_for_ties(case, row, expected, actual, oracle)
        for (case, row, expected), actual in zip(rows, answers, strict=True)
    )
    assert ties <= 1
    assert (end.memory_preemptions > 0) == (policy == "optimistic")
    assert end.blocks.used == end.blocks.reserved == 0


def test_answers_alone_are_those_of_transformers(folder, oracle, cases):
    with generator_of(folder, "reserve") as generator:
        for case, found in cases:
            answers = submit_case(generator, case, 0)()
            assert_equal_but_for_ties(case, 0, found[0], answers, oracle)
        assert generator.snapshot().blocks.used == generator.snapshot().blocks.reserved == 0


@pytest.mark.parametrize("name", ["gpt2"], indirect=True)
def test_samples_and_searches_of_the_same_steps_do_not_change_each_other(folder):
    requests = [
        {},
        {"num_beams": 4, "n": 3, "length_penalty": 0.5},
        {"temperature": 1.0, "n": 3, "seed": 7},
        {"num_beams": 3, "do_sample": True, "temperature": 1.5, "n": 3, "seed": 5},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7, "n": 4},
        {"temperature": 0.8, "top_p": 0.9, "seed": 3, "logprobs": 2},
        {"num_beams": 5, "no_repeat_ngram_size": 2, "n": 1},
        {"repetition_penalty": 1.4},
    ]
    rng = random.Random(0)
    requests = [
        ([rng.randrange(3, VOCABULARY) for _ in range(length)], {**options, "max_tokens": 14})
        for length in (2, 9, 23)
        for options in requests
    ]

    def tokens_of(future):
        return [answer.token_ids for answer in future.result(60)]

    with generator_of(folder, "reserve") as generator:
        alone = [tokens_of(submit(generator, *each)) for each in requests]
    with generator_of(folder, "optimistic") as generator:
        with arriving_together(generator):
            futures = [submit(generator, *each) for each in requests]
        together = [tokens_of(future) for future in futures]
        end = generator.snapshot()

    assert together == alone
    assert end.preemptions > 0
    assert end.blocks.used == end.blocks.reserved == 0
