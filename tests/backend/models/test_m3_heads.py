"""The outputs of bge-m3 follow its published recipe, alone and mixed."""

from itertools import chain, combinations

import numpy as np
import pytest
import torch

from tests.checkpoints import set_fields
from tests.closeness import assert_close, assert_rows_close, encoder_roundings
from tests.m3_models import M3Recipe, check_output, save_m3
from varlen import Encoder
from varlen.config import EngineConfig
from varlen.execution.runner import Runner
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import Prompt, RequestOptions, split_outputs
from varlen_tools.convert_pickle import PickleError, convert

from ..refusals import refused_checkpoint as refused
from ..refusals import refused_setting

TEXTS = ["the cat", "a", "river, the river! is it 42?", "the the cat", "0123456789 ~ cat"]
TASKS = ("embed", "sparse_embed", "token_embed")
WISHES = [*chain.from_iterable(combinations(TASKS, count) for count in (1, 2, 3)), TASKS[::-1]]
SETTINGS = {"outputs": "sparse_embed,token_embed", "warmup_seconds": 0}


@pytest.fixture(scope="module")
def pickled(make_checkpoint):
    """Return a shared checkpoint like bge-m3 whose heads are pickled too."""
    return save_m3(make_checkpoint("XLMRobertaModel"))


@pytest.fixture(scope="module")
def m3(pickled):
    """Return the same checkpoint, converted."""
    convert(pickled)
    return pickled


def check_row(row, expected, roundings):
    """Compare the outputs of a text with the recipe."""
    for task, output in row.items():
        check_output(task, output, expected[task], roundings)
        if task == "sparse_embed":
            assert set(output[:, 0].astype(int)) == expected[task].keys()


def test_each_output_is_that_of_the_recipe_alone_and_mixed(m3):
    roundings, expected = encoder_roundings(m3), M3Recipe(m3).of_texts(TEXTS)

    with Encoder.from_pretrained(m3, dtype="fp32", **SETTINGS) as encoder:
        for text, answer in zip(TEXTS, expected, strict=True):
            for wish in WISHES:
                [row] = encoder.outputs([text], wish)
                assert tuple(row) == wish
                check_row(row, answer, roundings)
        for row, answer in zip(encoder.outputs(TEXTS, TASKS), expected, strict=True):
            check_row(row, answer, roundings)
        dense, tokens = encoder.embed(TEXTS), encoder.token_embed(TEXTS)
        sparse = encoder.sparse_embed(TEXTS)

    assert_close(dense, torch.stack([each["embed"] for each in expected]), roundings=roundings)
    assert_rows_close(tokens, [each["token_embed"] for each in expected], roundings=roundings)
    assert [set(each.indices) for each in sparse] == [
        set(each["sparse_embed"]) for each in expected
    ]


@pytest.mark.parametrize("task", TASKS)
def test_each_output_is_the_task_of_a_model_too(m3, task):
    roundings, expected = encoder_roundings(m3), M3Recipe(m3).of_texts(TEXTS)

    with Encoder.from_pretrained(m3, dtype="fp32", task=task, warmup_seconds=0) as encoder:
        for row, answer in zip(encoder.outputs(TEXTS, [task]), expected, strict=True):
            check_row(row, answer, roundings)


@pytest.mark.parametrize("dtype, lowest", [("bf16", 0.999), ("int8", 0.99)])
def test_a_lower_precision_keeps_the_direction_of_every_output(m3, dtype, lowest):
    with Encoder.from_pretrained(m3, dtype=dtype, **SETTINGS) as encoder:
        rows = encoder.outputs(TEXTS, TASKS)

    for row, expected in zip(rows, M3Recipe(m3).of_texts(TEXTS), strict=True):
        terms = sorted({*row["sparse_embed"][:, 0].astype(int), *expected["sparse_embed"]})
        found = dict(row["sparse_embed"].tolist())
        pairs = {
            "embed": (row["embed"], expected["embed"]),
            "token_embed": (row["token_embed"].ravel(), expected["token_embed"].ravel()),
            "sparse_embed": [
                [weights.get(term, 0.0) for term in terms]
                for weights in (found, expected["sparse_embed"])
            ],
        }
        for task, pair in pairs.items():
            ours, theirs = map(np.array, pair)
            cosine = ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs)
            assert cosine > lowest, task


def test_a_batch_of_every_combination_of_outputs_is_that_of_the_recipe(m3):
    config = EngineConfig(
        task="embed", outputs=f"{SETTINGS['outputs']},hidden", dtype="fp32", warmup_seconds=0
    )
    tasks = (*TASKS, "hidden")
    wishes = [each for count in range(5) for each in combinations(tasks, count)]
    recipe, lengths = M3Recipe(m3), np.random.default_rng(0).permutation(len(wishes)) + 1
    rows = [np.random.default_rng(length).integers(5, 60, length).tolist() for length in lengths]
    prompts = [Prompt(np.array(row, np.int32)) for row in rows]

    answers = Runner(Checkpoint.open(m3), config).run(
        prompts, [RequestOptions(normalize=True, outputs=wish) for wish in wishes]
    )

    for row, wish, answer in zip(rows, wishes, answers, strict=True):
        expected = recipe.of_ids(row)
        outputs = split_outputs(answer) if wish else [answer]
        for task, output in zip(wish or tasks[:1], outputs, strict=True):
            check_output(task, output, expected[task], encoder_roundings(m3))


def test_tasks_of_its_heads_are_served(m3):
    checkpoint = Checkpoint.open(m3)

    assert checkpoint.task == "embed"
    assert set(TASKS) <= set(checkpoint.tasks)
    assert checkpoint.m3.unweighted == (0, 1, 2, 3)


def test_heads_are_converted_beside_weights_that_are_safetensors(make_checkpoint, tmp_path):
    folder = save_m3(make_checkpoint("XLMRobertaModel"))

    written = [path.relative_to(folder).as_posix() for path in convert(folder)]

    assert written == [
        f"{name}/{file}"
        for name in ("sparse_linear", "colbert_linear")
        for file in ("config.json", "model.safetensors")
    ]
    with pytest.raises(PickleError, match="sparse_linear exists already; move it away first"):
        convert(folder)


def test_refuses_a_pickle_of_another_layer(make_checkpoint):
    folder = save_m3(make_checkpoint("XLMRobertaModel"))
    torch.save({"weight": torch.zeros(1, 24)}, folder / "sparse_linear.pt")

    with pytest.raises(PickleError, match=r"sparse_linear.pt has 'weight'; allowed: weight and bi"):
        convert(folder)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"in_features": 12}, "has the layer dense 12 to 1, relu; allowed: 24 to 1, relu"),
        ({"out_features": 2}, "has the layer dense 24 to 2, relu; allowed: 24 to 1, relu"),
        ({"activation_function": "torch.nn.Tanh"}, "has the layer dense 24 to 1, tanh"),
        ({"bias": False}, 'the tensor "linear.bias"'),
    ],
)
def test_refuses_a_head_that_does_not_fit(make_checkpoint, fields, message):
    folder = save_m3(make_checkpoint("XLMRobertaModel"))
    convert(folder)
    set_fields(folder, "sparse_linear/config.json", **fields)

    with refused(message):
        Checkpoint.open(folder).check_task("sparse_embed")


def test_refuses_outputs_without_their_heads(small_bert):
    with refused('task "sparse_embed" needs a BertForMaskedLM checkpoint'):
        Encoder.from_pretrained(small_bert, outputs="sparse_embed")


def test_refuses_outputs_that_do_not_fit_together(m3):
    with refused("outputs is embed: embed is there already, and is named once"):
        Encoder.from_pretrained(m3, outputs="embed")
    with refused_setting("outputs is hidden; further outputs need execution packed"):
        EngineConfig(outputs="hidden", execution="padded")
