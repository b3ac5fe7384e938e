"""Models with experts equal transformers, or a statement of their code; what is refused."""

import numpy as np
import pytest
import torch
import transformers

from tests.backend.refusals import refused_checkpoint as refused
from tests.checkpoints import change_tensors, set_fields, write_file
from varlen import Encoder
from varlen.models.checkpoint.first_releases import to_native
from varlen.models.checkpoint_folder import Checkpoint

from . import stated
from .oracle import assert_states_equal, states_of

# As in nomic-embed-text-v2-moe, but small.
NOMIC = {
    "activation_function": "gelu",
    "architectures": ["NomicBertModel"],
    "attn_pdrop": 0.0,
    "auto_map": {
        "AutoConfig": "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.NomicBertConfig",
        "AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel",
    },
    "causal": False,
    "expert_choice_router": False,
    "ffn_div": 1,
    "fused_bias_fc": True,
    "fused_dropout_add_ln": True,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "max_trained_positions": 300,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "model_type": "nomic_bert",
    "moe_every_n_layers": 2,
    "moe_impl": "megablocks",
    "moe_normalize_expert_weights": False,
    "moe_resid_pdrop": 0.0,
    "moe_top_k": 2,
    "n_embd": 24,
    "n_head": 3,
    "n_inner": 40,
    "n_layer": 4,
    "n_positions": 300,
    "num_experts": 5,
    "num_shared_experts": 0,
    "pad_token_id": 1,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": True,
    "resid_pdrop": 0.0,
    "rotary_emb_base": 10000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "router_aux_loss_coef": 0.1,
    "scale_attn_weights": True,
    "torch_dtype": "float32",
    "type_vocab_size": 1,
    "use_flash_attn": True,
    "use_rms_norm": None,
    "vocab_size": 100,
}
LENGTHS = (1, 2, 7, 300, 33, 60, 7)
CAUSAL = "Qwen3MoeForCausalLM"


def save_nomic(folder, **fields):
    """Save a random checkpoint and return its statement."""
    config = NOMIC | fields
    torch.manual_seed(0)
    model = stated.NomicBertMoeModel(transformers.PretrainedConfig(**config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.2 if parameter.ndim == 1 else config["n_embd"] ** -0.5
            start = parameter if parameter.ndim == 1 else 0
            parameter.copy_(torch.randn_like(parameter) * scale + start)
    model.save_pretrained(folder)
    write_file(folder, "config.json", config)
    return model.double()


@pytest.fixture
def nomic(tmp_path, small_bert):
    def save(**fields):
        write_file(tmp_path, "tokenizer.json", (small_bert / "tokenizer.json").read_text())
        return tmp_path, save_nomic(tmp_path, **fields)

    return save


def rows_of(rng, lengths=LENGTHS):
    return [rng.integers(5, 60, length).tolist() for length in lengths]


@pytest.mark.parametrize(
    "fields",
    [{}, {"moe_every_n_layers": 3}, {"num_experts": 1, "moe_top_k": 1}, {"moe_top_k": 5}],
    ids=["v2", "third", "one", "all"],
)
def test_nomic_with_experts_equals_the_statement_alone_and_mixed(nomic, rng, fields):
    folder, model = nomic(**fields)
    rows = rows_of(rng)

    together, alone = assert_states_equal(folder, states_of(model, rows), rows)
    assert all(map(np.array_equal, alone[2:5], together[2:5]))


def test_nomic_with_experts_is_close_in_bf16(nomic, rng):
    folder, model = nomic()
    rows = rows_of(rng)

    with Encoder.from_pretrained(folder, task="hidden", dtype="bf16") as encoder:
        actual = encoder.hidden(rows)

    pairs = zip(actual, states_of(model, rows), strict=True)
    assert cosine_of_means(pairs) > 0.999


def cosine_of_means(pairs):
    """Return the lowest cosine of the mean of a sequence's rows to the expected one."""
    cosines = []
    for actual, expected in pairs:
        one, other = np.mean(actual, 0, np.float64), expected.double().numpy().mean(0)
        cosines.append(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
    return min(cosines)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"activation_function": "swiglu"}, 'activation_function "swiglu"; allowed: gelu'),
        ({"moe_normalize_expert_weights": True}, "has moe_normalize_expert_weights true; allowed"),
        ({"num_shared_experts": 1}, "has num_shared_experts 1; allowed: 0"),
        ({"expert_choice_router": True}, "has expert_choice_router true; allowed: false"),
        ({"moe_top_k": 6}, "has moe_top_k 6; allowed: at most 5, the experts of a layer"),
        ({"moe_every_n_layers": 1}, "moe_every_n_layers 1"),
        ({"qkv_proj_bias": False}, "has qkv_proj_bias false; allowed: true"),
    ],
    ids=str,
)
def test_refuses_experts_that_are_not_served(nomic, fields, message):
    folder, _ = nomic()
    set_fields(folder, "config.json", **fields)

    with refused(message):
        Checkpoint.open(folder)


def test_names_the_tensors_of_experts_that_are_missing_or_of_another_shape(nomic):
    folder, _ = nomic()
    name = "encoder.layers.1.mlp.experts.mlp.w2"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(5 * 40, 23)}))

    with refused(name):
        Checkpoint.open(folder).check_task("embed")


def test_a_translated_file_stays_as_it_is():
    native = to_native(NOMIC)

    assert native["architectures"] == ["NomicBertMoeModel"]
    assert to_native(native) == native


@pytest.mark.parametrize("fields", [{}, {"decoder_sparse_step": 2, "norm_topk_prob": False}])
def test_qwen3_with_experts_embeds_as_transformers_alone_and_mixed(make_checkpoint, rng, fields):
    folder = make_checkpoint("Qwen3MoeModel", **fields)
    model = transformers.Qwen3MoeModel.from_pretrained(folder, dtype=torch.float32).eval()
    rows = rows_of(rng)
    expected = states_of(model, rows)

    with Encoder.from_pretrained(folder, task="hidden", dtype="bf16") as encoder:
        rounded = encoder.hidden(rows)

    together, alone = assert_states_equal(folder, expected, rows)
    assert all(map(np.array_equal, alone[2:5], together[2:5]))
    assert cosine_of_means(zip(rounded, expected, strict=True)) > 0.999


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_experts_per_tok": 8}, "has num_experts_per_tok 8; allowed: at most 7"),
        ({"num_experts": 6, "num_local_experts": 7}, "num_experts 6 and num_local_experts 7; make"),
        ({"mlp_only_layers": ["all"]}, "allowed: a list of numbers of layers"),
        ({"hidden_act": "gelu"}, 'has hidden_act "gelu"; allowed: "silu"'),
    ],
    ids=str,
)
def test_refuses_a_qwen3_that_is_not_served(make_checkpoint, fields, message):
    folder = make_checkpoint(CAUSAL)
    set_fields(folder, "config.json", **fields)

    with refused(message):
        Checkpoint.open(folder)


def test_reads_the_number_of_experts_under_its_older_name(make_checkpoint):
    folder = make_checkpoint(CAUSAL)
    before = Checkpoint.open(folder).config
    number = before["num_local_experts"]

    set_fields(folder, "config.json", num_experts=number, num_local_experts=number)

    Checkpoint.open(folder).check_task("generate")
