"""Random models with an encoder and a decoder match the logits of transformers in fp32."""

import pytest
import torch

from tests.checkpoints import SMALL_ENCODER_DECODERS, change_tensors, set_fields
from tests.closeness import assert_rows_close, encoder_roundings, relative_error

from .oracle import load_oracle, translated
from .paged_pairs import run_in_chunks

BART, MBART = "BartForConditionalGeneration", "MBartForConditionalGeneration"
MARIAN, M2M100 = "MarianMTModel", "M2M100ForConditionalGeneration"
T5, MT5 = "T5ForConditionalGeneration", "MT5ForConditionalGeneration"
T5GEMMA = "T5GemmaForConditionalGeneration"


def part_fields(**fields):
    """Return the fields of a small T5Gemma, both of whose parts have these fields."""
    small = SMALL_ENCODER_DECODERS["T5Gemma"]
    return {name: {**small[name], **fields} for name in ("encoder", "decoder")}


CASES = {
    "bart": (BART, {}),
    "bart-scaled": (BART, {"scale_embedding": True}),
    "bart-untied": (BART, {"tie_word_embeddings": False}),
    "bart-relu": (BART, {"activation_function": "relu"}),
    "bart-no-layers": (BART, {"encoder_layers": 0, "decoder_layers": 1}),
    "mbart": (MBART, {"scale_embedding": True}),
    "mbart-untied": (MBART, {"tie_word_embeddings": False}),
    "marian": (MARIAN, {"activation_function": "swish"}),
    "marian-scaled": (MARIAN, {"scale_embedding": True}),
    "marian-two-vocabularies": (
        MARIAN,
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 271},
    ),
    "marian-untied": (MARIAN, {"tie_word_embeddings": False}),
    "m2m": (M2M100, {}),
    "m2m-other-padding": (M2M100, {"pad_token_id": 5, "scale_embedding": False}),
    "t5": (T5, {}),
    "t5-untied": (T5, {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}),
    "t5-gated-silu": (T5, {"feed_forward_proj": "gated-silu"}),
    "t5-wide-heads": (T5, {"d_kv": 16, "layer_norm_epsilon": 1e-2}),
    "t5-default-layers": (T5, {"num_layers": 1, "num_decoder_layers": None}),
    "mt5": (MT5, {"feed_forward_proj": "gated-gelu"}),
    "mt5-relu": (MT5, {"feed_forward_proj": "relu"}),
    "t5gemma": (T5GEMMA, {}),
    "t5gemma-untied": (T5GEMMA, {"tie_word_embeddings": False}),
    "t5gemma-caps": (
        T5GEMMA,
        part_fields(attn_logit_softcapping=0.5, final_logit_softcapping=2.0, attention_bias=True),
    ),
    "t5gemma-no-caps": (
        T5GEMMA,
        part_fields(attn_logit_softcapping=None, final_logit_softcapping=None),
    ),
}
# One of each family, for tests that no option concerns.
PLAIN = ["bart", "mbart", "marian-scaled", "m2m", "t5", "mt5", "t5gemma"]
SIZES = [1, 1, 7, 3]


def random_pairs(rng, lengths):
    return [tuple(rng.integers(6, 250, length).tolist() for length in pair) for pair in lengths]


@pytest.fixture
def pairs(rng):
    return random_pairs(rng, [(40, 9), (1, 12), (7, 30), (23, 1)])


# `make test` runs each family in the reference, and every other option in the compiled ops, which serve
@pytest.mark.parametrize(
    "case, compiled",
    [
        *(
            pytest.param(case, False, id=case, marks=() if case in PLAIN else pytest.mark.full)
            for case in CASES
        ),
        *(pytest.param(case, True, id=f"{case}-compiled") for case in CASES if case not in PLAIN),
    ],
)
def test_matches_transformers_in_chunks(make_checkpoint, pairs, case, compiled):
    kind, options = CASES[case]
    folder = make_checkpoint(kind, **options)

    logits = run_in_chunks(folder, pairs, SIZES, compiled=compiled)

    expected = translated(load_oracle(folder, kind), pairs)
    assert_rows_close(logits, expected, roundings=encoder_roundings(folder))
    assert all(row.dtype == torch.float32 for row in logits)


@pytest.mark.parametrize(
    "case, block_size",
    [
        ("bart", 1),
        ("mbart", 16),
        ("marian-scaled", 128),
        ("m2m", 16),
        ("t5", 1),
        ("mt5", 128),
        ("t5gemma", 16),
    ],
)
def test_the_ops_of_cpus_match_transformers(make_checkpoint, pairs, case, block_size):
    kind, options = CASES[case]
    folder = make_checkpoint(kind, **options)

    logits = run_in_chunks(folder, pairs, SIZES, block_size=block_size, compiled=True)

    expected = translated(load_oracle(folder, kind), pairs)
    assert_rows_close(logits, expected, roundings=encoder_roundings(folder))


@pytest.mark.parametrize("case", ["bart", "t5"])
def test_tensors_that_are_not_the_shared_table_are_used(make_checkpoint, pairs, case):
    """T5 1.1 has its own output matrix, though transformers 5 takes it for tied."""
    kind, options = CASES[case]
    folder = make_checkpoint(kind, **options)
    prefix = "" if case == "t5" else "model."

    def add_tables(tensors):
        shared = tensors[f"{prefix}shared.weight"]
        for name in (f"{prefix}encoder.embed_tokens", f"{prefix}decoder.embed_tokens", "lm_head"):
            tensors[f"{name}.weight"] = torch.randn_like(shared)

    change_tensors(folder, add_tables)

    logits = run_in_chunks(folder, pairs, SIZES)

    expected = translated(load_oracle(folder, kind), pairs)
    assert_rows_close(logits, expected, roundings=encoder_roundings(folder))


@pytest.mark.parametrize("case", ["marian-scaled", "m2m"])
def test_probabilities_are_normalized_without_suppressed_tokens(make_checkpoint, pairs, case):
    """As transformers does with renormalize_logits, which OPUS-MT checkpoints set."""
    kind, options = CASES[case]
    folder = make_checkpoint(kind, **options)
    set_fields(folder, "generation_config.json", renormalize_logits=True, bad_words_ids=[[1], [70]])

    logits = run_in_chunks(folder, pairs, SIZES)

    expected = translated(load_oracle(folder, kind), pairs)
    expected = [row.index_fill(1, torch.tensor([1, 70]), -torch.inf) for row in expected]
    assert_rows_close(logits, expected, roundings=encoder_roundings(folder))


@pytest.mark.parametrize("case", PLAIN)
def test_bf16_stays_close_to_fp32(make_checkpoint, pairs, case):
    kind, options = CASES[case]
    folder = make_checkpoint(kind, dtype=torch.bfloat16, **options)

    logits = run_in_chunks(folder, pairs, SIZES, dtype=torch.bfloat16)

    expected = translated(load_oracle(folder, kind), pairs)
    assert all(row.dtype == torch.float32 for row in logits)
    bound = relative_error(encoder_roundings(folder, torch.bfloat16), torch.bfloat16)
    for mine, theirs in zip(logits, expected, strict=True):
        assert (mine - theirs).norm() <= bound * theirs.norm()
