"""Generation in process gives the tokens of transformers, whatever runs beside it."""

import numpy as np
import pytest
import torch
import transformers

from tests.backend.models.oracle import assert_greedy
from tests.checkpoints import SMALL_DECODERS, save_checkpoint
from tests.closeness import assert_close, encoder_roundings
from tests.threads import arriving_together
from varlen.errors import RequestError
from varlen.in_process.generator import Generator
from varlen.request.generation import GenerationOptions

GPT2 = "GPT2LMHeadModel"
NAMES = [*(f"{name}ForCausalLM" for name in SMALL_DECODERS if name != "GPT2"), GPT2]


def _all_kinds(of_make_test):
    """Return all kinds; `make test` runs the named ones."""
    return [
        name if name in of_make_test else pytest.param(name, marks=pytest.mark.full)
        for name in NAMES
    ]


KINDS = _all_kinds({*NAMES} - {"GemmaForCausalLM", "Gemma2ForCausalLM"})
# For tests of what no layer changes.
of_one_kind = pytest.mark.parametrize("kind", _all_kinds({GPT2}), indirect=True)
VOCABULARY = 263
# small, so that prompts run in chunks, sequences wait for others, and a table has several blocks
SETTINGS = {
    "dtype": "fp32",
    "max_running_sequences": 4,
    "max_step_tokens": 48,
    "kv_block_tokens": 16,
    "kv_bytes": "1%",
}
# Lengths of prompts that run together, and of their answers.
JOINED = list(
    zip(
        [1, 300, 7, 64, 31, 79, 78, 77, 79, 5, 47, 260],
        [9, 8, 20, 1, 19, 50, 50, 50, 50, 20, 20, 20],
        strict=True,
    )
)


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp(kind), kind)


@pytest.fixture(scope="module")
def oracle(kind, folder):
    oracle = getattr(transformers, kind).from_pretrained(folder).eval()
    # no answer ends before its largest length, unless a test says so
    oracle.generation_config.eos_token_id = None
    return oracle


@pytest.fixture(scope="module")
def generator(folder):
    with Generator.from_pretrained(folder, **SETTINGS) as generator:
        yield generator


@pytest.fixture(scope="module")
def block_bytes(oracle):
    """Return the bytes of a block in all layers."""
    config = oracle.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * dim * SETTINGS["kv_block_tokens"] * 4


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


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100, 300])
def test_a_prompt_alone_gets_the_tokens_of_transformers(generator, oracle, folder, length):
    prompt = prompt_of(length)

    (answer,) = generator.generate([prompt], max_tokens=12, temperature=0, ignore_eos=True)

    tokens = list(answer.token_ids)
    assert len(tokens) == 12
    assert_greedy(oracle, prompt, tokens, roundings=encoder_roundings(folder))
    assert answer.finish_reason == "length"


# with a target that no step keeps, prompts run in small chunks beside the stream
@pytest.mark.parametrize(
    "policy, latency",
    [pytest.param("reserve", 1, marks=pytest.mark.full), ("optimistic", 400)],
)
def test_requests_that_join_and_leave_at_any_step_get_the_same_tokens(
    folder, oracle, policy, latency, block_bytes
):
    # one block more than the longest needs: with the policy `optimistic` sequences give back theirs
    settings = {**SETTINGS, "kv_policy": policy, "kv_bytes": 20 * block_bytes}
    settings["inter_token_latency_ms"] = latency

    with Generator.from_pretrained(folder, **settings) as generator:
        with arriving_together(generator):
            answers = [
                generator.submit(
                    prompt_of(length),
                    GenerationOptions(max_tokens=count, temperature=0, ignore_eos=True),
                )
                for length, count in JOINED
            ]
        tokens = [list(answer.token_ids) for [answer] in (each.result(60) for each in answers)]
        end = generator.snapshot()

    for (length, count), found in zip(JOINED, tokens, strict=True):
        assert len(found) == count
        assert_greedy(oracle, prompt_of(length), found, roundings=encoder_roundings(folder))
    assert (end.memory_preemptions > 0) == (policy == "optimistic")
    assert end.blocks.used == end.blocks.reserved == 0


@of_one_kind
@pytest.mark.parametrize(
    "ours, theirs",
    [
        ({"repetition_penalty": 1.7, "ignore_eos": True}, {"repetition_penalty": 1.7}),
        ({"stop_token_ids": list(range(1, 60))}, {"eos_token_id": list(range(60))}),
        (
            {"stop_token_ids": list(range(1, 60)), "min_tokens": 8},
            {"eos_token_id": list(range(60)), "min_new_tokens": 8},
        ),
    ],
    ids=["penalty", "stop", "stop-and-least"],
)
def test_penalties_and_ends_are_those_of_transformers(generator, oracle, folder, ours, theirs):
    prompt = prompt_of(40)

    options = {"max_tokens": 25, "temperature": 0, **ours}
    (answer,) = generator.generate([prompt], **options)

    expected = expected_tokens(oracle, prompt, 25, **theirs)
    assert list(answer.token_ids) == expected
    has_ended = answer.token_ids[-1] in theirs.get("eos_token_id", ())
    assert answer.finish_reason == ("stop" if has_ended else "length")


def test_log_probabilities_are_those_of_transformers(generator, oracle, folder):
    prompt = prompt_of(50)

    (answer,) = generator.generate([prompt], max_tokens=6, temperature=0.8, seed=3, logprobs=4)

    with torch.inference_mode():
        logits = oracle(torch.tensor([prompt + list(answer.token_ids)])).logits[0]
    expected = logits[len(prompt) - 1 : -1].log_softmax(1)
    assert [each.token_id for each in answer.logprobs] == list(answer.token_ids)
    for reported, row in zip(answer.logprobs, expected, strict=True):
        values = [reported.logprob, *(value for _, value in reported.top)]
        ids = [reported.token_id, *(token_id for token_id, _ in reported.top)]
        assert_close(values, row[ids], roundings=encoder_roundings(folder))
        assert sorted(values[1:], reverse=True) == values[1:]
        assert len(reported.top) == 4


@of_one_kind
def test_sampled_tokens_depend_on_the_seed_and_not_on_what_runs_beside(generator):
    prompt = prompt_of(30)
    options = {"max_tokens": 16, "temperature": 1.0, "top_p": 0.9, "ignore_eos": True}

    (alone,) = generator.generate([prompt], seed=11, **options)
    (other,) = generator.generate([prompt], seed=12, **options)
    beside = [
        generator.submit(prompt_of(n, seed=1), GenerationOptions(max_tokens=30, seed=n))
        for n in (5, 80, 170)
    ]
    (again,) = generator.generate([prompt], seed=11, **options)
    for future in beside:
        future.result(60)

    assert alone.token_ids == again.token_ids
    assert alone.token_ids != other.token_ids


@of_one_kind
def test_samples_of_one_prompt_differ_and_can_be_repeated(generator):
    prompt = prompt_of(21)
    options = {"n": 4, "max_tokens": 12, "temperature": 1.0, "seed": 5, "ignore_eos": True}

    first, second = (generator.generate([prompt], **options) for _ in range(2))

    assert first == second
    assert len({answer.token_ids for answer in first}) == 4


@of_one_kind
def test_streamed_parts_add_up_to_the_answer(generator):
    text = "the cat sat"
    options = {"max_tokens": 20, "temperature": 0.9, "seed": 1, "ignore_eos": True}

    parts = list(generator.stream(text, **options))
    (answer,) = generator.generate([text], **options)

    assert "".join(part.text for part in parts) == answer.text
    assert tuple(token for part in parts for token in part.token_ids) == answer.token_ids
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]


@of_one_kind
def test_only_an_answer_whose_parts_are_read_counts_as_a_stream(generator, monkeypatch):
    model, streams = type(generator._service.model), []
    submit = model.submit

    def record(self, request, reply):
        streams.append(request.options.streams)
        submit(self, request, reply)

    monkeypatch.setattr(model, "submit", record)
    generator.generate(["the"], max_tokens=1)
    list(generator.stream("the", max_tokens=1))

    assert streams == [False, True]


@of_one_kind
def test_a_closed_stream_stops_its_sequence(generator):
    stream = generator.stream("the cat", max_tokens=250, ignore_eos=True)
    next(stream)

    stream.close()

    # its blocks are free once a later request has run
    generator.generate(["the"], max_tokens=1)
    assert generator.snapshot().running == 0
    assert generator.snapshot().blocks.used == 0


@of_one_kind
@pytest.mark.parametrize(
    "prompt, options, message",
    [
        ([], {}, "input_ids has no tokens"),
        ([VOCABULARY], {}, "input_ids holds 263; this model takes 0 to 262"),
        ("", {}, "row 0: text has no tokens, and the tokenizer adds none"),
        ("a " * 400, {}, "text has .* tokens; this model takes at most 320$"),
        ([1] * 300, {"max_tokens": 21}, "320"),
        ([1], {"n": 5, "temperature": 1.0}, "at most 4 sequences at a time"),
        ([1], {"temperature": -1}, "temperature"),
        ([1], {"tempreature": 1}, 'Did you mean "temperature"'),
        ([1], {"structured_outputs": {"regex": "("}}, "structured_outputs cannot be served"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_refuses_what_it_cannot_serve(generator, prompt, options, message):
    with pytest.raises(RequestError, match=message):
        generator.generate([prompt], **options)


@of_one_kind
def test_a_list_of_prompts_is_one_request(generator):
    prompts = [prompt_of(5), prompt_of(9, seed=1), prompt_of(5)]
    options = {"max_tokens": 4, "temperature": 0.8, "seed": 2, "n": 2}
    parts = []

    answers = generator.generate(prompts, **options)

    alone = [answer for prompt in prompts for answer in generator.generate([prompt], **options)]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in alone]
    checked = GenerationOptions(**options)
    streamed = generator.submit_all(prompts, checked, lambda row, part: parts.append((row, part)))
    assert streamed.result() == answers
    assert {row for row, _ in parts} == {*range(6)}
    assert generator.generate([]) == []
    with pytest.raises(RequestError, match="row 1: input_ids has no tokens"):
        generator.generate([[1], []])
    with pytest.raises(RequestError, match="row 1: text is a list; send a string"):
        generator.generate(["the", [1]])


@of_one_kind
@pytest.mark.parametrize("beams", [1, 3])
def test_biases_and_bad_words_change_answers_as_with_transformers(generator, oracle, folder, beams):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    # likely letters, so that answers would hold the words
    bias = {tokenizer.encode(letter)[0]: 30.0 - 0.1 * at for at, letter in enumerate("abcd")}
    words = ["a", "bb", "cdb"]
    forms = [tokenizer.encode(word, add_special_tokens=False) for word in words]
    prompt, count = prompt_of(9), 12
    # with beams transformers adds a bias to log probabilities, and normalizes these only together with bans
    search = {} if beams == 1 else {"num_beams": beams, "renormalize_logits": True}
    search |= {"bad_words_ids": forms} if beams == 1 else {}
    expected = expected_tokens(
        oracle,
        prompt,
        count,
        sequence_bias={(token,): number for token, number in bias.items()},
        **search,
    )
    options = {"max_tokens": count, "temperature": 0, "ignore_eos": True, "num_beams": beams}

    changed, plain = (
        generator.generate([prompt], **options, **given)[0]
        for given in ({"logit_bias": bias, "bad_words": words if beams == 1 else []}, {})
    )

    assert list(changed.token_ids) == expected
    assert changed.token_ids != plain.token_ids
    with pytest.raises(RequestError, match="logit_bias has the token 263; this model generates"):
        generator.generate([prompt], logit_bias={str(VOCABULARY): 1})
