"""Generation in process gives the tokens of transformers, whatever runs beside it."""

import numpy as np
import pytest
import torch
import transformers

from tests.checkpoints import SMALL_DECODERS, save_checkpoint
from tests.closeness import encoder_roundings, relative_error
from varlen.errors import RequestError
from varlen.generation_options import GenerationOptions
from varlen.generator import Generator

KINDS = [*(f"{name}ForCausalLM" for name in SMALL_DECODERS if name != "GPT2"), "GPT2LMHeadModel"]
VOCABULARY = 263
# small, so that prompts run in chunks, sequences wait for others, and a table has several blocks
SETTINGS = {
    "dtype": "fp32",
    "max_running_sequences": 4,
    "max_step_tokens": 48,
    "kv_block_tokens": 16,
    "kv_bytes": "1%",
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp(kind), kind)


@pytest.fixture(scope="module")
def oracle(kind, folder):
    return getattr(transformers, kind).from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def generator(folder):
    with Generator.from_pretrained(folder, **SETTINGS) as generator:
        yield generator


def prompt_of(length, seed=0):
    return np.random.default_rng([seed, length]).integers(1, VOCABULARY, length).tolist()


@torch.inference_mode()
def expected_tokens(oracle, prompt, count, **options):
    """Return the greedy answer of transformers."""
    ids = torch.tensor([prompt])
    answer = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return answer[0, len(prompt) :].tolist()


@torch.inference_mode()
def assert_same_tokens(oracle, folder, prompt, actual, expected):
    """Fail unless two greedy answers are equal, or part at tokens that are equally likely but for rounding."""
    if actual == expected:
        return
    same = next(i for i, (a, b) in enumerate(zip(actual, expected, strict=False)) if a != b)
    logits = oracle(torch.tensor([prompt + expected[:same]])).logits[0, -1]
    gap = abs(float(logits[actual[same]] - logits[expected[same]]))
    bound = relative_error(encoder_roundings(folder)) * float(logits.abs().max())
    assert gap <= bound, f"token {same} is {actual[same]}, not {expected[same]}"


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100, 300])
def test_a_prompt_alone_gets_the_tokens_of_transformers(generator, oracle, folder, length):
    prompt = prompt_of(length)

    (answer,) = generator.generate([prompt], max_tokens=12, temperature=0, ignore_eos=True)

    expected = expected_tokens(oracle, prompt, 12, min_new_tokens=12)
    assert_same_tokens(oracle, folder, prompt, list(answer.token_ids), expected)
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("policy", ["reserve", "optimistic"])
def test_requests_that_join_and_leave_at_any_step_get_the_same_tokens(
    folder, oracle, policy
):
    lengths = [1, 300, 7, 64, 33, 2, 150, 16, 90, 5, 48, 260]
    counts = [9, 4, 20, 1, 13, 17, 6, 20, 2, 11, 15, 8]
    # few blocks: with the policy `optimistic` sequences give back theirs
    settings = {**SETTINGS, "kv_policy": policy, "kv_bytes": 24 * generator.snapshot().blocks.block_bytes}

    with Generator.from_pretrained(folder, **settings) as generator:
        answers = [
            generator.submit(
                prompt_of(length),
                GenerationOptions(max_tokens=count, temperature=0, ignore_eos=True),
            )
            for length, count in zip(lengths, counts, strict=True)
        ]
        tokens = [list(answer.result(60)[0].token_ids) for answer in answers]
        blocks = generator.snapshot()

    for length, count, actual in zip(lengths, counts, tokens, strict=True):
        prompt = prompt_of(length)
        expected = expected_tokens(oracle, prompt, count, min_new_tokens=count)
        assert_same_tokens(oracle, folder, prompt, actual, expected)
    assert blocks.used == blocks.promised == 0
