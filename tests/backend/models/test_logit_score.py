"""Language models that answer yes or no rank pairs as CrossEncoder of sentence-transformers does."""

import json

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules.transformer import Transformer
from sentence_transformers.cross_encoder.modules import LogitScore

from tests.checkpoints import save_checkpoint, set_fields, write_file
from tests.closeness import assert_close, encoder_roundings
from varlen import Encoder, Generator
from varlen.config import EngineConfig
from varlen.errors import RequestError
from varlen.models.checkpoint_folder import Checkpoint
from varlen.service.generation import GeneratorParts
from varlen.service.service import Service
from varlen.telemetry.metrics import Stats

from ..refusals import refused_checkpoint as refused

TEMPLATE = (
    "{%- for m in messages if m.role == 'system' %}Instruct: {{ m.content }} {% endfor -%}"
    "Query: {{ (messages | selectattr('role', 'eq', 'query') | first).content }}"
    " Document: {{ (messages | selectattr('role', 'eq', 'document') | first).content }}<|endoftext|>\nanswer:"
)
PARTS = TEMPLATE.replace(".content }}", ".content[0].text }}")
PAIRS = [("the cat", "a river"), ("a", "b" * 30), ("thé 河", "is it 42?"), ("the cat", "the cat")]


@pytest.fixture
def save(tmp_path):
    """Return a function that saves a reranker, and returns its folder and sentence-transformers' model."""

    def save(kind="Qwen3ForCausalLM", *, false=80, template=TEMPLATE, prompts=None, **config):
        plain = save_checkpoint(tmp_path / "plain", kind, **config)
        set_fields(
            plain,
            "tokenizer_config.json",
            tokenizer_class="PreTrainedTokenizerFast",
            pad_token="<|endoftext|>",
            chat_template=template,
        )
        named = {} if prompts is None else {"prompts": prompts, "default_prompt_name": "web"}
        transformer = Transformer(
            str(plain), transformer_task="text-generation", model_kwargs={"dtype": torch.float32}
        )
        made = CrossEncoder(modules=[transformer, LogitScore(70, false)], device="cpu", **named)
        made.save_pretrained(str(tmp_path / "saved"))
        return tmp_path / "saved", made

    return save


def name_tokens(folder, names):
    """Give tokens of a checkpoint other texts, by id."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model = tokenizer["model"]
    model["vocab"] = {names.get(index, text): index for text, index in model["vocab"].items()}
    model["merges"] = []
    write_file(folder, "tokenizer.json", tokenizer)


def scores(model, pairs):
    logits = model.predict(pairs, activation_fn=torch.nn.Identity(), batch_size=1)
    return np.asarray(logits, dtype=np.float32)[:, None]


@pytest.mark.parametrize(
    "kind, settings",
    [
        ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
        ("Qwen3ForCausalLM", {"prompts": {"web": "find the page"}}),
        ("LlamaForCausalLM", {"false": None}),
        ("Qwen2ForCausalLM", {"template": PARTS, "prompts": {"web": "find"}}),
    ],
    ids=["tied", "prompt", "one token", "parts"],
)
def test_scores_match_sentence_transformers(save, kind, settings):
    folder, model = save(kind, **settings)
    checkpoint = Checkpoint.open(folder)

    with Encoder.from_pretrained(folder, dtype="fp32") as encoder:
        actual = encoder.classify(PAIRS)

    assert (checkpoint.task, checkpoint.labels.function) == ("rerank", "sigmoid")
    assert_close(actual, scores(model, PAIRS), roundings=2 * encoder_roundings(folder))


def test_a_long_document_keeps_the_end_of_the_template(save):
    folder, model = save()
    model.max_seq_length = 60
    pairs = [("the cat", "river " * count) for count in (2, 9, 10, 11, 40)]

    with Encoder.from_pretrained(folder, dtype="fp32", max_sequence_tokens=60) as encoder:
        actual = encoder.classify(pairs, truncate=True)
        with pytest.raises(
            RequestError, match="row 1: text has 82 tokens; this model takes at most 60"
        ):
            encoder.classify(pairs)

    assert_close(actual, scores(model, pairs), roundings=2 * encoder_roundings(folder))


def test_an_instruction_is_the_prompt_of_sentence_transformers(save):
    folder, model = save(prompts={"web": "find the page"})

    with Encoder.from_pretrained(folder, dtype="fp32") as encoder:
        actual = encoder.classify(PAIRS, instruction="find a river")
        without = encoder.classify(PAIRS)

    logits = model.predict(
        PAIRS, prompt="find a river", activation_fn=torch.nn.Identity(), batch_size=1
    )
    expected = np.asarray(logits, dtype=np.float32)[:, None]
    assert_close(actual, expected, roundings=2 * encoder_roundings(folder))
    assert not np.allclose(actual, without)


def test_an_instruction_that_the_template_does_not_read_is_refused(save):
    folder, _ = save(template=TEMPLATE.split("endfor -%}")[1])

    with Encoder.from_pretrained(folder) as encoder:
        with pytest.raises(RequestError, match="instruction, which the prompt of this"):
            encoder.classify(PAIRS, instruction="find a river")


def test_a_single_text_is_refused(save):
    folder, _ = save()

    with Encoder.from_pretrained(folder) as encoder:
        with pytest.raises(RequestError, match="row 0: text_pair is missing; this model compares"):
            encoder.classify(["the cat"])


def test_the_same_checkpoint_embeds_and_generates_too(save):
    folder, _ = save()

    checkpoint = Checkpoint.open(folder)

    assert checkpoint.tasks[0] == "rerank"
    checkpoint.check_task("hidden")
    checkpoint.check_task("generate")
    with refused('task "classify" needs a Qwen3ForSequenceClassification'):
        checkpoint.check_task("classify")


def test_the_refusal_of_a_checkpoint_without_the_module_names_the_command_that_adds_it(tmp_path):
    folder = save_checkpoint(tmp_path / "plain", "Qwen3ForCausalLM")
    name_tokens(folder, {70: "yes", 80: "no"})
    set_fields(
        folder,
        "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )

    with refused(
        'task "rerank" needs a Qwen3ForSequenceClassification checkpoint; this one is a Qwen3ForCausalLM,'
        " whose files do not say how it ranks: name the form of its pairs with the setting rerank_form (qwen3, mxbai,"
        " bge), or take a copy whose modules.json has the module LogitScore, such as sentence-transformers writes with"
        " CrossEncoder(FOLDER).save_pretrained(NEW_FOLDER)"
    ):
        Checkpoint.open(folder).check_task("rerank")

    CrossEncoder(str(folder)).save_pretrained(str(tmp_path / "new"))
    checkpoint = Checkpoint.open(tmp_path / "new")
    checkpoint.check_task("rerank")
    assert checkpoint.logit_score is not None
    assert (checkpoint.logit_score.true_token, checkpoint.logit_score.false_token) == (70, 80)


@pytest.mark.parametrize(
    "file, fields, message",
    [
        ("1_LogitScore/config.json", {"true_token_id": None}, "has true_token_id None; allowed"),
        ("1_LogitScore/config.json", {"true_token_id": 999}, "names the token 999; this model has"),
        ("1_LogitScore/config.json", {"module_input_name": "x"}, 'module_input_name "x"; allowed'),
        ("sentence_bert_config.json", {"modality_config": {}}, "messages of the format null"),
        (
            "sentence_bert_config.json",
            {"transformer_task": "fill-mask"},
            "allowed: text-generation",
        ),
    ],
)
def test_refuses_what_is_not_served(save, file, fields, message):
    folder, _ = save()
    set_fields(folder, file, **fields)

    with refused(message):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "template, message",
    [
        ("no pair", "leaves out messages of the role query or document"),
        (None, "has no chat template, which pairs of texts need"),
        ("{{ raise_exception('never') }}", "refuses the messages: never"),
    ],
)
def test_refuses_a_template_without_the_pair(save, template, message):
    folder, _ = save()
    (folder / "chat_template.jinja").unlink()
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)

    with refused(message):
        Encoder.from_pretrained(folder)


def test_scores_in_bf16_do_not_tie(save, rng):
    folder, _ = save()
    letters = list("abcdefghijklmnopqrstuvwxyz ")
    documents = ["".join(rng.choice(letters, 12)) for _ in range(100)]

    with Encoder.from_pretrained(folder, dtype="bf16") as encoder:
        actual = encoder.classify([("the cat", document) for document in documents])[:, 0]

    assert np.unique(actual).size == len(documents)
    assert (torch.tensor(actual).bfloat16().float().numpy() == actual).mean() < 0.05


def test_a_reranker_may_generate_in_bf16(save):
    folder, _ = save()
    config = EngineConfig(task="generate", device="cpu", dtype="bf16")

    with Generator(Service.load(GeneratorParts, folder, config, Stats())) as generator:
        [answer] = generator.generate(["the cat"], max_tokens=3, temperature=0.0)

    assert len(answer.token_ids) <= 3
