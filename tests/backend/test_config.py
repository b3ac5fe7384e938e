"""Settings: defaults, types, and errors that name key, value and allowed values."""

import json
from dataclasses import fields

import pytest

from varlen.config import SERVER_PARAMETERS, SETTINGS, EngineConfig
from varlen.errors import ConfigError

from .refusals import refused_setting as refused

INTEGERS = [
    "max_delay_ms",
    "max_batch_sequences",
    "max_batch_tokens",
    "max_sequence_tokens",
    "max_queued_requests",
    "max_queued_tokens",
    "max_text_bytes",
    "response_cache_bytes",
    "response_cache_seconds",
    "threads",
    "warmup_seconds",
]
MAY_BE_ZERO = {
    "max_delay_ms",
    "response_cache_bytes",
    "response_cache_seconds",
    "threads",
    "warmup_seconds",
}


def shown(value):
    return json.dumps(value, ensure_ascii=False)


def test_no_parameters_are_the_defaults():
    assert EngineConfig.from_parameters({}) == EngineConfig()


def test_every_setting_can_be_spelt_out():
    parameters = {
        "task": "rerank",
        "outputs": "none",
        "device": "cpu",
        "dtype": "bf16",
        "policy": "token_budget",
        "dp_pressure": "infinite",
        "execution": "padded",
        "approximate_gelu": "true",
        "growing_arena": "true",
        "rerank_form": "mxbai",
        "ignore_config_fields": "auto_map, transformers.js_config",
        "adapter": "retrieval.query",
        "adapters": "legal=/adapters/legal",
        "adapter_bytes": "23",
        "trigger": "lazy",
        "max_delay_ms": "10",
        "max_batch_sequences": "12",
        "max_batch_tokens": "1",
        "arena_bytes": "7%",
        "max_sequence_tokens": "2",
        "max_queued_requests": "3",
        "max_queued_tokens": "4",
        "max_text_bytes": "5",
        "max_queued_text_bytes": "18",
        "response_cache_bytes": "8",
        "device_timeout_seconds": "90",
        "ignore_request_timeout": "true",
        "response_cache_seconds": "9",
        "threads": "6",
        "tensor_parallel": "2",
        "pipeline_parallel": "1",
        "rank_timeout_seconds": "5",
        "warmup_seconds": "13",
        "cache_folder": "/somewhere",
        "max_running_sequences": "14",
        "max_step_tokens": "15",
        "inter_token_latency_ms": "22",
        "kv_bytes": "16",
        "kv_block_tokens": "17",
        "kv_cache_dtype": "fp8",
        "kv_policy": "optimistic",
        "prefix_cache": "false",
        "generation_config": "none",
        "speculation": "ngram",
        "draft_model": "none",
        "num_speculative_tokens": "23",
        "prompt_lookup_min": "3",
        "sandbox_seconds": "19",
        "sandbox_bytes": "20000000",
        "grammar_cache_bytes": "21",
        "log_level": "debug",
    }

    config = EngineConfig.from_parameters(parameters)

    assert set(parameters) == {field.name for field in fields(EngineConfig)}
    spelt = {key: str(getattr(config, key)) for key in parameters}
    assert spelt == parameters | {
        "approximate_gelu": "True",
        "growing_arena": "True",
        "ignore_request_timeout": "True",
        "prefix_cache": "False",
    }


@pytest.mark.parametrize("text, expected", [("true", True), ("false", False)])
def test_a_flag_is_true_or_false(text, expected):
    config = EngineConfig.from_parameters({"ignore_request_timeout": text})

    assert config.ignore_request_timeout is expected


@pytest.mark.parametrize("text", ["True", "1", "yes", "", " true"])
def test_refuses_other_words_for_a_flag(text):
    with refused(f'ignore_request_timeout is "{text}"; allowed: true, false'):
        EngineConfig.from_parameters({"ignore_request_timeout": text})


@pytest.mark.parametrize("value", [1, 0, "true", None])
def test_checks_a_flag_given_in_python_too(value):
    with refused(f"ignore_request_timeout is {shown(value)}; allowed: true, false"):
        EngineConfig(ignore_request_timeout=value)


@pytest.mark.parametrize("key", sorted(SERVER_PARAMETERS))
def test_the_server_s_own_parameters_pass(key):
    assert EngineConfig.from_parameters({key: "anything"}) == EngineConfig()


def test_a_misspelt_key_gets_a_hint():
    with refused('unknown parameter "max_batch_token". Did you mean "max_batch_tokens"? Allowed: '):
        EngineConfig.from_parameters({"max_batch_token": "8"})


def test_a_cache_folder_has_a_name():
    with refused('cache_folder is ""; allowed: auto, or a folder'):
        EngineConfig.from_parameters({"cache_folder": ""})


def test_a_key_like_none_gets_the_list_without_a_hint():
    with refused(
        'unknown parameter "zzz". Allowed: task, outputs, device, dtype, threads, tensor_parallel'
    ):
        EngineConfig.from_parameters({"zzz": "8"})


@pytest.mark.parametrize("key", INTEGERS)
@pytest.mark.parametrize("value", ["-1", "1.5", "", " 8", "eight", "1e3", "+3", "0x10", "8 ", "²"])
def test_refuses_numbers_that_are_not_plain_digits(key, value):
    lowest = 0 if key in MAY_BE_ZERO else 1
    with refused(f'{key} is "{value}"; allowed: whole numbers from {lowest}'):
        EngineConfig.from_parameters({key: value})


@pytest.mark.parametrize("key", [key for key in INTEGERS if key not in MAY_BE_ZERO])
def test_refuses_zero_where_something_must_fit(key):
    with refused(f"{key} is 0; allowed: whole numbers from 1"):
        EngineConfig.from_parameters({key: "0"})


def test_refuses_more_threads_than_a_machine_has_cores():
    with refused("threads is 1000000; allowed: whole numbers from 0 to 1024"):
        EngineConfig.from_parameters({"threads": "1000000"})
    assert EngineConfig.from_parameters({"threads": "1024"}).threads == 1024


def test_refuses_a_number_too_long_to_read():
    with refused("... (5002 characters); allowed: whole numbers from 1"):
        EngineConfig.from_parameters({"max_batch_tokens": "9" * 5000})


@pytest.mark.parametrize("key", ["device", "arena_bytes", "ignore_request_timeout", "k" * 20_000])
def test_an_error_repeats_no_more_than_a_hundred_characters(key):
    with refused("characters)") as caught:
        EngineConfig.from_parameters({key: "v" * 20_000})

    assert "v" * 101 not in str(caught.value)
    assert "k" * 101 not in str(caught.value)


@pytest.mark.parametrize("key", sorted(MAY_BE_ZERO))
def test_zero_is_a_value_of_its_own(key):
    assert getattr(EngineConfig.from_parameters({key: "0"}), key) == 0


@pytest.mark.parametrize("key", ["task", "device", "dtype", "policy"])
@pytest.mark.parametrize("value", ["", "nonsense", "EMBED"])
def test_refuses_words_that_are_not_choices(key, value):
    with refused(f'{key} is "{value}"; allowed: '):
        EngineConfig.from_parameters({key: value})


@pytest.mark.parametrize("value", [0, -3, 2.0, "8", True, None])
def test_checks_settings_given_in_python_too(value):
    with refused(f"max_batch_tokens is {shown(value)}; allowed: whole numbers from 1"):
        EngineConfig(max_batch_tokens=value)


@pytest.mark.parametrize(
    "value, limit",
    [(5000, 5000), ("5000", 5000), ("25%", 250), ("100%", 1000), ("1%", 10)],
)
def test_the_arena_s_limit_is_in_bytes_or_a_share_of_the_device(value, limit):
    assert EngineConfig(arena_bytes=value).arena_limit(1000) == limit


@pytest.mark.parametrize(
    "value",
    [
        "",
        "0",
        "0%",
        "101%",
        "-5",
        "5.5%",
        "five",
        "5 %",
        "%",
        "\u0665",
        "9" * 19,
        0,
        -1,
        2.5,
        True,
        None,
    ],
)
def test_refuses_an_arena_of_no_size(value):
    with refused(
        f"arena_bytes is {shown(value)}; allowed: whole numbers from 1, and from 1% to 100% of the"
    ):
        EngineConfig(arena_bytes=value)


def test_only_what_the_checkpoint_decides_may_be_none():
    assert EngineConfig(task=None, max_sequence_tokens=None) == EngineConfig()
    with refused("dtype is null; allowed: auto, fp32, fp16, bf16"):
        EngineConfig(dtype=None)


def test_a_step_holds_a_token_of_each_running_sequence():
    assert EngineConfig(max_step_tokens=8, max_running_sequences=8).max_step_tokens == 8
    with refused("max_step_tokens is 32; it must hold a token of each of the 64 running sequences"):
        EngineConfig.from_parameters({"max_step_tokens": "32"})


def test_every_setting_is_read_by_some_task():
    assert all(setting.tasks for setting in SETTINGS.values())
    for task, others in (("generate", "policy"), ("embed", "kv_policy")):
        assert task not in SETTINGS[others].tasks
        assert task in SETTINGS["max_queued_tokens"].tasks


def test_all_wrong_settings_are_in_one_error():
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_parameters({"batch": "1", "threads": "-1", "dtype": "half", "zzz": "2"})

    unknown, dtype, threads = caught.value.problems
    assert unknown.startswith('unknown parameter "batch". unknown parameter "zzz". Allowed: task,')
    assert dtype.startswith('dtype is "half"; allowed: ')
    assert threads.startswith('threads is "-1"; allowed: ')
    assert str(caught.value) == f"3 problems: (1) {unknown}; (2) {dtype}; (3) {threads}"


def test_settings_that_exclude_each_other_are_in_one_error():
    with pytest.raises(ConfigError) as caught:
        EngineConfig(dtype="int8", tensor_parallel=2, max_step_tokens=1)

    assert [problem.split(" is ")[0] for problem in caught.value.problems] == [
        "dtype",
        "max_step_tokens",
    ]
