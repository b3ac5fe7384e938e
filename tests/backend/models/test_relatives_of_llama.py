"""Phi-3, Granite, SmolLM3, OLMo, Hunyuan and T5Gemma: tokens, searches, limits, and what is refused."""

import json

import pytest
import torch

from tests.checkpoints import set_fields
from tests.closeness import assert_rows_close, encoder_roundings
from varlen.in_process.generator import Generator
from varlen.models.checkpoint_folder import Checkpoint

from ..refusals import refused_checkpoint as refused
from .oracle import decoded, load_oracle
from .paged import run_in_chunks

PHI3, GRANITE, SMOLLM3 = "Phi3ForCausalLM", "GraniteForCausalLM", "SmolLM3ForCausalLM"
OLMO2, OLMO3, HUNYUAN = "Olmo2ForCausalLM", "Olmo3ForCausalLM", "HunYuanDenseV1ForCausalLM"
T5GEMMA = "T5GemmaForConditionalGeneration"
DECODERS = [PHI3, GRANITE, SMOLLM3, OLMO2, OLMO3, HUNYUAN]
CONFIG = "config.json"
LENGTHS = [1, 7, 40]
BEAMS = {"num_beams": 3, "num_return_sequences": 2}


def rows_of(rng, lengths=LENGTHS):
    return [rng.integers(3, 250, length).tolist() for length in lengths]


@torch.inference_mode()
def answers_of(model, rows, count, **options):
    """Return the tokens of transformers, one prompt at a time."""
    found = []
    for row in rows:
        ids = torch.tensor([row])
        answers = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
        skipped = 1 if model.config.is_encoder_decoder else len(row)
        found += [answer[skipped:].tolist() for answer in answers]
    return found


@pytest.mark.parametrize(
    "kind, beams",
    [
        pytest.param(
            kind,
            beams,
            id=f"{kind}-{'beams' if beams else 'greedy'}",
            marks=() if kind == T5GEMMA and beams else pytest.mark.full,
        )
        for kind in (*DECODERS, T5GEMMA)
        for beams in (False, True)
    ],
)
def test_tokens_are_those_of_transformers(make_checkpoint, rng, kind, beams):
    folder = make_checkpoint(kind)
    model = load_oracle(folder, kind)
    model.generation_config.eos_token_id = model.config.eos_token_id = 262
    set_fields(folder, "generation_config.json", eos_token_id=262, bos_token_id=2)
    options = BEAMS if beams else {}
    rows = rows_of(rng)

    with Generator.from_pretrained(folder, dtype="fp32") as generator:
        answers = generator.generate(rows, max_tokens=8, temperature=0, **options)

    expected = answers_of(model, rows, 8, **options)
    assert [list(answer.token_ids) for answer in answers] == expected


def longrope(**fields):
    factors = {"short_factor": [1.05, 1.5, 3.0], "long_factor": [1.5, 9.0, 30.0]}
    return {"rope_parameters": {"rope_type": "longrope", **factors, **fields}}


def test_longrope_serves_sequences_up_to_the_original_length(make_checkpoint):
    folder = make_checkpoint(PHI3, original_max_position_embeddings=128, **longrope())

    assert Checkpoint.open(folder).position_limit == 128


def test_a_first_phi3_names_code_that_transformers_has(make_checkpoint, rng):
    folder = make_checkpoint(PHI3, original_max_position_embeddings=128, **longrope())
    rows = rows_of(rng)
    _, expected = decoded(load_oracle(folder, PHI3), rows)
    content = json.loads((folder / CONFIG).read_text())
    scaling = content.pop("rope_parameters")
    factors = {name: scaling[name] for name in ("short_factor", "long_factor")}
    content |= {"rope_scaling": {"type": "su", **factors}, "rope_theta": 10000.0}
    code = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoTokenizer": "a/tokenizer"}
    (folder / CONFIG).write_text(json.dumps({**content, "auto_map": code}))

    _, logits = run_in_chunks(folder, rows, sizes=[1, 7, 33])

    assert_rows_close(logits, expected, roundings=encoder_roundings(folder))


@pytest.mark.parametrize("divisor", [8.0, 3.0])
def test_the_factors_of_granite_keep_a_tied_output(make_checkpoint, rng, divisor):
    folder = make_checkpoint(GRANITE, tie_word_embeddings=True, logits_scaling=divisor)
    rows = rows_of(rng)

    hidden, logits = run_in_chunks(folder, rows, sizes=[1, 7, 33])

    expected_hidden, expected = decoded(load_oracle(folder, GRANITE), rows)
    roundings = encoder_roundings(folder)
    assert_rows_close(hidden, expected_hidden, roundings=roundings)
    assert_rows_close(logits, expected, roundings=roundings)


@pytest.mark.parametrize(
    "kind, fields, message",
    [
        (PHI3, longrope(short_factor=[1.0]), "allowed: a list of 3 numbers above 0"),
        (PHI3, longrope(short_factor=None), "allowed: a list of 3 numbers above 0"),
        (
            PHI3,
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            'the type "linear"; allowed: default, longrope',
        ),
        (PHI3, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "allowed: numbers up to 1"),
        (PHI3, {"auto_map": {"AutoModel": "other.Model"}}, "code that is not known"),
        (GRANITE, {"logits_scaling": 0}, "has logits_scaling 0"),
        (GRANITE, {"residual_multiplier": "a"}, "has residual_multiplier 'a'"),
        (SMOLLM3, {"no_rope_layers": [1]}, "allowed: a list of 3 numbers"),
        (SMOLLM3, {"no_rope_layers": [1, 2, 0]}, "allowed: a list of 3 numbers"),
        (SMOLLM3, {"no_rope_layers": [1, [], 0]}, "allowed: a list of 3 numbers"),
        (OLMO3, {"layer_types": ["chunked_attention"] * 4}, "allowed: 4 names, each of"),
        (OLMO2, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "allowed: 1.0"),
        (HUNYUAN, {"rope_parameters": {"rope_type": "dynamic", "alpha": -1}}, "has alpha -1"),
        (T5GEMMA, {"encoder": None}, "has encoder null; allowed: an object"),
        (T5GEMMA, {"decoder": {"model_type": "llama"}}, 'with model_type "t5_gemma_module"'),
        (T5GEMMA, {"vocab_size": 7}, "make them agree"),
        (T5GEMMA, {"encoder": {"num_experts": 8}}, 'has the field "num_experts" (8)'),
    ],
)
def test_refuses_what_would_change_results(make_checkpoint, kind, fields, message):
    folder = make_checkpoint(kind)
    set_fields(folder, CONFIG, **fields)

    with refused(message):
        Checkpoint.open(folder)
