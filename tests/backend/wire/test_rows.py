"""The wire format: valid tensors and parameters, and removal of padding."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.backend.fakes.input_limits import input_limits
from tests.backend.refusals import refused_request as refused
from tests.backend.requests import text
from varlen.errors import RequestError
from varlen.intake.checks import Intake
from varlen.intake.roles import TextRole, TextRoles
from varlen.intake.tokenization import Tokenizer
from varlen.models.checkpoint.family import NO_LABELS, Labels
from varlen.request.vectors import VectorForm
from varlen.tasks import input_specs
from varlen.wire import rows as wire
from varlen.wire.outputs import AnswerOptions, ArrayAnswer, ModelOutputs

TASKS = ["embed", "sparse_embed", "fill_mask", "hidden", "classify", "rerank"]
TASKS += ["token_classify", "token_embed"]
IDS = [[2, 5, 3], [2, 6, 3]]
LABELS = Labels(("yes", "no", "perhaps"), "softmax")


@pytest.fixture(scope="module")
def intake(small_bert):
    return Intake(Tokenizer(small_bert, 12), input_limits())


def ids(rows):
    return np.array(rows, dtype=np.int64)


def read(intake, parameters="", *, normalize=False, timeout=0, **tensors):
    """Return the request of these tensors, whose texts are tokenized at once."""
    outputs = ModelOutputs("embed", 24, NO_LABELS, normalize)
    draft, _ = wire.read_request(
        tensors, parameters, intake, outputs, requested=(), timeout_microseconds=timeout
    )
    return draft.complete()


def read_answer(intake, task="embed", **parameters):
    """Return what these parameters ask of an answer of 24 features, or three labels."""
    outputs = ModelOutputs(task, 24 if task in ("embed", "hidden") else 3, LABELS, normalize=True)
    tensors = {"input_ids": ids(IDS)}
    _, answer = wire.read_request(
        tensors, json.dumps(parameters), intake, outputs, requested=["num_tokens"]
    )
    return answer


def rows_of(request):
    return [sequence.token_ids.tolist() for sequence in request.prompts]


@pytest.mark.parametrize("task", TASKS)
def test_every_input_is_optional_and_named_as_exported_models_name_it(task):
    specs = input_specs(task)

    # the task of late interaction scores pairs
    takes_pairs = task in ("classify", "rerank", "hidden", "token_classify", "token_embed")
    texts = ["text", "text_pair"] if takes_pairs else ["text"]
    assert [s.name for s in specs] == [*texts, "input_ids", "attention_mask", "token_type_ids"]
    assert all(spec.optional for spec in specs)
    for spec in specs:
        of_text = spec.name.startswith("text")
        expected = ("TYPE_STRING", (1,)) if of_text else ("TYPE_INT64", (-1,))
        assert (spec.data_type, spec.dims) == expected


def test_reads_texts(intake):
    assert rows_of(read(intake, text=text("the cat", "cat"))) == [[2, 5, 6, 3], [2, 6, 3]]


def test_reads_pairs(intake):
    request = read(intake, text=text("the", "cat"), text_pair=text("cat", "the"))

    assert rows_of(request) == [[2, 5, 3, 6, 3], [2, 6, 3, 5, 3]]
    assert request.prompts[1].type_ids.tolist() == [0, 0, 0, 1, 1]


def test_reads_token_ids(intake):
    request = read(intake, input_ids=ids(IDS))

    assert rows_of(request) == IDS
    assert request.prompts[0].type_ids is None


def test_reads_token_types(intake):
    request = read(intake, input_ids=ids(IDS), token_type_ids=ids([[0, 1, 1], [0, 0, 1]]))

    assert [s.type_ids.tolist() for s in request.prompts] == [[0, 1, 1], [0, 0, 1]]


@given(
    rows=st.lists(
        st.lists(st.tuples(st.integers(0, 59), st.integers(0, 1)), min_size=1, max_size=12),
        min_size=1,
        max_size=6,
    ),
    extra=st.integers(0, 5),
    with_types=st.booleans(),
    padding=st.integers(-5, 2**40),
)
def test_a_padded_batch_is_unpadded_exactly(intake, rows, extra, with_types, padding):
    width = max(map(len, rows)) + extra
    shape = (len(rows), width)
    # values under the mask's zeros may be anything, valid or not
    token_ids, types = np.full(shape, padding), np.full(shape, padding)
    mask = np.zeros(shape, dtype=np.int64)
    for row, pairs in enumerate(rows):
        token_ids[row, : len(pairs)], types[row, : len(pairs)] = zip(*pairs, strict=True)
        mask[row, : len(pairs)] = 1
    tensors = {"input_ids": token_ids, "attention_mask": mask}

    request = read(intake, **tensors, **({"token_type_ids": types} if with_types else {}))

    for sequence, pairs in zip(request.prompts, rows, strict=True):
        assert sequence.token_ids.tolist() == [token for token, _ in pairs]
        if with_types:
            assert sequence.type_ids.tolist() == [kind for _, kind in pairs]
        else:
            assert sequence.type_ids is None


@pytest.mark.parametrize("default", [False, True])
@pytest.mark.parametrize(
    "said, expected",
    [("", None), ("{}", None)]
    + [(json.dumps({"normalize": value}), value) for value in (True, False)],
)
def test_normalize_is_the_model_s_unless_the_request_says(intake, default, said, expected):
    request = read(intake, said, normalize=default, input_ids=ids(IDS))

    assert request.options.normalize is (default if expected is None else expected)


def test_truncate_cuts_texts(intake):
    request = read(intake, '{"truncate": true}', text=text("a " * 30))

    assert len(rows_of(request)[0]) == 12
    with refused("text has 32 tokens; this model takes at most 12"):
        read(intake, '{"truncate": false}', text=text("a " * 30))


def test_truncation_side_decides_which_tokens_stay(intake):
    whole = "the " + "cat " * 15 + "river"

    left = read(intake, '{"truncate": true, "truncation_side": "left"}', text=text(whole))
    right = read(intake, '{"truncate": true}', text=text(whole))

    assert rows_of(left) == [[2, *[6] * 9, 7, 3]]
    assert rows_of(right) == [[2, 5, *[6] * 9, 3]]


def test_a_named_prompt_is_put_before_texts(small_bert):
    named = {"query": TextRole("the "), "document": TextRole("")}
    roles = TextRoles(named, TextRole("a "))
    intake = Intake(Tokenizer(small_bert, 12), input_limits(), roles=roles)

    def ids_of(**parameters):
        return rows_of(read(intake, json.dumps(parameters), text=text("cat")))

    assert ids_of(prompt_name="query") == [[2, 5, 6, 3]]
    assert ids_of(prompt_name="document") == [[2, 6, 3]]
    assert len(ids_of()[0]) == 4
    with refused("prompt_name is 'q'; this model has the prompts: query, document"):
        ids_of(prompt_name="q")
    with refused("prompt_name is 3; allowed: a string"):
        ids_of(prompt_name=3)
    with refused("the request has prompt_name and input_ids; a prompt is put before texts"):
        read(intake, '{"prompt_name": "query"}', input_ids=ids(IDS))


def test_a_request_may_have_a_prompt_of_its_own(small_bert):
    roles = TextRoles({}, TextRole("a "), TextRole)
    intake = Intake(Tokenizer(small_bert, 12), input_limits(), roles=roles)

    def ids_of(**parameters):
        return rows_of(read(intake, json.dumps(parameters), text=text("cat")))

    assert ids_of(prompt="the ") == [[2, 5, 6, 3]]
    assert ids_of(prompt="") == [[2, 6, 3]]
    with refused("input_type and prompt; send one"):
        ids_of(prompt="", input_type="query")
    with refused("prompt is 3; allowed: a string of at most 4096 characters"):
        ids_of(prompt=3)
    with refused("allowed: a string of at most 4096 characters"):
        ids_of(prompt="a" * 4097)
    with refused("allowed: a string of 1 to 4096 characters"):
        ids_of(instruction="")
    with refused("the request has prompt and input_ids; a prompt is put before texts"):
        read(intake, '{"prompt": "the "}', input_ids=ids(IDS))


def test_an_input_type_chooses_a_prompt(small_bert):
    roles = TextRoles({"Query": TextRole("the ")}, TextRole("a "))
    intake = Intake(Tokenizer(small_bert, 12), input_limits(), roles=roles)

    def ids_of(**parameters):
        return rows_of(read(intake, json.dumps(parameters), text=text("cat")))

    assert ids_of(input_type="search_query") == ids_of(prompt_name="Query") == [[2, 5, 6, 3]]
    assert ids_of(input_type="passage") == [[2, 6, 3]]
    with refused(
        "input_type is clustering; this model has no prompt for it. Name one of its prompts with prompt_name: Query"
    ):
        ids_of(input_type="clustering")


def test_an_answer_has_the_model_s_form_unless_the_request_says(intake):
    requested = frozenset({"num_tokens"})
    assert read_answer(intake) == AnswerOptions(requested, VectorForm(normalize=True), "softmax")
    assert read_answer(intake, "classify").function == "softmax"
    assert read_answer(intake, "classify", activation="auto").function == "softmax"


def test_reads_the_form_of_an_answer(intake):
    answer = read_answer(intake, dimensions=16, output_dtype="int8", normalize=False)

    assert answer.vectors == VectorForm(16, normalize=False, dtype="int8")
    assert read_answer(intake, "token_classify", activation="sigmoid").function == "sigmoid"
    assert read_answer(intake, "rerank", activation="none").function == "none"


def test_reads_how_many_tokens_may_fill_a_mask(intake):
    assert read_answer(intake, "fill_mask").top_k == 3
    assert read_answer(intake, "fill_mask", top_k=2).top_k == 2
    for wrong in (0, 4):
        with refused(f"top_k is {wrong}; allowed: whole numbers from 1 to 3"):
            read_answer(intake, "fill_mask", top_k=wrong)


def test_reads_how_many_terms_a_sparse_vector_may_have(intake):
    assert read_answer(intake, "sparse_embed", max_active_dims=3).max_active_dims == 3
    assert read_answer(intake, "sparse_embed").max_active_dims is None
    for wrong in (0, 4):
        with refused(f"max_active_dims is {wrong}; allowed: whole numbers from 1 to 3"):
            read_answer(intake, "sparse_embed", max_active_dims=wrong)


@pytest.mark.parametrize("dtype", ["binary", "ubinary"])
def test_bits_may_fill_whole_bytes(intake, dtype):
    assert read_answer(intake, output_dtype=dtype, dimensions=8).vectors.dtype == dtype


@pytest.mark.parametrize(
    "task, name, value, allowed",
    [
        ("classify", "activation", "relu", "auto, softmax, sigmoid, none"),
        ("classify", "activation", ["none"], "auto, softmax, sigmoid, none"),
    ],
)
def test_refuses_another_choice(intake, task, name, value, allowed):
    with refused(f"{name} is {json.dumps(value)}; allowed: {allowed}"):
        read_answer(intake, task, **{name: value})


@pytest.mark.parametrize(
    "task, name, tasks",
    [
        ("classify", "dimensions", "embed"),
        ("hidden", "output_dtype", "embed"),
        ("hidden", "prompt_name", "embed or sparse_embed or token_embed"),
    ],
)
def test_refuses_a_parameter_of_another_task(intake, task, name, tasks):
    with refused(f"the parameter {name} is for the task {tasks}; this model has the task {task}"):
        read_answer(intake, task, **{name: 8})


@pytest.mark.parametrize(
    "deadline_ms, timeout, expected",
    [
        (None, 0, None),
        (250, 0, 0.25),
        (0.5, 0, 0.0005),
        (None, 40_000, 0.04),
        (250, 40_000, 0.04),
        (20.0, 40_000, 0.02),
    ],
)
def test_the_sooner_deadline_holds(intake, deadline_ms, timeout, expected):
    said = "" if deadline_ms is None else json.dumps({"deadline_ms": deadline_ms})

    request = read(intake, said, timeout=timeout, input_ids=ids(IDS))

    assert request.options.deadline_seconds == expected


@pytest.mark.parametrize("value", range(10))
def test_reads_a_priority(intake, value):
    request = read(intake, json.dumps({"request_priority": value}), input_ids=ids(IDS))

    assert request.options.priority == value


@pytest.mark.parametrize("name", ["tenant", "cache_salt"])
def test_reads_the_name_of_a_caller(intake, name):
    request = read(intake, json.dumps({name: "a\nb"}), input_ids=ids(IDS))

    assert getattr(request.options, name) == "a\nb"


def test_a_request_that_says_nothing_has_the_lowest_priority(intake):
    assert read(intake, input_ids=ids(IDS)).options.priority == 0


@pytest.mark.parametrize(
    "name",
    """
    priority timeout id request_id correlation_id sequence_id sequence_start sequence_end headers
    binary_data binary_data_output binary_data_size classification shared_memory_region
    shared_memory_offset shared_memory_byte_size triton_enable_empty_final_response traceparent
    tracestate X-Request-ID X-Request-Priority X-Deadline-Ms x-tenant Authorization Content-Type
    User-Agent model model_name stream max_tokens temperature user encoding_format
    parameters inputs outputs lora_id truncate_prompt_tokens normalize_embeddings
    """.split(),
)
def test_ignores_each_name_that_frontends_use(intake, name):
    assert rows_of(read(intake, json.dumps({name: 1}), input_ids=ids(IDS))) == IDS


@pytest.mark.parametrize("task", ["embed", "rerank", "fill_mask"])
@pytest.mark.parametrize("name", ["top_n", "top_p", "top", "n"])
def test_ignores_a_short_name_that_differs_from_ours_in_a_letter(intake, task, name):
    assert read_answer(intake, task, **{name: 1}) == read_answer(intake, task)


def test_refuses_a_near_miss_only_of_a_parameter_that_the_task_has(intake):
    for name, task, meant in [("topK", "fill_mask", "top_k"), ("dimension", "embed", "dimensions")]:
        with refused(f'unknown parameter "{name}". Did you mean "{meant}"?'):
            read_answer(intake, task, **{name: 1})
        read_answer(intake, "rerank", **{name: 1})


def test_ignores_a_parameter_with_a_name_of_any_length(intake):
    assert rows_of(read(intake, json.dumps({"truncate" * 10_000: 1}), input_ids=ids(IDS))) == IDS


@pytest.mark.parametrize(
    "parameters", ["[]", "3", "null", '"truncate"', "{", "{'a': 1}", "[" * 9999]
)
def test_refuses_parameters_that_are_no_json_object(intake, parameters):
    with refused("; allowed: ") as caught:
        read(intake, parameters, input_ids=ids(IDS))

    assert str(caught.value).startswith("parameters is ")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "given, message",
    [
        ({"a": "b" * 131_072}, "parameters has 131081 bytes; allowed: up to 131072"),
        ({"a": "中" * 50_000}, "parameters has 150009 bytes; allowed: up to 131072"),
        ({"a": [[]] * 60_000}, "parameters has 240007 bytes; allowed: up to 131072"),
        (
            {"a": [0] * 20_000},
            "parameters has 20001 commas and opening brackets; allowed: up to 20000",
        ),
        (dict.fromkeys(map(str, range(101)), 1), "the request has 101 parameters; allowed: up to"),
    ],
    ids=["text", "characters of three bytes", "lists", "numbers", "names"],
)
def test_refuses_parameters_that_take_long_to_read(intake, given, message):
    with refused(message):
        read(intake, json.dumps(given, ensure_ascii=False), input_ids=ids(IDS))


def test_a_long_text_is_refused_before_it_is_decoded(intake):
    with refused("row 1: text has 4001 bytes; this model takes at most 4000"):
        read(intake, text=np.array([[b"the"], [b"\xff" * 4001]], object))


@pytest.mark.parametrize("name", ["truncate", "normalize", "request_priority", "deadline_ms"])
@pytest.mark.parametrize("value", ["x" * 20_000, ["y"] * 5000], ids=["string", "list"])
def test_an_error_repeats_no_more_than_a_hundred_characters(intake, name, value):
    with refused(f"... ({len(json.dumps(value))} characters); allowed: ") as caught:
        read(intake, json.dumps({name: value}), input_ids=ids(IDS))

    assert str(caught.value).startswith(f"{name} is {json.dumps(value)[:100]}...")


def test_an_error_does_not_list_thousands_of_inputs(intake):
    with refused("... (5888 characters); send text, or input_ids"):
        read(intake, **{f"x{number}": ids(IDS) for number in range(1000)})


def test_a_millisecond_is_a_timeout(intake):
    assert read(intake, timeout=1000, input_ids=ids(IDS)).options.deadline_seconds == 0.001


def test_ignores_what_frontends_add(intake):
    added = {
        "triton_enable_empty_final_response": False,
        "binary_data_output": True,
        "X-Tenant": "somebody",
        "id": "42",
        "priority": 3,
        "headers": {"a": [1]},
        "truncate": True,
    }

    assert rows_of(read(intake, json.dumps(added), input_ids=ids(IDS))) == IDS


def read_long(intake, *, requested=("sentence_embedding",), rows=("the cat a the",), **parameters):
    """Return the prompts and the answer of a request for spans or windows."""
    outputs = ModelOutputs("embed", 24, NO_LABELS, normalize=True)
    draft, answer = wire.read_request(
        {"text": text(*rows)}, json.dumps(parameters), intake, outputs, requested=requested
    )
    return draft.complete(), answer


def test_spans_are_json_and_have_a_vector_each(intake):
    request, answer = read_long(intake, spans="[[0, 3], [4, 9], [0, 13]]", dimensions=8)

    [prompt] = request.prompts
    assert prompt.spans == [(0, 2), (2, 4), (0, 6)]
    # vectors are normalized where they are joined
    assert not request.options.normalize
    made = ArrayAnswer.to(request, ModelOutputs("embed", 24, NO_LABELS, normalize=True), answer)
    assert made.num_bytes == 3 * 8 * 4
    vectors = np.random.default_rng(0).normal(size=(3, 24)).astype(np.float32)
    found = made.tensors([(0, vectors)])["sentence_embedding"]
    expected = vectors[:, :8] / np.linalg.norm(vectors[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_windows_are_prompts_whose_tokens_are_counted_together(intake):
    request, answer = read_long(
        intake, rows=["the cat " * 9, "the"], windows=True, window_overlap=0
    )

    assert [len(each.token_ids) for each in request.prompts] == [12, 10, 3]
    assert request.options.normalize
    made = ArrayAnswer.to(request, ModelOutputs("embed", 24, NO_LABELS, normalize=True), answer)
    assert made.num_tokens == [22, 3]


@pytest.mark.parametrize(
    "parameters, message",
    [
        ({"spans": "[[0, 3]"}, 'spans is "\\[\\[0, 3\\]"; allowed: JSON'),
        ({"spans": "[]"}, "spans is .*; allowed: a list of 1 to 4096 spans"),
        ({"spans": "[[0, 3], [2]]"}, r"spans\[1\] is \[2\]; allowed: \[begin, end\] in characters"),
        ({"spans": "[[0, true]]"}, r"spans\[0\] is \[0, true\]"),
        ({"spans": "[[3, 0]]"}, r"spans\[0\] is \[3, 0\]"),
        ({"spans": "[[0, 1e3]]"}, r"spans\[0\] is \[0, 1000.0\]"),
        ({"spans": str([[0, 1]] * 5000)}, "spans is .*; allowed: a list of 1 to 4096 spans"),
        ({"spans": "[[0, 3]]", "truncate": True}, "the request has spans and cuts texts"),
        ({"windows": True, "truncation_side": "left"}, "the request has windows and cuts texts"),
        ({"windows": "yes"}, 'windows is "yes"; allowed: true, false'),
        ({"windows": True, "window_overlap": -1}, "window_overlap is -1; allowed"),
        ({"window_overlap": 2}, "the request has window_overlap without windows"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refuses_wrong_spans_and_windows(intake, parameters, message):
    with pytest.raises(RequestError, match=message):
        read_long(intake, **parameters)


def test_spans_are_of_one_text_alone(intake):
    with refused("the request has spans and 2 texts; send one text in a request"):
        read_long(intake, rows=["the", "cat"], spans="[[0, 3]]")
    outputs = ModelOutputs("embed", 24, NO_LABELS, normalize=True)
    with refused("the request has spans and input_ids; these are parts of single texts"):
        wire.read_request(
            {"input_ids": ids(IDS)}, '{"spans": "[[0, 3]]"}', intake, outputs, requested=()
        )
