"""Each row of a batch gets the outputs that it asks for.

They are equal to the outputs of models of one task.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.closeness import assert_close, encoder_roundings
from varlen import Encoder
from varlen.cache.response_cache import answer_key
from varlen.config import EngineConfig
from varlen.execution.runner import Runner
from varlen.models.checkpoint.family import Labels
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import Prompt, Request, RequestOptions, join_outputs, split_outputs
from varlen.request.row_parameters import RowParameters
from varlen.tasks import further_names, further_problem
from varlen.wire.outputs import AnswerOptions, ModelOutputs, SeveralAnswers

from .refusals import refused_checkpoint, refused_request, refused_setting

# Models with several outputs, by class: their tasks, the model's own first.
MODELS = {
    "BertForMaskedLM": ("embed", "sparse_embed", "hidden"),
    "BertForSequenceClassification": ("classify", "hidden", "embed"),
    "ModernBertForMaskedLM": ("sparse_embed", "embed"),
    "BertForTokenClassification": ("token_classify", "embed"),
}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", params=MODELS)
def model(request, make_checkpoint):
    """Return a checkpoint and its tasks."""
    labels = {"num_labels": 3} if "Classification" in request.param else {}
    return make_checkpoint(request.param, **labels), MODELS[request.param]


def runner_of(folder, tasks):
    """Return a runner of a model with the outputs of these tasks."""
    config = EngineConfig(
        task=tasks[0], outputs=",".join(tasks[1:]) or "none", dtype="fp32", warmup_seconds=0
    )
    return Runner(Checkpoint.open(folder), config)


@pytest.fixture(scope="module")
def runners(model):
    """Return the runner of all tasks, and one for each task."""
    folder, tasks = model
    return runner_of(folder, tasks), {task: runner_of(folder, (task,)) for task in tasks}


def check_output(output, expected, roundings):
    """Compare outputs, sparse ones by the numbers of their terms."""
    if output.ndim == 2 and output.shape[1] == 2 and expected.shape == output.shape:
        output, expected = (each[np.argsort(each[:, 0])] for each in (output, expected))
    assert_close(output, expected, roundings=roundings)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_rows_of_one_batch_have_the_outputs_that_they_ask_for(model, runners, data):
    folder, tasks = model
    mixed, alone = runners
    wishes = st.lists(st.sampled_from(tasks), unique=True, max_size=len(tasks)).map(tuple)
    rows = data.draw(
        st.lists(st.tuples(st.integers(1, 40), wishes, st.booleans()), min_size=1, max_size=8)
    )
    numbers = np.random.default_rng(data.draw(st.integers(0, 9)))
    prompts = [Prompt(numbers.integers(0, 60, size, dtype=np.int32)) for size, *_ in rows]
    options = [RequestOptions(normalize, wished) for _, wished, normalize in rows]

    answers = mixed.run(prompts, options)

    for prompt, option, answer in zip(prompts, options, answers, strict=True):
        wished = option.outputs or tasks[:1]
        outputs = split_outputs(answer) if option.outputs else [answer]
        assert len(outputs) == len(wished)
        for task, output in zip(wished, outputs, strict=True):
            [expected] = alone[task].run([prompt], [option])
            check_output(output, expected, encoder_roundings(folder))


@pytest.mark.parametrize("cache", [0, 1 << 20])
def test_threads_with_other_wishes_share_batches(make_checkpoint, cache):
    folder, tasks = make_checkpoint("BertForMaskedLM"), MODELS["BertForMaskedLM"]
    config = {"dtype": "fp32", "warmup_seconds": 0, "response_cache_bytes": cache}
    texts = ["the cat", "river", "a b c d", "is it?"]
    wishes = [tasks[:1], tasks[1:], tasks, tasks[::-1], tasks[2:]] * 6
    with Encoder.from_pretrained(
        folder, task="embed", outputs="sparse_embed,hidden", **config
    ) as encoder:
        once = encoder.outputs(texts, tasks)
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(partial(encoder.outputs, texts), wishes))

    for wished, rows in zip(wishes, found, strict=True):
        for row, expected in zip(rows, once, strict=True):
            assert tuple(row) == wished
            for task, output in row.items():
                check_output(output, expected[task], encoder_roundings(folder))


def test_heads_run_only_for_rows_that_ask(make_checkpoint, monkeypatch):
    runner = runner_of(make_checkpoint("BertForMaskedLM"), MODELS["BertForMaskedLM"])
    ran = []
    for task, reader in runner.state._readers.items():
        head = reader.device._head
        launch = head.launch
        monkeypatch.setattr(
            head,
            "launch",
            lambda arrays, dims, given, task=task, launch=launch: (
                ran.append((task, dims["sequences"], dims["tokens"])) or launch(arrays, dims, given)
            ),
        )
    prompts = [Prompt(np.arange(5, 5 + size, dtype=np.int32)) for size in (3, 4, 5)]

    runner.run(prompts, [RequestOptions()] * 3)
    runner.run(prompts, [RequestOptions(outputs=each) for each in ((), ("hidden",), ("hidden",))])

    assert ran == [("embed", 3, 12), ("embed", 1, 3), ("hidden", 2, 9)]


@given(st.lists(st.one_of(st.tuples(st.integers(0, 3)), st.tuples(*[st.integers(0, 3)] * 2))))
def test_joined_outputs_are_split_again(shapes):
    outputs = [np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in shapes]
    if not outputs:
        return

    found = split_outputs(join_outputs(outputs))

    assert [each.shape for each in found] == shapes
    assert all(np.array_equal(*each) for each in zip(found, outputs, strict=True))


def test_answers_to_other_wishes_have_other_keys():
    prompt = Prompt(np.arange(3, dtype=np.int32))
    wishes = [
        (),
        ("embed",),
        ("sparse_embed",),
        ("embed", "sparse_embed"),
        ("sparse_embed", "embed"),
    ]

    # an adapter may have the name of a task
    options = [
        RequestOptions(outputs=wish, adapter=adapter, cache_salt=salt)
        for wish, adapter, salt in product(wishes, ["", "embed", "a"], ["", "\0s", "s"])
    ]

    assert len({answer_key(prompt, each) for each in options}) == len(options)


def test_names_of_further_outputs_say_what_they_are():
    assert list(further_names("sparse_embed")) == [
        "sparse_indices",
        "sparse_values",
        "sparse_terms",
        "sparse_num_terms",
    ]
    assert list(further_names("hidden")) == ["last_hidden_state"]


@pytest.mark.parametrize(
    "task, further, problem",
    [
        ("classify", ("rerank",), "rerank and classify both have an output logits"),
        ("embed", ("hidden", "hidden"), "hidden is there already"),
        ("fill_mask", ("embed",), "the task fill_mask has no further outputs"),
    ],
)
def test_outputs_that_exclude_each_other_are_named(task, further, problem):
    assert further_problem(task, further).startswith(problem)


def test_refuses_unknown_outputs(small_bert):
    with refused_setting('outputs is "extract"; allowed: none, or some of embed,'):
        Encoder.from_pretrained(small_bert, outputs="extract")
    with refused_checkpoint("outputs is hidden: hidden is there already"):
        Encoder.from_pretrained(small_bert, task="hidden", outputs="hidden")


def outputs_of(*tasks):
    """Return the outputs of a model with these tasks, the first its own."""
    labels = Labels(("no", "yes"), "softmax")
    own, *further = (ModelOutputs(task, 4, labels, normalize=True) for task in tasks)
    return replace(own, further=tuple(further))


def read(outputs, requested, **parameters):
    """Return the tasks that a request asks for, and what it asks of its answer."""
    widths = {each.task: each.width for each in outputs.further}
    given = RowParameters.read(parameters, outputs.task, width=outputs.width, further=widths)
    options = AnswerOptions.of(given, outputs, requested)
    return options.tasks(outputs), options


@pytest.mark.parametrize(
    "requested, tasks",
    [
        (("sentence_embedding",), ()),
        (("num_tokens",), ()),
        (("sparse_indices", "sparse_values"), ("sparse_embed",)),
        (("sparse_values", "num_tokens"), ("sparse_embed",)),
        (("num_vectors", "sentence_embedding"), ("embed", "token_embed")),
        (("token_embeddings", "sparse_terms"), ("sparse_embed", "token_embed")),
    ],
)
def test_names_of_outputs_choose_the_heads(requested, tasks):
    assert read(outputs_of("embed", "sparse_embed", "token_embed"), requested)[0] == tasks


def test_a_response_has_the_outputs_that_the_request_names():
    outputs = outputs_of("embed", "sparse_embed", "token_embed").with_texts(str, str)
    requested = ("sentence_embedding", "sparse_indices", "sparse_values", "token_embeddings")
    tasks, options = read(outputs, (*requested, "num_tokens"), max_active_dims=1, dimensions=2)
    prompts = tuple(Prompt(np.arange(size, dtype=np.int32)) for size in (2, 3))
    request = Request(prompts, RequestOptions(outputs=tasks))
    vectors = [np.full((size, 4), size, np.float32) for size in (2, 3)]
    dense = [np.array(row, np.float32) for row in ([3, 4, 1, 1], [0, 1, 1, 1])]
    terms = [np.array(row, np.float32) for row in ([[7, 2], [8, 1]], [[9, 3]])]
    rows = [join_outputs(row) for row in zip(dense, terms, vectors, strict=True)]

    maker = SeveralAnswers.to(request, outputs, options)
    tensors = maker.tensors([(1, rows[1]), (0, rows[0])])

    assert set(tensors) == {*requested, "num_tokens"}
    np.testing.assert_allclose(tensors["sentence_embedding"], [[0.6, 0.8], [0, 1]], rtol=1e-6)
    assert tensors["sparse_indices"].tolist() == [[7], [9]]
    assert tensors["sparse_values"].tolist() == [[2], [3]]
    assert tensors["token_embeddings"].tolist() == [[[2] * 4] * 2 + [[0] * 4], [[3] * 4] * 3]
    assert tensors["num_tokens"].tolist() == [[2], [3]]
    # the terms are not known before
    assert maker.num_bytes == sum(
        tensors[name].nbytes for name in ("sentence_embedding", "token_embeddings", "num_tokens")
    )


def test_specs_have_the_further_outputs_behind_the_own_ones():
    names = [spec.name for spec in outputs_of("classify", "hidden").specs]

    assert names == ["logits", "scores", "labels", "num_tokens", "last_hidden_state"]


def test_parameters_of_texts_are_those_of_the_own_task():
    outputs = outputs_of("classify", "embed", "sparse_embed")

    read(outputs, ("scores",), dimensions=2, max_active_dims=3, activation="none")
    with refused_request("the parameter prompt is for the task embed"):
        read(outputs, ("scores",), prompt="query: ")
    with refused_request("dimensions is 5; allowed: whole numbers from 1 to 4"):
        read(outputs, ("sentence_embedding",), dimensions=5)
