"""Settings of config.pbtxt that would cause wrong answers are refused with a reason."""

import pytest

from tests.backend.model_configs import model_config
from tests.backend.refusals import refused_setting
from varlen.models.checkpoint_folder import Checkpoint
from varlen.server.config import check_server_settings, check_tensors, is_decoupled


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"response_cache": {"enable": True}},
            "response_cache is enabled; the server's cache ignores",
        ),
        (
            {"model_transaction_policy": {"decoupled": True}},
            "model_transaction_policy is decoupled",
        ),
        (
            {"sequence_batching": {}},
            "sequence_batching is set; its state per client has no meaning here",
        ),
        (
            {"dynamic_batching": {"preferred_batch_size": [64]}},
            "dynamic_batching is set; varlen forms batches itself, from its own queue: remove it",
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
            {"instance_group": [{"kind": "KIND_CPU", "rate_limiter": {"priority": 2}}]},
            "instance_group has a rate_limiter; the server ends its turn",
        ),
        (
            {"parameters": {"FORCE_CPU_ONLY_INPUT_TENSORS": "no"}},
            'FORCE_CPU_ONLY_INPUT_TENSORS is "no"; allowed: yes',
        ),
        ({"max_batch_size": 0}, "max_batch_size is 0; a row is a sequence, so allow at least 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refuses_settings_that_cannot_be_served(changes, message):
    with refused_setting(message):
        check_server_settings(model_config(**changes), "embed")


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
def test_one_instance_per_device_is_allowed(groups):
    check_server_settings(model_config(instance_group=groups), "embed")


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_model_that_generates_may_send_parts_and_has_no_rows(decoupled):
    policy = {"model_transaction_policy": {"decoupled": decoupled}, "max_batch_size": 0}

    given = model_config("generate", **policy)

    check_server_settings(given, "generate")
    assert is_decoupled(given) is decoupled


def test_a_model_is_not_decoupled_unless_it_says_so():
    assert not is_decoupled(model_config())


@pytest.mark.parametrize("task", ["generate", "translate"])
def test_refuses_rows_for_a_model_that_generates(task):
    with refused_setting(f"max_batch_size is 8; a request of the task {task} holds one prompt"):
        check_server_settings(model_config(task, max_batch_size=8), task)


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
def test_refuses_tensors_that_are_not_those_of_the_task(small_bert, changes, message):
    with refused_setting(message):
        check_tensors(model_config(**changes), Checkpoint.open(small_bert), "embed")


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
def test_refuses_inputs_that_no_request_can_have(small_bert, inputs, message):
    with refused_setting(message):
        check_tensors(model_config(input=inputs), Checkpoint.open(small_bert), "embed")


@pytest.mark.parametrize(
    "inputs",
    [[TEXT], [IDS, MASK], [TEXT, {**IDS, "optional": True}], [{**IDS, "optional": True}, MASK]],
    ids=["text", "ids and mask", "text, ids optional", "mask, ids optional"],
)
def test_one_kind_of_input_may_be_required(small_bert, inputs):
    check_tensors(model_config(input=inputs), Checkpoint.open(small_bert), "embed")


def test_refuses_two_required_prompts_of_generation(small_bert):
    given = model_config("generate")
    for entry in given["input"]:
        entry["optional"] = entry["name"] not in ("text_input", "messages")

    with refused_setting("a request has only one of: text_input, input_ids, messages."):
        check_tensors(given, Checkpoint.open(small_bert), "generate")


def test_refuses_another_type_of_a_tensor_of_generation(small_bert):
    given = model_config("generate")
    check_tensors(given, Checkpoint.open(small_bert), "generate")
    given["output"][0]["data_type"] = "TYPE_UINT8"

    with refused_setting("output \"text_output\" is {'data_type': 'TYPE_UINT8', 'dims': [-1]}"):
        check_tensors(given, Checkpoint.open(small_bert), "generate")


def test_dims_may_come_as_strings(small_bert):
    given = model_config()
    for entry in given["input"] + given["output"]:
        entry["dims"] = [str(dim) for dim in entry["dims"]]

    check_tensors(given, Checkpoint.open(small_bert), "embed")
