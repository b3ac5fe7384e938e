"""Tables of rotary positions match transformers, far positions included; other variants are refused."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.backend.refusals import refused_checkpoint as refused
from varlen.models.blocks.attention import rotary_table
from varlen.models.checkpoint.rotary_config import LinearScaling, read_rotary

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}

VARIANTS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-exact-ramp": {**YARN, "truncate": False},
    "yarn-attention-factor": {**YARN, "attention_factor": 1.5},
    "yarn-scales": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-one-scale": {**YARN, "mscale": 0.7},
    "yarn-no-extension": {**YARN, "factor": 1.0},
    # the ramp has no width, and ends before the first feature
    "yarn-steep": {**YARN, "original_max_position_embeddings": 4},
}


def config_of(**fields):
    return {"max_position_embeddings": 16384, **fields}


def angles_of_transformers(rotary, dim, positions):
    config = LlamaConfig(
        hidden_size=dim,
        num_attention_heads=1,
        max_position_embeddings=16384,
        rope_parameters=rotary,
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(positions)[None])
    return torch.cat((cos[0, :, : dim // 2], sin[0, :, : dim // 2]), dim=1)


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dim", [6, 128])
def test_the_table_is_that_of_transformers(variant, dim, theta):
    rotary = {**VARIANTS[variant], "rope_theta": theta}
    settings = read_rotary(config_of(rope_parameters=rotary))

    table = rotary_table(settings, dim, torch.device("cpu"))

    assert table.shape == (16384, dim)
    assert table.dtype == torch.float32
    # one rounding of a frequency, at the farthest position
    bound = 16384 * torch.finfo(torch.float32).eps
    expected = angles_of_transformers(dict(rotary), dim, 16384)
    torch.testing.assert_close(table, expected, rtol=0, atol=bound)


def test_an_absent_base_is_ten_thousand():
    settings = read_rotary(config_of())

    assert (settings.theta, settings.scaling) == (10_000.0, LinearScaling(1.0))


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_yarn_reaches_past_max_position_embeddings(key):
    """Qwen2.5 describes its extension in this way, and leaves max_position_embeddings as it was."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16384}

    assert read_rotary(config_of(**{key: scaling})).positions == 65536


def test_a_file_may_say_the_same_twice():
    parameters = {"rope_type": "linear", "type": "linear", "factor": 2.0, "rope_theta": 5e5}

    settings = read_rotary(
        config_of(rope_parameters=parameters, rope_scaling=parameters, rope_theta=5e5)
    )

    assert (settings.theta, settings.scaling) == (5e5, LinearScaling(2.0))


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0]}},
            'rope_scaling of config.json has the type "longrope"; allowed: default, linear, dynamic, llama3, yarn',
        ),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, 'has the type ["yarn"]; allowed: default'),
        (
            {"rope_parameters": {**YARN, "type": "linear"}},
            'has rope_type "yarn" and type "linear"; make them agree',
        ),
        ({"rope_parameters": 3}, "config.json has rope_parameters 3; allowed: an object"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": YARN},
            "config.json has rope_scaling and rope_parameters, which disagree",
        ),
        (
            {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}},
            "rope_parameters of config.json has rope_theta 10000.0 and config.json 1000000.0",
        ),
        ({"rope_theta": "big"}, "config.json has rope_theta 'big'; allowed: numbers above 0"),
        ({"rope_scaling": {"type": "linear"}}, "has factor None; allowed: numbers above 0"),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, "has factor -2; allowed"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "has factor nan; allowed"),
        (
            {"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}},
            "has low_freq_factor 1 and high_freq_factor 1; allowed: low below high",
        ),
        (
            {"rope_parameters": {**YARN, "original_max_position_embeddings": 0}},
            "has original_max_position_embeddings 0; allowed: whole numbers from 1",
        ),
        ({"rope_parameters": {**YARN, "truncate": 1}}, "has truncate 1; allowed: true, false"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "has partial_rotary_factor 0.5; allowed: 1.0",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            'rope_parameters of config.json has the field "full_attention"',
        ),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, 'has the type "mrope"'),
    ],
)
def test_refuses_what_it_does_not_serve(fields, message):
    with refused(message):
        read_rotary(config_of(**fields))
