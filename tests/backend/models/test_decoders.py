"""Random decoders of every family and option match transformers in fp32: hidden states and logits."""

from itertools import pairwise

import pytest
import torch

from tests.checkpoints import drop_field, set_fields
from tests.closeness import assert_rows_close, encoder_roundings, relative_error
from varlen.config import EngineConfig
from varlen.execution.runner import Runner
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.loading import load_decoder
from varlen.request.request import RequestOptions

from ..requests import prompt_of
from .oracle import decoded, load_oracle
from .paged import record_step, run_in_chunks

GPT2, LLAMA, MISTRAL = "GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM"
QWEN2, QWEN3 = "Qwen2ForCausalLM", "Qwen3ForCausalLM"
GEMMA, GEMMA2, GEMMA3 = "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"
PHI3, GRANITE, SMOLLM3 = "Phi3ForCausalLM", "GraniteForCausalLM", "SmolLM3ForCausalLM"
OLMO2, OLMO3, HUNYUAN = "Olmo2ForCausalLM", "Olmo3ForCausalLM", "HunYuanDenseV1ForCausalLM"

# By type; the originals are shorter than the longest row.
ROTARY = {
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 80},
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 7}
# Four of the six features of a head rotate.
PARTIAL = {"partial_rotary_factor": 0.7, "short_factor": [1.1, 2.5], "long_factor": [9.0, 30.0]}
# Up to `original_max_position_embeddings`, the short factors count.
LONGROPE = {
    "original_max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "longrope",
        "short_factor": [1.05, 1.5, 3.0],
        "long_factor": [1.5, 9.0, 30.0],
    },
}
# Only Phi-3 reads the field outside.
LONGROPE_OF_LLAMA = {
    "rope_parameters": {**LONGROPE["rope_parameters"], "original_max_position_embeddings": 128}
}

CASES = {
    "gpt2": (GPT2, {}),
    "gpt2-untied": (GPT2, {"tie_word_embeddings": False}),
    "gpt2-relu": (GPT2, {"activation_function": "relu"}),
    "gpt2-default-inner": (GPT2, {"n_inner": None}),
    "gpt2-no-layers": (GPT2, {"n_layer": 0}),
    "gpt2-coarse-eps": (GPT2, {"layer_norm_epsilon": 1e-2}),
    "llama": (LLAMA, {}),
    "llama-tied": (LLAMA, {"tie_word_embeddings": True}),
    "llama-biases": (LLAMA, {"attention_bias": True, "mlp_bias": True}),
    "llama-heads-of-16": (LLAMA, {"head_dim": 16}),
    "llama-derived-heads": (LLAMA, {"head_dim": None}),
    "llama-one-key-head": (LLAMA, {"num_key_value_heads": 1}),
    "llama-no-groups": (LLAMA, {"num_key_value_heads": 6}),
    "llama-coarse-eps": (LLAMA, {"rms_norm_eps": 1e-2}),
    "llama-no-layers": (LLAMA, {"num_hidden_layers": 0}),
    "mistral": (MISTRAL, {}),
    "mistral-window": (MISTRAL, {"sliding_window": 7}),
    "mistral-window-of-one": (MISTRAL, {"sliding_window": 1}),
    "qwen2": (QWEN2, {}),
    "qwen2-windows": (QWEN2, {**WINDOWS, "max_window_layers": 1}),
    "qwen2-unused-window": (QWEN2, {"sliding_window": 7, "max_window_layers": 0}),
    "qwen3": (QWEN3, {}),
    "qwen3-tied": (QWEN3, {"tie_word_embeddings": True}),
    "qwen3-bias": (QWEN3, {"attention_bias": True}),
    "qwen3-layer-types": (
        QWEN3,
        {**WINDOWS, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    **{
        f"llama-{kind}": (LLAMA, {"rope_parameters": {"rope_type": kind, **fields}})
        for kind, fields in ROTARY.items()
    },
    "qwen3-theta": (QWEN3, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "gemma": (GEMMA, {}),
    "gemma-untied-biases": (GEMMA, {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma-old-gelu": (GEMMA, {"hidden_act": "gelu"}),
    "gemma2": (GEMMA2, {}),
    "gemma2-caps": (GEMMA2, {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0}),
    "gemma2-no-caps": (GEMMA2, {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2-one-key-head": (GEMMA2, {"num_key_value_heads": 1, "head_dim": 20}),
    "gemma3": (GEMMA3, {}),
    # more layers than one pattern, an exact GELU
    "gemma3-pattern": (
        GEMMA3,
        {
            "num_hidden_layers": 7,
            "layer_types": None,
            "sliding_window_pattern": 3,
            "hidden_activation": "gelu",
        },
    ),
    "gemma3-positions": (
        GEMMA3,
        {
            "num_key_value_heads": 1,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "gemma3-logit-cap": (GEMMA3, {"final_logit_softcapping": 3.0}),
    "llama-longrope": (LLAMA, LONGROPE_OF_LLAMA),
    "phi3": (PHI3, {}),
    "phi3-window": (PHI3, {"sliding_window": 7}),
    "phi3-longrope": (PHI3, LONGROPE),
    "phi3-partial": (
        PHI3,
        {"rope_parameters": {"partial_rotary_factor": 0.7}, "num_key_value_heads": 6},
    ),
    "phi3-partial-longrope": (
        PHI3,
        {**LONGROPE, "rope_parameters": {**LONGROPE["rope_parameters"], **PARTIAL}},
    ),
    "granite": (GRANITE, {}),
    "granite-tied-biases": (
        GRANITE,
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "smollm3": (SMOLLM3, {}),
    "smollm3-places": (SMOLLM3, {"no_rope_layers": [0, 0, 1], "tie_word_embeddings": False}),
    "smollm3-windows": (SMOLLM3, {"use_sliding_window": True, "sliding_window": 7}),
    "olmo2": (OLMO2, {}),
    "olmo2-groups": (OLMO2, {"num_key_value_heads": 2, "attention_bias": True}),
    "olmo3": (OLMO3, {}),
    "olmo3-positions": (
        OLMO3,
        {
            "num_key_value_heads": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, **ROTARY["yarn"]},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "hunyuan": (HUNYUAN, {}),
    "hunyuan-alpha": (
        HUNYUAN,
        {
            "attention_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0},
        },
    ),
}
# One of each family, for tests that no option concerns.
PLAIN = (
    "gpt2 llama mistral qwen2 qwen3 gemma gemma2 gemma3 phi3 granite smollm3 olmo2 olmo3 hunyuan"
).split()


def run_in_one_step(folder, rows):
    runner = Runner(Checkpoint.open(folder), EngineConfig(dtype="fp32", task="hidden"))
    return runner.run([prompt_of(row) for row in rows], [RequestOptions()] * len(rows))


def random_rows(rng, lengths):
    return [rng.integers(0, 250, length).tolist() for length in lengths]


# `make test` runs every option in the compiled ops, which serve, and three families in the reference
@pytest.mark.parametrize(
    "case, compiled",
    [
        pytest.param(
            case,
            compiled,
            id=f"{case}-{'compiled' if compiled else 'reference'}",
            marks=() if compiled or case in ("gpt2", "llama", "gemma2") else pytest.mark.full,
        )
        for case in CASES
        for compiled in (False, True)
    ],
)
def test_matches_transformers_in_one_step_and_in_chunks(make_checkpoint, rng, case, compiled):
    kind, options = CASES[case]
    folder = make_checkpoint(kind, **options)
    model = load_oracle(folder, kind)
    rows = random_rows(rng, [1, 2, 40, 100])

    one_step = run_in_one_step(folder, rows)
    hidden, logits = run_in_chunks(folder, rows, sizes=[1, 1, 7, 33], compiled=compiled)

    expected_hidden, expected_logits = decoded(model, rows)
    roundings = encoder_roundings(folder)
    assert_rows_close(one_step, expected_hidden, roundings=roundings)
    assert_rows_close(hidden, expected_hidden, roundings=roundings)
    assert_rows_close(logits, expected_logits, roundings=roundings)
    assert all(row.dtype == torch.float32 for row in logits)


@pytest.mark.parametrize("block_size", [1, 16, 128])
@pytest.mark.parametrize("case", ["gpt2", "qwen2-windows"])
def test_no_size_of_a_block_changes_logits(make_checkpoint, rng, case, block_size):
    kind, options = CASES[case]
    folder = make_checkpoint(kind, **options)
    rows = random_rows(rng, [50, 17, 33])

    _, logits = run_in_chunks(folder, rows, sizes=[50, 1, 5], block_size=block_size)

    _, expected = decoded(load_oracle(folder, kind), rows)
    assert_rows_close(logits, expected, roundings=encoder_roundings(folder))


@pytest.mark.parametrize("kind", ["LlamaModel", "GPT2Model", "Qwen3Model", "Gemma2Model"])
def test_a_decoder_without_a_head_serves_hidden_states(make_checkpoint, rng, kind):
    folder = make_checkpoint(kind)

    assert Checkpoint.open(folder).task == "embed"
    rows = random_rows(rng, [3, 60])
    expected, _ = decoded(load_oracle(folder, kind), rows)
    assert_rows_close(run_in_one_step(folder, rows), expected, roundings=encoder_roundings(folder))


# shards are read alike for all families
@pytest.mark.parametrize(
    "case", ["gpt2", *(pytest.param(case, marks=pytest.mark.full) for case in PLAIN[1:])]
)
def test_shards_match_transformers(make_checkpoint, rng, case):
    kind, _ = CASES[case]
    folder = make_checkpoint(kind, save={"max_shard_size": "20KB"})
    assert len(list(folder.glob("*.safetensors"))) > 1
    rows = random_rows(rng, [20])

    _, logits = run_in_chunks(folder, rows, sizes=[9])

    _, expected = decoded(load_oracle(folder, kind), rows)
    assert_rows_close(logits, expected, roundings=encoder_roundings(folder))


@pytest.mark.parametrize("saved", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("case", ["gpt2", "qwen3-tied"])
def test_weights_saved_in_half_precision_run_in_fp32(make_checkpoint, rng, case, saved):
    kind, options = CASES[case]
    folder = make_checkpoint(kind, dtype=saved, **options)
    rows = random_rows(rng, [20])

    _, logits = run_in_chunks(folder, rows, sizes=[9])

    _, expected = decoded(load_oracle(folder, kind), rows)
    assert_rows_close(logits, expected, roundings=encoder_roundings(folder))


@pytest.mark.parametrize("case", PLAIN)
def test_bf16_stays_close_to_fp32(make_checkpoint, rng, case):
    kind, _ = CASES[case]
    folder = make_checkpoint(kind, dtype=torch.bfloat16)
    rows = random_rows(rng, [1, 2, 40, 100])

    _, logits = run_in_chunks(folder, rows, sizes=[1, 1, 7, 33], dtype=torch.bfloat16)

    _, expected = decoded(load_oracle(folder, kind), rows)
    assert all(row.dtype == torch.float32 for row in logits)
    bound = relative_error(encoder_roundings(folder, torch.bfloat16), torch.bfloat16)
    for mine, theirs in zip(logits, expected, strict=True):
        assert (mine - theirs).norm() <= bound * theirs.norm()
        assert torch.nn.functional.cosine_similarity(mine, theirs, dim=1).min() > 0.999


@pytest.mark.parametrize("kind", ROTARY)
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_names_of_transformers_4_mean_the_same(make_checkpoint, rng, kind, key):
    folder = make_checkpoint(
        LLAMA, rope_parameters={"rope_type": kind, "rope_theta": 5e4, **ROTARY[kind]}
    )
    rows = random_rows(rng, [90])
    expected, _ = decoded(load_oracle(folder, LLAMA), rows)

    drop_field(folder, "config.json", "rope_parameters")
    set_fields(folder, "config.json", rope_theta=5e4, rope_scaling={key: kind, **ROTARY[kind]})
    set_fields(folder, "config.json", torch_dtype="float32", dtype=None)

    actual = run_in_one_step(folder, rows)
    assert_rows_close(actual, expected, roundings=encoder_roundings(folder))


def test_without_layer_types_the_last_layers_have_windows(make_checkpoint, rng):
    """Checkpoints of transformers 4 name only the first layer that has one."""
    kind, options = CASES["qwen2-windows"]
    folder = make_checkpoint(kind, **options)
    drop_field(folder, "config.json", "layer_types")
    rows = random_rows(rng, [40])

    hidden = run_in_one_step(folder, rows)

    expected, _ = decoded(load_oracle(folder, kind), rows)
    assert_rows_close(hidden, expected, roundings=encoder_roundings(folder))


@pytest.mark.parametrize("case", ["gpt2", "llama-tied"])
def test_a_tied_output_is_a_view_of_the_embeddings(make_checkpoint, case):
    kind, options = CASES[case]
    checkpoint = Checkpoint.open(make_checkpoint(kind, **options))

    decoder = load_decoder(checkpoint, torch.float32, torch.device("cpu"))

    assert decoder.output.weight.data_ptr() == decoder.token_table.weight.data_ptr()
    assert decoder.output.weight.shape == decoder.token_table.weight.t().shape


@pytest.mark.parametrize("case", ["gpt2", "llama", "qwen3"])
def test_a_step_norms_rotates_and_appends_in_one_op_over_one_tensor(make_checkpoint, case):
    folder = make_checkpoint(*CASES[case][:1])

    program, _, _ = record_step(folder, 4, 16, torch.float32)

    layers = len(program.states) // 2
    kernels = [op.kernel for op in program.ops]
    assert kernels.count("append_kv") == kernels.count("attention_paged") == layers
    assert not {"norm_heads", "rotary"} & set(kernels)
    for before, append in pairwise(program.ops):
        if append.kernel == "append_kv":
            assert before.kernel == "linear"
            assert append.reads[0] == before.results[0]
            # queries are rotated where the product wrote them
            for queries in append.results:
                place = program.buffer_of[queries.name]
                assert place == program.buffer_of[before.results[0].name]
