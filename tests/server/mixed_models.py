"""Small random models of many families and heads, with the answers of their oracles."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.sentence_transformer import modules
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling
from tokenizers import Tokenizer

from tests.backend.models import test_experts, test_jina_bert, test_jina_v3
from tests.backend.models.test_bidirectional_decoders import NEMOTRON
from tests.checkpoints import (
    END_OF_TEXT,
    WEIGHTS,
    save_checkpoint,
    set_fields,
    write_file,
)
from tests.closeness import assert_close, encoder_roundings, relative_error
from tests.gliner2_models import (
    PARTS,
    SCHEMA,
    Gliner2,
    assert_same,
    clear_of_scores,
    save_gliner2,
)
from tests.gliner_models import Gliner, save_gliner, thresholds_of
from tests.question_pipeline import QuestionPipeline
from tests.rerank_forms import FORMS, expected_scores, save_reranker
from varlen_client import Client

_BYTES = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": END_OF_TEXT,
    "eos_token": END_OF_TEXT,
}
_PIECES = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    **{f"{name}_token": f"[{name.upper()}]" for name in ("pad", "cls", "sep", "unk", "mask")},
}
_NLI = ["contradiction", "neutral", "entailment"]
_ENTITIES = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
_WORDS = ("the", "cat", "river", "is", "it", "42", "a", "?", "sea")
_INSTRUCTION = "find the river?"
# A score of softmax or sigmoid.
_SCORE = 1e-3
_QUERY = "is it a cat?"


def _text(seed: int) -> str:
    """Return a text of 1 to 16 words, more often short than long."""
    chance = random.Random(seed)
    return " ".join(chance.choices(_WORDS, k=int(16 ** chance.random())))


TEXTS = [_text(seed) for seed in range(24)]

Ask = Callable[[Client, list[str]], Sequence[Any]]
Check = Callable[[Any, Any], None]


@dataclass(frozen=True)
class Subject:
    """A model, a kind of request, and the oracle's answer to each of `TEXTS`.

    Attributes:
        model: name of the model; several subjects may share one.
        ask: sends texts in one request and returns an answer for each.
        check: compares an answer with the oracle's.
        settings: settings of the model.
        has_scores: whether answers are logits or scores, not vectors.
    """

    model: str
    folder: Path
    ask: Ask
    expected: Sequence[Any]
    check: Check
    settings: dict[str, str] = field(default_factory=dict)
    has_scores: bool = False


def _numbers(folder: Path, expected: Any, *, more: int = 0, factor: int = 1) -> Check:
    """Return a check of arrays, relative to the largest number of all answers."""
    largest = max(float(np.abs(np.asarray(each)).max(initial=0)) for each in expected)
    roundings = factor * encoder_roundings(folder) + more
    atol = relative_error(roundings) * largest

    def check(actual: Any, wanted: Any) -> None:
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=atol)

    return check


def _found(actual: Any, wanted: Any) -> None:
    """Compare what was found, each with a score at its end."""
    assert [each[:-1] for each in actual] == [tuple(each[:-1]) for each in wanted]
    assert [each[-1] for each in actual] == pytest.approx(
        [float(each[-1]) for each in wanted], rel=_SCORE
    )


def _embed(client: Client, texts: list[str]) -> Any:
    return client.embed(texts)


def _ids(folder: Path, texts: Sequence[str] = TEXTS) -> list[torch.Tensor]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [torch.tensor([tokenizer.encode(text).ids]) for text in texts]


@torch.inference_mode()
def _means(folder: Path, model: Any) -> list[Any]:
    return [model(ids).last_hidden_state[0].mean(0).numpy() for ids in _ids(folder)]


def _mean_of(kind: str, **fields: Any) -> Callable[[Path], list[Subject]]:
    """Return what makes an encoder without files of sentence-transformers: its mean is the vector."""

    def subjects(folder: Path) -> list[Subject]:
        save_checkpoint(folder, kind, **fields)
        model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()
        expected = _means(folder, model)
        return [Subject(kind.lower(), folder, _embed, expected, _numbers(folder, expected))]

    return subjects


def _gemma_embedder(folder: Path) -> list[Subject]:
    base = save_checkpoint(
        folder / "base", "Gemma3TextModel", use_bidirectional_attention=True, sliding_window=9
    )
    set_fields(base, "tokenizer_config.json", **_BYTES)
    transformer = modules.Transformer(str(base), model_kwargs={"dtype": torch.float32})
    hidden, plain = transformer.get_embedding_dimension(), torch.nn.Identity()
    stack = [
        transformer,
        modules.Pooling(hidden, pooling_mode="mean"),
        Dense(hidden, 150, bias=False, activation_function=plain),
        Dense(150, 48, bias=False, activation_function=plain),
        Normalize(),
    ]
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    made = SentenceTransformer(modules=stack, prompts=prompts, device="cpu")
    made.save_pretrained(str(folder / "saved"), create_model_card=False)

    def subject(name: str) -> Subject:
        expected = made.encode(TEXTS, prompt_name=name)
        return Subject(
            "gemma_embedder",
            folder / "saved",
            lambda client, texts: client.embed(texts, prompt_name=name),
            expected,
            _numbers(folder / "saved", expected, more=200),
        )

    return [subject(name) for name in prompts]


def _nemotron(folder: Path) -> list[Subject]:
    save_checkpoint(folder, "LlamaModel")
    config = transformers.LlamaConfig.from_pretrained(folder)
    config.is_causal = False
    expected = _means(
        folder,
        transformers.LlamaModel.from_pretrained(folder, config=config, dtype=torch.float32).eval(),
    )
    code = "llama_bidirectional_model.LlamaBidirectional"
    own = {"AutoConfig": f"{code}Config", "AutoModel": f"{code}Model"}
    set_fields(folder, "config.json", model_type="llama_bidirec", pooling="avg", auto_map=own)
    return [Subject("nemotron", folder, _embed, expected, _numbers(folder, expected))]


def _nemotron_reranker(folder: Path) -> list[Subject]:
    save_checkpoint(folder, "LlamaForSequenceClassification", num_labels=1)
    config = transformers.LlamaConfig.from_pretrained(folder)
    config.is_causal = False
    model = transformers.LlamaForSequenceClassification.from_pretrained(folder, config=config)
    weight, encoder = model.score.weight.detach()[0], model.eval().model
    texts = [f"question:{_QUERY} \n \n passage:{text}" for text in TEXTS]
    names = ["LlamaBidirectionalForSequenceClassification"]
    set_fields(folder, "config.json", **NEMOTRON, architectures=names)
    with torch.inference_mode():
        means = [encoder(ids).last_hidden_state[0].mean(0) for ids in _ids(folder, texts)]
    expected = [(mean @ weight).numpy() / NEMOTRON["temperature"] for mean in means]
    return [_ranking("nemotron_reranker", folder, expected, factor=2)]


def _ranking(name: str, folder: Path, expected: Sequence[Any], *, factor: int = 1) -> Subject:
    """Return a reranker of `_QUERY` and each text."""
    return Subject(
        name,
        folder,
        lambda client, texts: client.rerank(_QUERY, texts),
        expected,
        _numbers(folder, expected, factor=factor),
        {"task": "rerank"},
        has_scores=True,
    )


def _jina_bert(folder: Path) -> list[Subject]:
    save_checkpoint(folder)
    expected = _means(folder, test_jina_bert.save_jina_bert(folder))
    return [Subject("jina_bert", folder, _embed, expected, _numbers(folder, expected))]


def _nomic_with_experts(folder: Path) -> list[Subject]:
    save_checkpoint(folder)
    expected = _means(folder, test_experts.save_nomic(folder))
    return [Subject("nomic_moe", folder, _embed, expected, _numbers(folder, expected))]


def _jina_v3(folder: Path) -> list[Subject]:
    """Return a model of jina-embeddings-v3 as it is, and with one of its adapters."""
    hub = folder / "hub"
    given = test_jina_v3.save_hub_form(hub)
    subjects = []
    for number, name in ((None, "none"), (1, test_jina_v3.ADAPTERS[1])):
        oracle = test_jina_v3.oracle_of(folder, *given, load_file(hub / WEIGHTS), number)
        expected = _means(hub, oracle)
        check = _numbers(folder / "oracle", expected)
        settings = {"adapter": name}
        subjects.append(Subject(f"jina_v3_{number}", hub, _embed, expected, check, settings))
    return subjects


def _jina_reranker(folder: Path) -> list[Subject]:
    model = test_jina_v3.save_reranker(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pairs = [torch.tensor([tokenizer.encode(_QUERY, text).ids]) for text in TEXTS]
    with torch.inference_mode():
        expected = [model(ids).logits[0, 0].numpy() for ids in pairs]
    return [_ranking("jina_reranker", folder, expected)]


def _static(folder: Path) -> list[Subject]:
    tokenizer = Tokenizer.from_file(str(save_checkpoint(folder / "words") / "tokenizer.json"))
    torch.manual_seed(0)
    table = modules.StaticEmbedding(tokenizer, embedding_dim=13)
    made = SentenceTransformer(modules=[table, Normalize()], device="cpu")
    made.save_pretrained(str(folder / "saved"), create_model_card=False)

    def check(actual: Any, wanted: Any) -> None:
        # a mean of few vectors, then a norm
        assert_close(actual, wanted, roundings=100)

    return [Subject("static", folder / "saved", _embed, made.encode(TEXTS), check)]


def _idf(folder: Path) -> list[Subject]:
    made = save_checkpoint(folder / "documents", "BertForMaskedLM")
    transformer = Transformer(str(made), transformer_task="fill-mask")
    torch.manual_seed(0)
    size = Tokenizer.from_file(str(made / "tokenizer.json")).get_vocab_size()
    table = SparseStaticEmbedding(transformer.tokenizer, torch.rand(size) * 7, frozen=True)
    router = Router.for_query_document(
        query_modules=[table], document_modules=[transformer, SpladePooling("max", "log1p_relu")]
    )
    oracle = SparseEncoder(modules=[router], device="cpu")
    oracle.save_pretrained(str(folder / "saved"))

    def ask(role: str) -> Ask:
        def send(client: Client, texts: list[str]) -> Any:
            rows = np.zeros((len(texts), size), np.float32)
            vectors = client.sparse_embed(texts, prompt_name=role)
            for row, vector in zip(rows, vectors, strict=True):
                row[vector.indices] = vector.values
            return rows

        return send

    encode = {"query": oracle.encode_query, "document": oracle.encode_document}
    found = {role: encode[role](TEXTS).to_dense().numpy() for role in encode}
    return [
        Subject("idf", folder / "saved", ask(role), rows, _numbers(made, rows, more=200))
        for role, rows in found.items()
    ]


def _reranker(form: str, kind: str | None = None) -> Callable[[Path], list[Subject]]:
    def subjects(folder: Path) -> list[Subject]:
        save_reranker(folder, kind or FORMS[form][0])
        pairs = [(_QUERY, text) for text in TEXTS]

        def subject(instruction: str | None) -> Subject:
            asked = {} if instruction is None else {"instruction": instruction}
            expected = expected_scores(folder, form, pairs, instruction)[:, 0]
            return Subject(
                "_".join(("reranker", form, *([kind.lower()] if kind else []))),
                folder,
                lambda client, texts: client.rerank(_QUERY, texts, **asked),
                expected,
                _numbers(folder, expected, factor=4),
                {"rerank_form": form, "task": "rerank"},
                has_scores=True,
            )

        instructions = [None] if form == "bge" else [None, _INSTRUCTION]
        return [subject(each) for each in instructions]

    return subjects


def _labels(names: Sequence[str]) -> dict[str, Any]:
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {each: at for at, each in enumerate(names)},
    }


def _classifier(kind: str, **fields: Any) -> Callable[[Path], list[Subject]]:
    def subjects(folder: Path) -> list[Subject]:
        save_checkpoint(folder, kind, num_labels=3, **fields)
        model = getattr(transformers, kind).from_pretrained(folder).eval()
        with torch.inference_mode():
            expected = [model(ids).logits[0].numpy() for ids in _ids(folder)]
        check = _numbers(folder, expected)

        def ask(client: Client, texts: list[str]) -> Any:
            return client.classify(texts)

        return [Subject(kind.lower(), folder, ask, expected, check, has_scores=True)]

    return subjects


def _zero_shot(folder: Path) -> list[Subject]:
    save_checkpoint(folder, "BertForSequenceClassification", **_labels(_NLI))
    pipeline = transformers.ZeroShotClassificationPipeline(
        model=transformers.BertForSequenceClassification.from_pretrained(folder),
        tokenizer=transformers.BertTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")),
    )
    names, options = ["sea", "cat", "river"], {"hypothesis_template": "it is the {}"}
    expected = [
        list(zip(found["labels"], found["scores"], strict=True))
        for found in pipeline(TEXTS, names, **options)
    ]

    def ask(client: Client, texts: list[str]) -> Any:
        rows = client.zero_shot(texts, names, **options)
        return [[(each.label, each.score) for each in row] for row in rows]

    return [Subject("nli", folder, ask, expected, _found)]


def _questions(folder: Path) -> list[Subject]:
    kind = "BertForQuestionAnswering"
    save_checkpoint(folder, kind)
    oracle = QuestionPipeline(folder, kind, gives_types=True)
    context = " ".join(TEXTS[:5])
    options = {"top_k": 3, "doc_stride": 9}
    expected = [
        [(e["start"], e["end"], e["answer"], e["score"]) for e in oracle(text, context, **options)]
        for text in TEXTS
    ]

    def ask(client: Client, texts: list[str]) -> Any:
        rows = client.question_answer([(text, context) for text in texts], **options)
        return [[(e.start, e.end, e.answer, e.score) for e in row] for row in rows]

    return [Subject("questions", folder, ask, expected, _found)]


def _entities(folder: Path) -> list[Subject]:
    save_checkpoint(folder, "BertForTokenClassification", **_labels(_ENTITIES))
    model = transformers.BertForTokenClassification.from_pretrained(folder)
    tokenizer = transformers.BertTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))

    def subject(strategy: str) -> Subject:
        pipeline = transformers.TokenClassificationPipeline(
            model=model, tokenizer=tokenizer, aggregation_strategy=strategy
        )
        expected = [
            [(e["entity_group"], e["start"], e["end"], e["word"], e["score"]) for e in row]
            for row in pipeline(TEXTS)
        ]

        def ask(client: Client, texts: list[str]) -> Any:
            rows = client.predict_entities(texts, aggregation_strategy=strategy)
            return [[(e.label, e.start, e.end, e.word, e.score) for e in row] for row in rows]

        return Subject("entities", folder, ask, expected, _found)

    return [subject(strategy) for strategy in ("simple", "first", "average", "max")]


def _spans(folder: Path) -> list[Subject]:
    save_gliner(folder)
    oracle = Gliner(folder)

    def subject(labels: list[str]) -> Subject:
        threshold = thresholds_of(oracle, TEXTS, labels)[0]
        expected = [oracle.entities(text, labels, threshold=threshold) for text in TEXTS]

        def ask(client: Client, texts: list[str]) -> Any:
            rows = client.extract(texts, labels=labels, threshold=threshold)
            return [[(e.start, e.end, e.text, e.label, e.score) for e in row] for row in rows]

        return Subject("spans", folder, ask, expected, _found)

    return [subject(labels) for labels in (["person name", "x"], ["sea"])]


def _schemas(folder: Path) -> list[Subject]:
    save_gliner2(folder, scale=1)
    oracle = Gliner2(folder)

    def subject(given: dict[str, Any]) -> Subject:
        schema, threshold = clear_of_scores(oracle, TEXTS, given)
        expected = [oracle.extract(text, schema, threshold=threshold) for text in TEXTS]

        def ask(client: Client, texts: list[str]) -> Any:
            return client.extract_schema(texts, schema=schema, threshold=threshold)

        return Subject("schemas", folder, ask, expected, assert_same)

    return list(map(subject, (SCHEMA, PARTS["entities"], PARTS["structures"])))


def _writer(kind: str) -> Callable[[Path], list[Subject]]:
    """Return what makes a model that generates, with the tokens of transformers."""

    @torch.inference_mode()
    def subjects(folder: Path) -> list[Subject]:
        save_checkpoint(folder, kind)
        model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()
        length = {"max_new_tokens": 8, "min_new_tokens": 8}
        expected = []
        for ids in _ids(folder):
            found = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, **length
            )
            begin = 1 if model.config.is_encoder_decoder else ids.shape[1]
            expected.append(found[0, begin:].tolist())

        def ask(client: Client, texts: list[str]) -> Any:
            options = {"max_tokens": 8, "min_tokens": 8, "temperature": 0}
            return [list(client.generate(text, **options).token_ids) for text in texts]

        def check(actual: Any, wanted: Any) -> None:
            assert actual == wanted

        return [Subject(f"writer_{kind.lower()}", folder, ask, expected, check)]

    return subjects


def _mix(folder: Path) -> list[Subject]:
    base = save_checkpoint(folder / "base", output_hidden_states=True)
    set_fields(base, "config.json", output_hidden_states=True)
    set_fields(base, "tokenizer_config.json", **_PIECES)
    transformer = modules.Transformer(str(base))
    features = transformer.get_embedding_dimension()
    layers = modules.WeightedLayerPooling(
        features, transformer.auto_model.config.num_hidden_layers, 0
    )
    torch.nn.init.uniform_(layers.layer_weights.data, 0.2, 2)
    stack = [transformer, layers, modules.Pooling(features), Normalize()]
    saved = folder / "saved"
    SentenceTransformer(modules=stack, device="cpu").save_pretrained(str(saved))
    set_fields(saved, "config.json", output_hidden_states=True)
    expected = SentenceTransformer(str(saved), device="cpu").encode(TEXTS)
    return [Subject("mix", saved, _embed, expected, _numbers(saved, expected, more=100))]


def _rounded(folder: Path) -> list[Subject]:
    """The modules of pplx-embed: numbers beside the middle of two may go either way."""
    save_checkpoint(folder, files={"1_Pooling/config.json": {"pooling_mode_mean_tokens": True}})
    model = transformers.BertModel.from_pretrained(folder).eval()
    expected = [127 * np.tanh(each.astype(np.float64)) for each in _means(folder, model)]
    kinds = {
        "": "sentence_transformers.models.Transformer",
        "1_Pooling": "sentence_transformers.models.Pooling",
    }
    listed = [{"path": path, "type": kind} for path, kind in kinds.items()]
    own = {"path": "", "type": "st_quantize.FlexibleQuantizer", "kwargs": ["quantization"]}
    write_file(folder, "modules.json", json.dumps([*listed, own]))

    # of the largest number, before it is rounded
    error = 127 * relative_error(encoder_roundings(folder))

    def check(actual: Any, wanted: Any) -> None:
        np.testing.assert_array_equal(actual, np.round(actual))
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=0.5 + error)

    return [Subject("rounded", folder, _embed, expected, check)]


# Models that are loaded at the same time, so that memory is bounded.
GROUPS: Sequence[Sequence[Callable[[Path], list[Subject]]]] = (
    (_gemma_embedder, _nemotron, _static, _idf, _mix, _rounded, _zero_shot),
    (
        *map(_reranker, FORMS),
        *(_questions, _entities, _spans, _schemas, _writer("Gemma3ForCausalLM")),
    ),
    (
        _mean_of("EuroBertModel"),
        _mean_of("JinaEmbeddingsV3Model"),
        _mean_of("DebertaV2Model", conv_kernel_size=3, conv_act="gelu"),
        _classifier("DebertaForSequenceClassification"),
        _classifier("ModernBertForSequenceClassification"),
        _classifier("Gemma2ForSequenceClassification", pad_token_id=0),
        _classifier("Qwen3ForSequenceClassification", pad_token_id=0),
    ),
    (
        *map(_writer, ("Phi3ForCausalLM", "GraniteForCausalLM", "SmolLM3ForCausalLM")),
        _writer("T5GemmaForConditionalGeneration"),
        _jina_bert,
        _jina_v3,
        _jina_reranker,
    ),
    (
        *map(_writer, ("Olmo2ForCausalLM", "Olmo3ForCausalLM", "HunYuanDenseV1ForCausalLM")),
        _writer("Qwen3MoeForCausalLM"),
        _nomic_with_experts,
        _nemotron_reranker,
        _reranker("qwen3", "Qwen3MoeForCausalLM"),
        _classifier("EuroBertForSequenceClassification"),
    ),
)
