"""A kept config.pbtxt is served with notes, or refused with all its problems."""

import pytest
from google.protobuf import json_format, text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from tests.backend.model_configs import model_config
from tests.backend.refusals import refused_setting
from varlen.config import EngineConfig
from varlen.errors import ConfigError
from varlen.models.checkpoint_folder import Checkpoint
from varlen.server.config import (
    RESPONSE_CACHE_BYTES,
    is_decoupled,
    num_warmup_requests,
    read_model,
)


@pytest.fixture
def read(small_bert):
    """Return a function that reads a configuration of a small model."""

    def read(given, folder=small_bert, **options):
        return read_model(given, lambda _: Checkpoint.open(folder), **options)

    return read


@pytest.fixture(scope="session")
def small_gpt2(make_checkpoint):
    return make_checkpoint("GPT2LMHeadModel")


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"model_transaction_policy": {"decoupled": True}},
            "model_transaction_policy is decoupled",
        ),
        (
            {"sequence_batching": {}},
            "sequence_batching is set; its state per client has no meaning here",
        ),
        (
            {"batch_input": [{"kind": "BATCH_ELEMENT_COUNT"}]},
            "batch_input is set; varlen does not read it: remove it",
        ),
        (
            {"batch_output": [{"target_name": ["sentence_embedding"]}]},
            "batch_output is set; varlen does not write it: remove it",
        ),
        (
            {"instance_group": [{"kind": "KIND_CPU", "count": 2, "gpus": []}]},
            "instance_group has 2 instances on the CPU; allowed: 1. Each would load the weights",
        ),
        (
            {"instance_group": [{"kind": "KIND_MODEL", "count": 1}, {"kind": "KIND_CPU"}]},
            "instance_group has 2 instances on the CPU; allowed: 1",
        ),
        (
            {"instance_group": [{"kind": "KIND_GPU", "count": 3, "gpus": [0, 1]}]},
            "instance_group has 3 instances on GPU 0; allowed: 1",
        ),
        (
            {"instance_group": [{"kind": "KIND_CPU", "count": 1, "passive": True}]},
            "instance_group is passive; the first request",
        ),
        (
            {"parameters": {"FORCE_CPU_ONLY_INPUT_TENSORS": "no"}},
            'FORCE_CPU_ONLY_INPUT_TENSORS is "no"; allowed: yes',
        ),
        (
            {"max_batch_size": 0},
            "config.pbtxt has no max_batch_size, and the server completes nothing"
            " (--disable-auto-complete-config): add max_batch_size: 64",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refuses_settings_that_cannot_be_served(read, changes, message):
    with refused_setting(message):
        read(model_config(**changes))


@pytest.mark.parametrize(
    "groups",
    [
        [],
        [{"kind": "KIND_CPU", "count": 1, "gpus": []}],
        [{"kind": "KIND_MODEL", "count": 1}],
        [{"kind": "KIND_GPU", "count": 1, "gpus": [0, 1]}],
        [{"kind": "KIND_GPU", "count": 1, "gpus": [0]}, {"kind": "KIND_GPU", "gpus": [1]}],
        # as the server completes it
        [{"kind": "KIND_CPU", "count": 1, "gpus": [], "passive": False, "host_policy": ""}],
    ],
    ids=str,
)
def test_one_instance_per_device_is_allowed(read, groups):
    assert read(model_config(instance_group=groups)).notes == ()


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_model_that_generates_may_send_parts_and_has_no_rows(read, small_gpt2, decoupled):
    policy = {"model_transaction_policy": {"decoupled": decoupled}, "max_batch_size": 0}

    given = model_config("generate", **policy)

    assert read(given, small_gpt2).task == "generate"
    assert is_decoupled(given) is decoupled


def test_a_model_is_not_decoupled_unless_it_says_so():
    assert not is_decoupled(model_config())


def test_refuses_rows_for_a_model_that_generates(read, small_gpt2):
    with refused_setting("max_batch_size is 8; a request of the task generate holds one prompt"):
        read(model_config("generate", max_batch_size=8), small_gpt2)


TEXT = {"name": "text", "data_type": "TYPE_STRING", "dims": [1]}
IDS = {"name": "input_ids", "data_type": "TYPE_INT64", "dims": [-1]}
MASK = {**IDS, "name": "attention_mask"}
VECTOR = {"name": "sentence_embedding", "data_type": "TYPE_FP32", "dims": [24]}


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"input": [{**TEXT, "name": "TEXT"}]},
            'input "TEXT" is not a tensor of the task embed; allowed: text, input_ids',
        ),
        (
            {"input": [{"name": "input_ids", "data_type": "TYPE_INT32", "dims": [-1]}]},
            "input \"input_ids\" is {'data_type': 'TYPE_INT32', 'dims': [-1]}; the model has",
        ),
        (
            {"input": [{**TEXT, "reshape": {"shape": []}}]},
            'input "text" has a reshape; allowed: none, with dims [1]',
        ),
        (
            {"output": [{**VECTOR, "reshape": {"shape": [24, 1]}}]},
            'output "sentence_embedding" has a reshape; allowed: none, with dims [24]',
        ),
        (
            {"output": [{**VECTOR, "dims": [384]}]},
            "output \"sentence_embedding\" is {'data_type': 'TYPE_FP32', 'dims': [384]}; the model has",
        ),
    ],
    ids=["name", "type", "reshape of an input", "reshape of an output", "dims"],
)
def test_refuses_tensors_that_are_not_those_of_the_task(read, changes, message):
    with refused_setting(message):
        read(model_config(**changes))


@pytest.mark.parametrize(
    "inputs, message",
    [
        ([MASK], "input has attention_mask; a request needs one of: text, input_ids"),
        (
            [TEXT, IDS],
            "the inputs text, input_ids are required; a request has only one of: text, input_ids.",
        ),
        (
            [{**TEXT, "optional": True}, MASK],
            'input "attention_mask" is required without "input_ids": add that or set optional',
        ),
    ],
    ids=["neither text nor ids", "both required", "a mask without ids"],
)
def test_refuses_inputs_that_no_request_can_have(read, inputs, message):
    with refused_setting(message):
        read(model_config(input=inputs))


@pytest.mark.parametrize(
    "inputs",
    [[TEXT], [IDS, MASK], [TEXT, {**IDS, "optional": True}], [{**IDS, "optional": True}, MASK]],
    ids=["text", "ids and mask", "text, ids optional", "mask, ids optional"],
)
def test_one_kind_of_input_may_be_required(read, inputs):
    assert read(model_config(input=inputs)).task == "embed"


def test_refuses_two_required_prompts_of_generation(read, small_gpt2):
    given = model_config("generate", max_batch_size=0)
    for entry in given["input"]:
        entry["optional"] = entry["name"] not in ("text_input", "messages")

    with refused_setting("a request has only one of: text_input, input_ids, messages."):
        read(given, small_gpt2)


def test_refuses_another_type_of_a_tensor_of_generation(read, small_gpt2):
    given = model_config("generate", max_batch_size=0)
    read(given, small_gpt2)
    given["output"][0]["data_type"] = "TYPE_UINT8"

    with refused_setting("output \"text_output\" is {'data_type': 'TYPE_UINT8', 'dims': [-1]}"):
        read(given, small_gpt2)


def test_dims_may_come_as_strings(read):
    given = model_config()
    for entry in given["input"] + given["output"]:
        entry["dims"] = [str(dim) for dim in entry["dims"]]

    assert read(given).task == "embed"


def from_text(text):
    """Return a config.pbtxt as the server passes it, in its JSON form."""
    message = text_format.Parse('name: "m" backend: "varlen"\n' + text, ModelConfig())
    given = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return {"max_batch_size": 0, "input": [], "output": [], **given}


def parameter(key, value):
    return f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}'


BATCHING = (
    "dynamic_batching has no use: varlen forms batches itself, from the rows of all requests."
)
POLICIES = " Its priorities and queue policies rule the server's queue alone"
ROWS_OF_ZEROS = """
model_warmup [ {
  name: "first" batch_size: 4 count: 2
  inputs { key: "text" value { data_type: TYPE_STRING dims: [ 1 ] zero_data: true } }
} ]
"""
TENSORS = """
input [ { name: "text" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "sentence_embedding" data_type: TYPE_FP32 dims: [ 24 ] } ]
"""

# What people keep from their Python and ONNX models, and how the notes in the log begin; none for fields without one.
SERVED = {
    "the backend alone": ("", []),
    "batching without fields": ("max_batch_size: 32 dynamic_batching { }", [BATCHING]),
    "preferred sizes": ("dynamic_batching { preferred_batch_size: [ 4, 8, 16 ] }", [BATCHING]),
    "a delay": (
        "dynamic_batching { preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 5000 }",
        [f"{BATCHING} The server still holds a request back for up to 5000 microseconds: remove"],
    ),
    "queue policies": (
        "dynamic_batching { default_queue_policy { timeout_action: REJECT max_queue_size: 100"
        " default_timeout_microseconds: 1000000 allow_timeout_override: true } }",
        [BATCHING + POLICIES],
    ),
    "priorities": (
        "dynamic_batching { priority_levels: 3 default_priority_level: 2"
        " priority_queue_policy { key: 1 value { max_queue_size: 10 } } }",
        [BATCHING + POLICIES],
    ),
    "order": ("dynamic_batching { preserve_ordering: true }", [BATCHING]),
    "a cache": (
        "response_cache { enable: true }",
        ["response_cache: varlen's own cache keeps answers, in up to 67108864 bytes"],
    ),
    "a cache that is off": ("response_cache { enable: false }", []),
    "warm-up rows": (f"max_batch_size: 8 {ROWS_OF_ZEROS}", ["model_warmup is not needed"]),
    "instances by the server": ("instance_group [ { kind: KIND_AUTO } ]", []),
    "one instance on CPUs": ("instance_group [ { count: 1 kind: KIND_CPU } ]", []),
    "one on each of two GPUs": (
        "instance_group [ { count: 1 kind: KIND_GPU gpus: [ 0, 1 ] } ]",
        [],
    ),
    "a rate limiter": (
        'instance_group [ { kind: KIND_CPU rate_limiter { resources [ { name: "R" count: 1 } ] } } ]',
        ["rate_limiter limits nothing"],
    ),
    "the newest version": ("version_policy: { latest { num_versions: 1 } }", []),
    "accelerators of ONNX": (
        'optimization { execution_accelerators { gpu_execution_accelerator: [ { name: "tensorrt"'
        ' parameters { key: "precision_mode" value: "FP16" } } ] }'
        " cuda { graphs: true busy_wait_events: true } graph { level: 1 }"
        " input_pinned_memory { enable: true } eager_batching: true priority: PRIORITY_MAX }",
        [],
    ),
    "an environment": (
        parameter("EXECUTION_ENV_PATH", "$$TRITON_MODEL_DIRECTORY/env.tar.gz")
        + parameter("FORCE_CPU_ONLY_INPUT_TENSORS", "yes"),
        [],
    ),
    "the file of an ONNX model": ('default_model_filename: "model.onnx"', []),
    "libraries and tags": (
        'model_operations { op_library_filename: "x.so" } cc_model_filenames { key: "7.5" value: "x" }'
        ' metric_tags { key: "team" value: "search" }',
        [],
    ),
    "one response per request": ("model_transaction_policy { decoupled: false }", []),
    "its own tensors": (f"max_batch_size: 16 {TENSORS}", []),
    "labels of an output": (
        TENSORS.replace("[ 24 ]", '[ 24 ] label_filename: "labels.txt"'),
        [],
    ),
    "ragged ids": (
        'input [ { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true'
        " format: FORMAT_NONE } ] dynamic_batching { }",
        [BATCHING],
    ),
    "ids of one length": (
        'platform: "onnxruntime_onnx" max_batch_size: 32'
        ' input [ { name: "input_ids" data_type: TYPE_INT64 dims: [ 128 ] },'
        ' { name: "attention_mask" data_type: TYPE_INT64 dims: [ 128 ] } ]'
        ' output [ { name: "sentence_embedding" data_type: TYPE_FP32 dims: [ -1 ] } ]'
        " version_policy: { all { } } dynamic_batching { preferred_batch_size: [ 1, 4, 8, 32 ] }",
        [BATCHING],
    ),
    "texts of any number": (
        'input [ { name: "text" data_type: TYPE_STRING dims: [ -1 ] } ]',
        [],
    ),
    "batching, a cache and warm-up": (
        f"max_batch_size: 8 dynamic_batching {{ }} response_cache {{ enable: true }} {ROWS_OF_ZEROS}",
        [BATCHING, "response_cache", "model_warmup"],
    ),
}


@pytest.mark.parametrize(("text", "notes"), SERVED.values(), ids=SERVED)
def test_a_kept_config_is_served_and_its_notes_say_what_happens_instead(read, text, notes):
    found = read(from_text(text), is_complete=False).notes

    assert len(found) == len(notes)
    for note, start in zip(found, notes, strict=True):
        assert note.startswith(start)


IDS_AND_MASK = """
input [
  { name: "input_ids" data_type: TYPE_INT32 dims: [ -1, -1 ] },
  { name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] }
]
output [ { name: "last_hidden_state" data_type: TYPE_FP32 dims: [ -1, 24 ] } ]
"""
REFUSED = {
    "names of a Python model": (
        'input [ { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] } ]'
        ' output [ { name: "EMBEDDING" data_type: TYPE_FP32 dims: [ -1, 384 ] } ]'
        + parameter("model_name", "all-MiniLM-L6-v2")
        + parameter("max_length", "512"),
        [
            'input "TEXT" is not a tensor of the task embed',
            'output "EMBEDDING" is not a tensor of the task embed',
            'unknown parameter "max_length". unknown parameter "model_name". Allowed: task, outputs, device',
        ],
    ),
    "types and shapes of an ONNX model": (
        IDS_AND_MASK,
        [
            "input \"input_ids\" is {'data_type': 'TYPE_INT32', 'dims': [-1, -1]}; the model has",
            'output "last_hidden_state" is not a tensor of the task embed; allowed: sentence_embedding',
        ],
    ),
    "a ragged ONNX model": (
        'batch_input [ { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "INDEX" data_type: TYPE_FP32'
        ' source_input: "input_ids" } ] batch_output [ { target_name: "y" kind: BATCH_SCATTER_WITH_INPUT_SHAPE'
        ' source_input: "x" } ]',
        ["batch_input is set; varlen does not", "batch_output is set; varlen does not"],
    ),
    "a decoupled model with state and several instances": (
        "sequence_batching { max_sequence_idle_microseconds: 5000000 direct { } }"
        " model_transaction_policy { decoupled: true } instance_group [ { count: 4 kind: KIND_CPU } ]",
        [
            "sequence_batching is set; its state per client",
            "instance_group has 4 instances on the CPU; allowed: 1.",
            "model_transaction_policy is decoupled; this model sends one response per request",
        ],
    ),
    "wrong settings": (
        parameter("dtype", "float16")
        + parameter("threads", "-1")
        + parameter("max_batch_token", "8")
        + parameter("FORCE_CPU_ONLY_INPUT_TENSORS", "no"),
        [
            'FORCE_CPU_ONLY_INPUT_TENSORS is "no"; allowed: yes',
            'unknown parameter "max_batch_token". Did you mean "max_batch_tokens"? Allowed:',
            'dtype is "float16"; allowed: auto, fp32',
            'threads is "-1"; allowed: whole numbers from 0 to 1024',
        ],
    ),
    "another task, and a reshape": (
        parameter("task", "classify") + TENSORS.replace("[ 1 ]", "[ 1 ] reshape: { shape: [ ] }"),
        [
            'task "classify" needs a BertForSequenceClassification checkpoint; this one is a BertModel',
            'input "text" has a reshape',
            'output "sentence_embedding" is not a tensor of the task classify',
        ],
    ),
    "a task that does not exist": (
        parameter("task", "embeddings")
        + " sequence_batching { }"
        + TENSORS.replace("text", "TEXT"),
        # what tensors it should have is unknown then
        ["sequence_batching is set", 'task is "embeddings"; allowed: '],
    ),
}


@pytest.mark.parametrize(("text", "problems"), REFUSED.values(), ids=REFUSED)
def test_all_problems_of_a_kept_config_are_in_one_error(read, text, problems):
    with pytest.raises(ConfigError) as caught:
        read(from_text(text), is_complete=False)

    found = caught.value.problems
    assert len(found) == len(problems), found
    for problem, start in zip(found, problems, strict=True):
        assert problem.startswith(start)
    numbered = "; ".join(f"({i}) {problem}" for i, problem in enumerate(found, 1))
    assert str(caught.value) == f"{len(found)} problems: {numbered}"


def test_problems_of_the_checkpoint_are_named_beside_those_of_the_config(read, tmp_path):
    with pytest.raises(ConfigError) as caught:
        read(from_text(f"sequence_batching {{ }} {parameter('dtype', 'half')}"), tmp_path)

    state, checkpoint, dtype = caught.value.problems
    assert state.startswith("sequence_batching")
    assert "config.json" in checkpoint
    assert dtype.startswith('dtype is "half"')


def test_an_incomplete_config_on_a_server_that_completes_none_is_refused_with_the_lines_to_add(
    read, small_bert
):
    with pytest.raises(ConfigError) as caught:
        read(from_text(""))

    [problem] = caught.value.problems
    reason, lines = problem.split("): add ")
    assert reason == (
        "config.pbtxt has no max_batch_size, no input, no output, and the server completes nothing"
        " (--disable-auto-complete-config"
    )
    assert read(from_text(lines)).notes == ()
    assert from_text(lines)["max_batch_size"] == 64


def test_a_cache_of_the_server_is_ours_unless_the_server_has_one(read):
    given = from_text("response_cache { enable: true }")
    sized = from_text(
        f"response_cache {{ enable: true }} {parameter('response_cache_bytes', '5000')}"
    )

    assert read(given, is_complete=False).config == EngineConfig(
        response_cache_bytes=RESPONSE_CACHE_BYTES
    )
    assert read(sized, is_complete=False).config == EngineConfig(response_cache_bytes=5000)
    with refused_setting("response_cache is enabled, and this server has a cache (--cache-config)"):
        read(given, is_complete=False, server_caches=True)
    # a cache for other models
    assert read(from_text(""), is_complete=False, server_caches=True).notes == ()


def test_answers_of_generation_are_not_cached(read, small_gpt2):
    found = read(from_text("response_cache { enable: true }"), small_gpt2, is_complete=False)

    assert found.notes == ("response_cache has no effect: answers of generation are not cached",)


@pytest.mark.parametrize(
    ("text", "requests"),
    [
        ("", 0),
        (ROWS_OF_ZEROS, 8),
        ('model_warmup { name: "a" batch_size: 2 } model_warmup { name: "b" count: 3 }', 2),
    ],
)
def test_the_server_sends_each_warmup_row_as_a_request(text, requests):
    assert num_warmup_requests(from_text(text)) == requests


def test_a_setting_that_only_the_checkpoint_refuses_is_named():
    def refuse(config):
        raise ConfigError("the checkpoint has no such setting")

    with pytest.raises(ConfigError) as refused:
        read_model(model_config(sequence_batching={}), refuse)

    batching, of_checkpoint = refused.value.problems
    assert batching.startswith("sequence_batching is set")
    assert of_checkpoint == "the checkpoint has no such setting"
