"""`varlen doctor` says whether a model agrees with the original library."""

import json
import re

import numpy as np
import pytest
import transformers
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from typer.testing import CliRunner

from tests.adapters import save_adapter
from tests.backend.models import stated
from tests.checkpoints import (
    WEIGHTS,
    change_tensors,
    leave_only_a_pickle,
    pooling_files,
    save_checkpoint,
    set_fields,
    write_file,
)
from tests.gliner_models import save_gliner
from varlen import Encoder
from varlen.models.checkpoint import tokenizer_files
from varlen_client.cli.main import app
from varlen_tools.doctor import comparison
from varlen_tools.doctor import examine as examine_module
from varlen_tools.doctor.comparison import compare_ids, compare_scores, compare_values
from varlen_tools.doctor.examine import agreement
from varlen_tools.doctor.report import short_config
from varlen_tools.fetch import fetch

PRICE = r"int8: \d+\.\d times as fast here, mean cosine [01]\.\d{4}(: set dtype: int8)?"


def doctor(folder, *arguments):
    return CliRunner(env={"COLUMNS": "160"}).invoke(
        app, ["doctor", str(folder), "--no-speed", *arguments]
    )


def report_of(folder, *arguments):
    result = doctor(folder, "--json", *arguments)
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


def agreeing(folder, *arguments):
    """Return the report of a model that agrees with the original."""
    report = report_of(folder, *arguments)
    assert report["verdict"] == "agrees", report["examination"]["comparisons"]
    return report


@pytest.fixture
def words(tmp_path):
    """The folder of a model that fills in words."""
    return save_checkpoint(tmp_path / "words", "BertForMaskedLM")


@pytest.fixture
def decoder(tmp_path):
    """The folder of a GPT-2."""
    return save_checkpoint(tmp_path / "model", "GPT2LMHeadModel")


def use_tokenizer_as_it_is(folder):
    """Name the class of transformers that takes tokenizer.json without changes."""
    tokens = {"pad_token": "[PAD]"} if "[PAD]" in (folder / "tokenizer.json").read_text() else {}
    set_fields(folder, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", **tokens)


KINDS = [
    ("BertForSequenceClassification", {"num_labels": 1}, ["--set", "task=rerank"]),
    ("BertForMaskedLM", {}, ["--set", "task=sparse_embed"]),
    ("BertForQuestionAnswering", {}, []),
    ("ModernBertModel", {}, ["--set", "task=hidden"]),
    ("GPT2LMHeadModel", {}, []),
]
MORE_KINDS = [
    ("BertForSequenceClassification", {"num_labels": 3}, []),
    ("BertForTokenClassification", {"num_labels": 4}, []),
    ("BertForMaskedLM", {}, ["--set", "task=fill_mask"]),
    ("Qwen3Model", {"pad_token_id": 1}, ["--set", "task=hidden"]),
    ("T5ForConditionalGeneration", {"num_decoder_layers": 2}, []),
]


@pytest.mark.parametrize(
    "kind, config, arguments",
    [*KINDS, *(pytest.param(*each, marks=pytest.mark.full) for each in MORE_KINDS)],
    ids=str,
)
def test_a_model_of_any_task_agrees_with_the_original(tmp_path, kind, config, arguments):
    folder = save_checkpoint(tmp_path / "model", kind, **config)
    if not kind.startswith("Bert"):
        use_tokenizer_as_it_is(folder)

    comparisons = agreeing(folder, *arguments)["examination"]["comparisons"]

    assert all(each["count"] > 3 for each in comparisons if each["agrees"])


def test_a_model_of_spans_is_loaded_and_not_compared(tmp_path):
    report = report_of(save_gliner(tmp_path / "model", labels_kind="BertModel"))

    assert report["verdict"] == "not compared"
    assert "not compared: spans" in report["summary"]
    [comparison] = report["examination"]["comparisons"]
    assert "its library is gliner or gliner2" in comparison["remark"]
    assert report["examination"]["memory"]


@pytest.mark.parametrize("task", [pytest.param("classify", marks=pytest.mark.full), "rerank"])
def test_other_token_types_of_pairs_are_found(tmp_path, monkeypatch, task):
    folder = save_checkpoint(tmp_path / "model", "BertForSequenceClassification", num_labels=1)
    use_tokenizer_as_it_is(folder)
    agreeing(folder, "--set", f"task={task}")
    monkeypatch.setattr(tokenizer_files, "_gives_types", lambda *_: True)

    report = report_of(folder, "--set", f"task={task}")

    assert report["verdict"] == "differs"
    assert report["summary"].startswith("it differs from the original library: logits in fp32")


def test_a_vector_for_each_token_agrees_in_both_roles(tmp_path):
    made = save_checkpoint(tmp_path / "plain")
    expansion = {"strategy": "fixed", "length": 32, "token": "[MASK]"}
    transformer = Transformer(str(made), query_expansion=expansion, document_length=20)
    modules = [transformer, MultiVectorMask(["?", "!"]), Normalize("token_embeddings")]
    folder = tmp_path / "model"
    MultiVectorEncoder(modules=modules, device="cpu").save_pretrained(str(folder))

    report = agreeing(folder)

    comparisons = report["examination"]["comparisons"]
    names = [each["what"].split(" in ")[0] for each in comparisons]
    assert names == ["token ids", "vectors of tokens", "vectors of tokens"][: len(names)]
    assert comparisons[1]["count"] == 2 * comparisons[0]["count"]
    assert report["findings"]["vectors"] == ["one for each token", "normalized"]
    assert report["findings"]["roles"] == {
        "queries": "up to 32 tokens; expanded to 32, by tokens that others do not read",
        "documents": "up to 20 tokens; no vectors of 2 words",
    }


def test_a_model_that_generates_is_examined_in_its_dtype(decoder):
    use_tokenizer_as_it_is(decoder)
    what = "greedy answers of up to 16 tokens"

    report = agreeing(decoder, "--set", "dtype=bf16", "--set", "device=cpu")

    examination = report["examination"]
    in_fp32, in_bf16 = examination["comparisons"]
    assert examination["memory"][0][1].endswith(" MB in bf16")
    assert (in_fp32["what"], in_fp32["agrees"]) == (f"{what} in fp32", True)
    assert (in_bf16["what"], in_bf16["agrees"]) == (f"{what} in bf16", None)
    assert in_bf16["remark"].startswith("rounding may change tokens; ")
    assert report["summary"] == (
        f"it agrees with the original library: {what} in fp32; not compared: {what} in bf16"
    )


def test_a_dtype_in_which_the_server_does_not_generate_is_refused(decoder):
    report = report_of(decoder, "--set", "dtype=fp16", "--set", "device=cpu")

    assert report["verdict"] == "refused"
    assert "needs a GPU; allowed on a CPU" in report["refused"]


def test_the_summary_names_what_was_compared_instead(words):
    result = doctor(words, "--set", "task=fill_mask", "--set", "dtype=fp32")

    first, *others = result.stdout.splitlines()
    assert first == (
        "words: it agrees with the original library: token ids, hidden states in fp32;"
        " not compared: filled masks"
    )
    row = next(line for line in others if line.startswith("filled masks"))
    assert row.endswith("not compared: hidden states are compared instead")


def test_vectors_are_not_compared_without_sentence_transformers(encoder, monkeypatch):
    monkeypatch.setattr(examine_module, "has_library", lambda name: name == "transformers")

    report = report_of(encoder, "--set", "dtype=fp32")

    assert report["summary"].endswith(
        "hidden states in fp32; not compared: vectors (sentence-transformers is not installed:"
        " pip install transformers sentence-transformers)"
    )
    remark = report["examination"]["comparisons"][-1]["remark"]
    assert remark == "sentence-transformers is not installed: hidden states are compared instead"


def test_an_encoder_is_compared_with_sentence_transformers(encoder):
    result = doctor(encoder)

    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    agrees = "Tiny-Encoder: it agrees with the original library: token ids, vectors in fp32"
    assert lines[0].startswith(agrees)
    assert "vectors cls pooling, 16 features" in lines
    assert any(line.startswith("intermediates up to ") for line in lines)
    vectors = next(line for line in lines if line.startswith("vectors in fp32"))
    assert vectors.endswith(" 1.000000 agrees on 16 inputs")
    assert "max_batch_size: 64" in lines
    assert 'parameters { key: "max_sequence_tokens" value: { string_value: "40" } }' in lines
    assert not any("log_level" in line for line in lines)


def test_a_language_model_that_ranks_is_compared_with_cross_encoder(tmp_path):
    template = (
        "{{ (messages | selectattr('role', 'eq', 'query') | first).content }}:"
        "{{ (messages | selectattr('role', 'eq', 'document') | first).content }}"
    )
    base = "sentence_transformers.base.modules"
    kind = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    modality = {"method": "forward", "method_output_name": "logits"}
    files = {
        "modules.json": [
            {"name": "0", "path": "", "type": f"{base}.transformer.Transformer"},
            {"name": "1", "path": "1_LogitScore", "type": kind},
        ],
        "1_LogitScore/config.json": {"true_token_id": 70, "false_token_id": 80},
        "sentence_bert_config.json": {
            "transformer_task": "text-generation",
            "modality_config": {"text": modality, "message": {**modality, "format": "flat"}},
            "module_output_name": "causal_logits",
        },
        "config_sentence_transformers.json": {"model_type": "CrossEncoder"},
        "chat_template.jinja": template,
    }
    folder = save_checkpoint(tmp_path / "reranker", "Qwen3ForCausalLM", files=files)
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|endoftext|>"}
    set_fields(folder, "tokenizer_config.json", **tokenizer)

    report = agreeing(folder)

    assert report["findings"]["tasks"][0] == "rerank"
    assert report["examination"]["comparisons"][0]["original"].startswith("sentence-transformers")


def test_a_first_release_is_compared_with_transformers_own_model(tmp_path):
    files = pooling_files(pooling_mode="cls", embedding_dimension=24)
    folder = save_checkpoint(tmp_path / "gte", "GteModel", files=files)
    config = json.loads((folder / "config.json").read_text())
    old = {"architectures": ["NewModel"], "model_type": "new", "pack_qkv": True}
    old |= {"auto_map": {"AutoModel": "modeling.NewModel"}, "rope_parameters": None}
    old |= {"rope_scaling": {"type": "ntk", "factor": 2.0}, "rope_theta": 1e4}
    write_file(folder, "config.json", {**config, **old})
    use_tokenizer_as_it_is(folder)
    write_file(folder, "modeling.py", "raise SystemExit('code of the checkpoint ran')")

    report = agreeing(folder)

    assert report["findings"]["family"] == "gte"


@pytest.mark.parametrize("task", ["hidden", "embed"])
def test_a_model_that_no_library_has_is_not_compared(tmp_path, task):
    folder = save_checkpoint(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["JinaBertModel"], "position_embedding_type": "alibi"}
    config |= {"feed_forward_type": "geglu", "hidden_act": "gelu"}
    stated.JinaBertModel(transformers.BertConfig(**config)).save_pretrained(folder)
    write_file(folder, "config.json", config)

    report = report_of(folder, "--set", f"task={task}")

    assert report["verdict"] == "not compared"
    remark = report["examination"]["comparisons"][-1]["remark"]
    assert remark.startswith("transformers has no model of this form: the checkpoint lacks")


@pytest.mark.parametrize(
    "kind, config, arguments, what",
    [
        ("BertModel", {}, [], "hidden states with the adapter"),
        pytest.param(
            "BertForSequenceClassification",
            {"num_labels": 3},
            [],
            "logits with the adapter",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "GPT2LMHeadModel",
            {},
            [],
            "answers of up to 16 tokens with the adapter",
            marks=pytest.mark.full,
        ),
    ],
)
def test_each_adapter_is_compared_with_peft(tmp_path, monkeypatch, kind, config, arguments, what):
    folder = save_checkpoint(tmp_path / "model", kind, **config)
    use_tokenizer_as_it_is(folder)
    fields = {"fan_in_fan_out": True} if kind == "GPT2LMHeadModel" else {}
    for name in ("a", "b"):
        save_adapter(folder, kind, name, r=2, **fields)
    monkeypatch.setattr(examine_module, "_MAX_ADAPTERS", 1)

    found = agreeing(folder, *arguments)["examination"]["comparisons"]

    compared, skipped = (each for each in found if "adapter" in each["what"])
    assert compared["what"].startswith(f'{what} "a"')
    assert compared["original"].startswith("peft ")
    assert compared["agrees"] is True
    assert (skipped["agrees"], skipped["remark"]) == (
        None,
        "only the first 1 adapters are compared",
    )


def test_a_damaged_adapter_fails(encoder):
    save_adapter(encoder, "BertModel", "a", r=2, use_dora=True)

    report = report_of(encoder)

    assert report["verdict"] == "differs"
    last = report["examination"]["comparisons"][-1]
    assert (last["what"], last["agrees"]) == ('adapter "a"', False)
    assert "use_dora" in last["remark"]


def test_without_peft_adapters_are_not_compared(encoder, monkeypatch):
    save_adapter(encoder, "BertModel", "a", r=2)
    monkeypatch.setattr(
        examine_module, "has_library", lambda name: name != "peft" and comparison.has_library(name)
    )

    last = report_of(encoder)["examination"]["comparisons"][-1]

    assert (last["agrees"], last["missing"]) == (None, "peft")


def test_a_difference_is_shown_and_fails(encoder, monkeypatch):
    def other_vectors(folder, texts, limit, **options):
        vectors = comparison.sentence_vectors(folder, texts, limit, **options)
        vectors[3] = vectors[3] * 1.01
        return vectors

    monkeypatch.setattr(examine_module, "sentence_vectors", other_vectors)

    result = doctor(encoder)

    assert result.exit_code == 1
    assert "it differs from the original library: vectors in fp32" in result.stdout
    assert "differs: input 3 differs most" in result.stdout


def cancelling_sigmoid(logits, function):
    """Return a sigmoid that has few digits far below 0."""
    assert function == "sigmoid"
    return (0.5 * np.tanh(0.5 * logits) + 0.5).astype(np.float32)


@pytest.mark.parametrize(
    "scores, verdict", [(None, "agrees"), (cancelling_sigmoid, "differs")], ids=["exact", "cancels"]
)
def test_low_scores_are_compared_digit_by_digit(tmp_path, monkeypatch, scores, verdict):
    """Their logits agree either way."""
    folder = save_checkpoint(tmp_path / "ranker", "BertForSequenceClassification", num_labels=1)
    change_tensors(folder, lambda tensors: tensors["classifier.bias"].fill_(-13.0))
    if scores is not None:
        monkeypatch.setattr(examine_module, "scores_of", scores)

    report = report_of(folder, "--set", "task=rerank", "--set", "dtype=fp32")

    found = {each["what"]: each for each in report["examination"]["comparisons"]}
    assert report["verdict"] == verdict
    assert found["logits in fp32"]["agrees"]
    assert found["scores in fp32"]["agrees"] == (verdict == "agrees")


def test_a_stored_activation_is_that_of_cross_encoder(tmp_path):
    folder = save_checkpoint(tmp_path / "ranker", "BertForSequenceClassification", num_labels=1)
    stored = {"activation_fn": "torch.nn.modules.linear.Identity"}
    set_fields(folder, "config.json", sentence_transformers=stored)

    [comparison] = [
        each
        for each in agreeing(folder, "--set", "dtype=fp32")["examination"]["comparisons"]
        if each["what"] == "scores in fp32"
    ]

    assert comparison["original"].startswith("sentence-transformers ")


@pytest.mark.parametrize(
    "logit, change, agrees",
    [
        (-20.0, 0.0, True),
        (-20.0, 1e-4, True),
        (-100.0, 0.0, True),
        (-20.0, None, False),
        (3.0, None, False),
    ],
    ids=["equal", "logits", "tiny", "zero", "high"],
)
def test_scores_differ_by_what_their_logits_explain(logit, change, agrees):
    theirs = np.array([logit])
    ours = theirs + (change or 0)
    scores = [1 / (1 + np.exp(-each)) for each in (ours, theirs)]
    if change is None:
        scores[0] = np.zeros(1)

    found = compare_scores(
        "torch", logits=[(ours, theirs)], actual=scores[:1], expected=scores[1:], dtype="fp32"
    )

    assert found.agrees == agrees
    assert found.remark == ("" if agrees else "input 0 differs by more than its logits explain")


def test_other_token_ids_fail(encoder, monkeypatch):
    ids = comparison.Transformers.token_ids
    monkeypatch.setattr(
        comparison.Transformers,
        "token_ids",
        lambda self, inputs, limit: [row[:-1] for row in ids(self, inputs, limit)],
    )

    report = report_of(encoder)

    assert report["verdict"] == "differs"
    assert report["examination"]["comparisons"][0]["remark"].startswith("input 0 has [")


def add_a_module(folder):
    modules = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    write_file(folder, "modules.json", [*modules, {"path": "1_Mine", "type": "mine.Layer"}])


def make_an_adapter(folder):
    write_file(folder, "adapter_config.json", {"base_model_name_or_path": "org/base"})
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    "spoil, message",
    [
        (leave_only_a_pickle, "has pickled weights (pytorch_model.bin), which are not read"),
        (add_a_module, 'modules.json has a module "Layer"'),
        (lambda folder: (folder / "config.json").unlink(), "has neither config.pbtxt nor config"),
        (make_an_adapter, "holds an adapter of peft for the model"),
    ],
    ids=["pickled weights", "an unknown module", "no checkpoint", "an adapter"],
)
def test_a_refusal_is_shown_and_fails(encoder, spoil, message):
    spoil(encoder)

    result = doctor(encoder)

    assert result.exit_code == 1
    assert "it is refused" in result.stdout
    assert message in " ".join(result.stdout.split())
    assert report_of(encoder)["verdict"] == "refused"


def test_a_model_that_fills_in_words_gets_a_note(words, caplog):
    notes = agreeing(words)["findings"]["notes"]

    assert "BertForMaskedLM is trained to fill in words" in notes[0]
    # both dtypes that are compared would log it too
    assert notes[0] not in caplog.messages


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_without_the_original_library_the_rest_is_checked_and_the_remedy_named(
    request, monkeypatch, kind
):
    folder = request.getfixturevalue(kind)
    monkeypatch.setattr(examine_module, "has_library", lambda name: False)

    result = doctor(folder)

    assert result.exit_code == 0
    first, *others = result.stdout.splitlines()
    what = {"encoder": "vectors", "decoder": "greedy answers of up to 16 tokens"}[kind]
    assert first.endswith(
        f"it loads; not compared: {what} (transformers is not installed:"
        " pip install transformers sentence-transformers)"
    )
    assert "memory" in others


def test_a_comparison_that_is_required_and_not_made_exits_with_1(encoder, monkeypatch):
    assert doctor(encoder, "--require").exit_code == 0

    # hidden states are compared instead
    monkeypatch.setattr(examine_module, "has_library", lambda name: name == "transformers")
    assert doctor(encoder).exit_code == 0
    assert doctor(encoder, "--require").exit_code == 1

    monkeypatch.setattr(examine_module, "has_library", lambda name: False)
    assert doctor(encoder, "--require").exit_code == 1


def test_an_original_library_that_fails_is_named(encoder, monkeypatch):
    def fail(*_, **__):
        raise OSError("no such model")

    monkeypatch.setattr(examine_module, "sentence_vectors", fail)

    report = report_of(encoder)

    assert report["verdict"] == "not compared"
    assert report["examination"]["comparisons"][-1]["remark"] == "no such model"


def test_a_model_of_a_repository_has_its_settings(classifier, tmp_path):
    settings = {"task": "rerank", "dtype": "fp32", "max_batch_tokens": "300"}
    target = fetch(str(classifier), repository=tmp_path / "models", name="m", settings=settings)

    report = report_of(target)

    assert report["model"] == "m"
    assert report["findings"]["tasks"][0] == "rerank"
    short = short_config(report["config"])
    for name, value in settings.items():
        assert f'key: "{name}" value: {{ string_value: "{value}" }}' in short
    assert [each["what"] for each in report["examination"]["comparisons"]] == [
        "token ids",
        "logits in fp32",
        "scores in fp32",
    ]


def test_speed_is_measured_at_several_lengths_and_later_loads_log_int8(
    encoder, monkeypatch, caplog
):
    monkeypatch.setattr(examine_module, "_SECONDS", 0.01)

    result = CliRunner().invoke(app, ["doctor", str(encoder), "--json"])

    speeds = json.loads(result.stdout)["examination"]["speeds"]
    assert [each["what"] for each in speeds] == ["texts of 16 tokens", "texts of 40 tokens"]
    assert all(each["tokens_per_second"] > 0 for each in speeds)
    price = json.loads(result.stdout)["examination"]["int8"]
    assert re.fullmatch(PRICE, price)
    lines = {}
    for dtype in ("auto", "int8"):
        caplog.clear()
        with caplog.at_level("INFO"):
            with Encoder.from_pretrained(encoder, dtype=dtype, warmup_seconds=0):
                pass
        lines[dtype] = caplog.messages
    assert f"{price} (measured before on this machine)" in lines["auto"]
    assert not any("times as fast" in line for line in lines["int8"])


@pytest.mark.parametrize(
    "kind, shown", [("BertModel", PRICE), ("GPT2LMHeadModel", "int8 is measured for encoders")]
)
def test_fetch_measures_int8_where_it_is_asked(tmp_path, monkeypatch, kind, shown):
    monkeypatch.setattr(examine_module, "_SECONDS", 0.01)
    folder = save_checkpoint(tmp_path / "made", kind)

    result = CliRunner(env={"COLUMNS": "160"}).invoke(
        app, ["fetch", str(folder), "--repository", str(tmp_path / "models"), "--measure"]
    )

    assert result.exit_code == 0, result.stderr
    assert re.search(f"^{shown}", result.stderr, re.MULTILINE)


def test_agreement_of_int8_is_of_ranks_labels_or_vectors():
    rows = [np.array([each], np.float32) for each in (0.1, 0.4, 0.2, 0.9)]
    swapped = [rows[0], rows[2], rows[1], rows[3]]
    assert agreement(rows, rows, has_labels=True) == "Kendall's tau 1.000"
    assert agreement(rows, swapped, has_labels=True) == "Kendall's tau 0.667"

    logits = [np.array(each, np.float32) for each in ([1, 2], [3, 1], [0, 1], [5, 2])]
    other = [*logits[:3], np.array([1, 2], np.float32)]
    assert agreement(logits, other, has_labels=True) == "the same label for 75.0%"
    assert agreement(logits, other, has_labels=False) == "mean cosine 0.9369"


@pytest.mark.parametrize("task, lengths", [("sparse_embed", 2), ("fill_mask", 0)])
def test_speed_of_other_tasks(words, monkeypatch, task, lengths):
    monkeypatch.setattr(examine_module, "_SECONDS", 0.01)

    result = CliRunner().invoke(app, ["doctor", str(words), "--json", "--set", f"task={task}"])

    assert len(json.loads(result.stdout)["examination"]["speeds"]) == lengths


@pytest.mark.parametrize(
    "folder, arguments, message",
    [
        ("Tiny-Encoder", ("--set", "dtype=fp9"), 'dtype is "fp9"; allowed'),
        ("nowhere", (), "nowhere is not a folder; `varlen fetch` downloads models of the hub"),
    ],
    ids=["a wrong setting", "no folder"],
)
def test_a_wrong_argument_is_an_error_of_the_command(encoder, folder, arguments, message):
    result = doctor(encoder.parent / folder, *arguments)

    assert result.exit_code == 2
    assert message in result.stderr


def test_damaged_weights_show_as_a_difference_or_a_refusal(encoder):
    change_tensors(encoder, lambda tensors: tensors.pop("encoder.layer.0.output.dense.bias"))

    assert 'no tensor "encoder.layer.0.output.dense.bias"' in report_of(encoder)["refused"]


ROWS = [np.array([3.0, 4.0, 0.0], np.float32), np.array([0.0, 1.0, 0.0], np.float32)]


@pytest.mark.parametrize(
    "dtype, change, agrees",
    [
        ("fp32", 1e-4, True),
        ("fp32", 1e-2, False),
        ("bf16", 5e-2, True),
        ("bf16", 1.0, False),
        ("int8", 0.5, True),
    ],
)
def test_what_is_equal_depends_on_the_dtype(dtype, change, agrees):
    actual = [ROWS[0] + np.array([0, 0, change], np.float32), ROWS[1]]

    made = compare_values("vectors", "x 1.0", actual=actual, expected=ROWS, dtype=dtype)

    assert made.agrees is agrees
    assert made.difference == pytest.approx(change / 4)
    assert made.cosine <= 1.0


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("index", [0, 1])
def test_values_that_are_not_finite_differ(dtype, value, index):
    spoilt = [row.copy() for row in ROWS]
    spoilt[index][2] = value

    ours = compare_values("vectors", "x 1.0", actual=spoilt, expected=ROWS, dtype=dtype)
    theirs = compare_values("vectors", "x 1.0", actual=ROWS, expected=spoilt, dtype=dtype)

    assert ours.agrees is False
    assert ours.remark == f"input {index} has NaN or infinite values in varlen"
    assert theirs.agrees is None
    assert theirs.remark == f"input {index} has NaN or infinite values in x 1.0"


def test_few_logits_are_judged_by_their_difference():
    logits = [np.array([5.0], np.float32), np.array([-4.0], np.float32)]
    other = [np.array([5.1], np.float32), np.array([-4.6], np.float32)]

    made = compare_values("logits", "x 1.0", actual=other, expected=logits, dtype="bf16")

    assert (made.agrees, made.cosine, made.remark) == (False, None, "input 1 differs most")


def test_other_shapes_and_ids_are_named():
    shapes = compare_values(
        "logits", "x 1.0", actual=[ROWS[0][:2]], expected=ROWS[:1], dtype="fp32"
    )
    ids = compare_ids("ids", "x 1.0", actual=[[1, 2]], expected=[[1, 3]])

    assert shapes.remark == "input 0 has the shape (2,), and there (3,)"
    assert (ids.agrees, ids.remark) == (False, "input 0 has [1, 2] ..., and there [1, 3] ...")


def test_a_folder_for_other_libraries_has_no_code_and_no_pickle(encoder):
    from varlen.models.checkpoint_folder import Checkpoint

    for name in ("modeling.py", "pytorch_model.bin"):
        (encoder / name).write_text("code")

    with comparison.readable_folder(Checkpoint.open(encoder)) as folder:
        names = {path.name for path in folder.iterdir()}

    assert names == {"config.json", WEIGHTS, "tokenizer.json", "modules.json", "1_Pooling"}
