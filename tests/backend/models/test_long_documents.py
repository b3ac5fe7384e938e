"""Spans and windows have the vectors of the late chunking paper and OpenAI's cookbook.

Both recipes are stated here in transformers. Source: Günther et al. 2024, arXiv:2409.04701, algorithms 1 and 2.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer import modules
from tokenizers import Tokenizer

from tests.checkpoints import pooling_files, set_fields
from tests.closeness import assert_close, encoder_roundings
from varlen import Encoder
from varlen.config import EngineConfig
from varlen.errors import RequestError
from varlen.execution.runner import Runner
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import Prompt, RequestOptions, Spans, Unpooled

from .test_unpooled_prompts import BYTE_TOKENIZER

DOCUMENT = (
    "the river is the cat, the cat is a river. a cat! 42 rivers? the end of it, the cat-river is 7."
)
LONG = " ".join([DOCUMENT, "it's a river", DOCUMENT[:60], "the cat sat on it; the river ran."] * 3)
KINDS = [
    "BertModel",
    "T5EncoderModel",
    *(
        pytest.param(kind, marks=pytest.mark.full)
        for kind in ("XLMRobertaModel", "ModernBertModel", "Qwen3Model")
    ),
]
PROMPTS = {"query": "the cat: ", "none": ""}
pytestmark = pytest.mark.filterwarnings("ignore")


def spans_of(text, size):
    """Return parts of a text that begin at words; they are all of it."""
    begins = [0]
    while (at := text.find(" ", begins[-1] + size)) > 0:
        begins.append(at + 1)
    return list(pairwise([*begins, len(text)]))


class Recipe:
    """The recipes, for a checkpoint with these modules behind its mean."""

    def __init__(self, kind, folder, more=()):
        self.model = getattr(transformers, kind).from_pretrained(folder).eval()
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.more = more

    def hidden(self, ids):
        with torch.no_grad():
            return self.model(torch.tensor([ids])).last_hidden_state[0]

    def vectors(self, rows):
        features = {"sentence_embedding": torch.stack(rows)}
        with torch.no_grad():
            for module in self.more:
                features = module(features)
        return features["sentence_embedding"].numpy()

    def tokens(self, text, prompt=""):
        """Return head, ids of the text, tail, and where each token of the text begins."""
        found = self.tokenizer.encode(prompt + text)
        own = []
        for place, (begin, end) in enumerate(found.offsets):
            part = (prompt + text)[begin:end]
            skipped = len(part) - len(part.lstrip()) if part.strip() else 0
            at = begin + skipped - len(prompt)
            if found.sequence_ids[place] is not None and at >= 0:
                own.append((place, at))
        first, last = own[0][0], own[-1][0] + 1
        return found.ids[:first], found.ids[first:last], found.ids[last:], [at for _, at in own]

    def chunks(self, text, spans, prompt="", unpooled=0):
        """Late chunking: one pass, and the mean of the tokens of each span."""
        head, ids, tail, begins = self.tokens(text, prompt)
        hidden = self.hidden([*head, *ids, *tail])
        return self._pooled(hidden, len(head), begins, spans, unpooled)

    def long_chunks(self, text, spans, longest, overlap):
        """Long late chunking: of a later window, the first tokens are dropped."""
        head, ids, tail, begins = self.tokens(text)
        step = longest - len(head) - len(tail) - overlap
        kept, ending = [], None
        for begin in range(0, max(1, len(ids) - overlap), step):
            part = ids[begin : begin + step + overlap]
            hidden = self.hidden([*head, *part, *tail])
            own = hidden[len(head) : len(head) + len(part)]
            kept.append(hidden[: len(head)] if not begin else own[:0])
            kept.append(own[overlap:] if begin else own)
            ending = hidden[len(head) + len(part) :]
        return self._pooled(torch.cat([*kept, ending]), len(head), begins, spans, 0)

    def mean_of_windows(self, text, longest, overlap):
        """The mean of windows by their tokens, normalized."""
        head, ids, tail, _ = self.tokens(text)
        step = longest - len(head) - len(tail) - overlap
        parts = [ids[at : at + step + overlap] for at in range(0, max(1, len(ids) - overlap), step)]
        rows = [self.hidden([*head, *part, *tail]).mean(dim=0) for part in parts]
        vectors = self.vectors(rows)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        mean = np.average(vectors, axis=0, weights=[len(part) for part in parts])
        return mean / np.linalg.norm(mean)

    def _pooled(self, hidden, first, begins, spans, unpooled):
        rows = []
        for begin, end in spans:
            inside = [place for place, at in enumerate(begins) if begin <= at < end]
            start = first + inside[0] if inside[0] else 0
            stop = first + inside[-1] + 1 if inside[-1] < len(begins) - 1 else len(hidden)
            rows.append(hidden[max(start, unpooled) : stop].mean(dim=0))
        return self.vectors(rows)


@pytest.fixture(scope="module", params=KINDS)
def model(request, make_checkpoint, tmp_path_factory):
    """Return a checkpoint that pools a mean, and its recipe; T5 has two Dense modules."""
    kind = request.param
    folder = make_checkpoint(kind, files=pooling_files(pooling_mode_mean_tokens=True))
    if kind != "T5EncoderModel":
        return folder, Recipe(kind, folder)
    set_fields(folder, "tokenizer_config.json", **BYTE_TOKENIZER)
    target = tmp_path_factory.mktemp("saved") / "model"
    more = [
        Dense(36, 20, activation_function=torch.nn.Identity()),
        Dense(20, 12, bias=False, activation_function=torch.nn.Identity()),
        Normalize(),
    ]
    transformer = modules.Transformer(str(folder))
    pooling = modules.Pooling(transformer.get_embedding_dimension(), pooling_mode="mean")
    made = SentenceTransformer(modules=[transformer, pooling, *more], device="cpu")
    made.save_pretrained(str(target), create_model_card=False)
    set_fields(target, "sentence_bert_config.json", max_seq_length=64)
    return target, Recipe(kind, target, more)


def encoder_of(folder, dtype="fp32", **settings):
    return Encoder.from_pretrained(
        folder, task="embed", dtype=dtype, threads=1, warmup_seconds=0, **settings
    )


def roundings_of(folder):
    return 2 * encoder_roundings(folder) + 200


@pytest.fixture(scope="module")
def encoder(model):
    """Return an encoder of 48 tokens."""
    with encoder_of(model[0], max_sequence_tokens=48) as loaded:
        yield loaded


def test_spans_of_one_pass_are_those_of_the_paper(model, encoder):
    folder, recipe = model
    text = DOCUMENT[:40]
    spans = [*spans_of(text, 9), (4, 20), (0, len(text))]

    found = encoder.embed([text], spans=spans)

    assert_close(found, recipe.chunks(text, spans), roundings=roundings_of(folder))
    # a span that is the whole text has the text's vector
    assert_close(found[-1:], encoder.embed([text]), roundings=roundings_of(folder))


@pytest.mark.parametrize("overlap", [0, 12])
def test_spans_of_windows_are_those_of_the_paper(model, encoder, overlap):
    folder, recipe = model
    spans = spans_of(LONG, 40)

    found = encoder.embed([LONG], spans=spans, windows=True, window_overlap=overlap)

    expected = recipe.long_chunks(LONG, spans, 48, overlap)
    assert_close(found, expected, roundings=roundings_of(folder))


@pytest.mark.parametrize("overlap", [0, 12])
def test_a_long_text_has_the_mean_of_its_windows(model, encoder, overlap):
    folder, recipe = model
    short = [DOCUMENT[:20]]

    found = encoder.embed([LONG, *short], windows=True, window_overlap=overlap, normalize=True)

    expected = recipe.mean_of_windows(LONG, 48, overlap)
    assert_close(found[0], expected, roundings=roundings_of(folder))
    assert_close(found[1:], encoder.embed(short, normalize=True), roundings=roundings_of(folder))


def test_bf16_has_the_directions_of_fp32(model, encoder):
    form = {"spans": spans_of(LONG, 40), "windows": True, "normalize": True}
    expected = encoder.embed([LONG], **form)

    with encoder_of(model[0], "bf16", max_sequence_tokens=48) as in_bf16:
        found = in_bf16.embed([LONG], **form)

    assert (found * expected).sum(axis=1).min() > 0.999


@pytest.mark.parametrize("execution", ["packed", pytest.param("padded", marks=pytest.mark.full)])
def test_spans_and_whole_texts_share_a_batch(model, execution):
    folder, _ = model
    config = EngineConfig(task="embed", dtype="fp32", threads=1, execution=execution)
    runner = Runner(Checkpoint.open(folder), config)
    random = np.random.default_rng(0)
    prompts = []
    for size in (20, 3, 9, 31, 9, 1):
        ids = random.integers(5, 60, size, dtype=np.int32)
        bounds = np.sort(random.integers(0, size + 1, (2, 4)), axis=0)
        bounds[1] = np.maximum(bounds[1], bounds[0] + 1)
        bounds = np.minimum(bounds, [[size - 1], [size]])
        places = bounds[:, : min(4, size)].reshape(-1).astype(np.int32)
        prompts.append(Prompt(ids, payload=Spans(places)) if size % 2 else Prompt(ids))
    prompts.append(Prompt(prompts[0].token_ids, payload=Unpooled(count=0)))
    options = [RequestOptions(normalize=bool(row % 2)) for row in range(len(prompts))]

    together = runner.run(prompts, options)

    for prompt, option, found in zip(prompts, options, together, strict=True):
        [alone] = runner.run([prompt], [option])
        assert found.shape == alone.shape
        assert found.ndim == 1 + (prompt.spans is not None)
        assert_close(found, alone, roundings=roundings_of(folder))
    runner.close()


def test_threads_with_spans_windows_and_texts_get_their_own(make_checkpoint):
    folder = make_checkpoint(files=pooling_files(pooling_mode_mean_tokens=True))
    asked = [
        ([DOCUMENT[:40]], {"spans": spans_of(DOCUMENT[:40], 9)}),
        ([DOCUMENT[:40]], {"spans": spans_of(DOCUMENT[:40], 20)}),
        ([DOCUMENT[:40], "the cat"], {}),
        ([LONG], {"windows": True}),
        ([LONG], {"windows": True, "window_overlap": 3}),
        ([LONG], {"windows": True, "spans": spans_of(LONG, 50), "dimensions": 8}),
    ]
    with encoder_of(folder, response_cache_bytes=1 << 20) as encoder:
        expected = [encoder.embed(texts, **options) for texts, options in asked]
        with ThreadPoolExecutor(6) as pool:
            again = pool.map(lambda each: encoder.embed(each[0], **each[1]), asked * 4)
            found = list(again)

    for vectors, wanted in zip(found, expected * 4, strict=True):
        assert_close(vectors, wanted, roundings=roundings_of(folder))


@pytest.mark.parametrize("include_prompt", [True, False])
def test_a_prompt_belongs_to_the_first_span_unless_pooling_leaves_it_out(
    small_bert, tmp_path, include_prompt
):
    folder = tmp_path / "saved"
    transformer = modules.Transformer(str(small_bert))
    pooling = modules.Pooling(
        transformer.get_embedding_dimension(), pooling_mode="mean", include_prompt=include_prompt
    )
    made = SentenceTransformer(modules=[transformer, pooling], prompts=PROMPTS, device="cpu")
    made.save_pretrained(str(folder), create_model_card=False)
    text, prompt = "the cat is a river, it is", PROMPTS["query"]
    spans = [(0, 7), (8, 18), (19, 25), (0, 25)]
    # [CLS] and the prompt
    unpooled = 0 if include_prompt else 4

    with encoder_of(folder) as encoder:
        found = encoder.embed([text], prompt_name="query", spans=spans)
        whole = encoder.embed([text], prompt_name="query")

    recipe = Recipe("BertModel", folder)
    expected = recipe.chunks(text, spans, prompt, unpooled)
    assert_close(found, expected, roundings=roundings_of(folder))
    assert_close(found[-1:], whole, roundings=roundings_of(folder))


@pytest.mark.parametrize(
    "kind",
    [
        "cls",
        *(pytest.param(each, marks=pytest.mark.full) for each in ("lasttoken", "mean and max")),
    ],
)
def test_a_pooling_without_vectors_of_spans_is_named(small_bert, tmp_path, kind):
    transformer = modules.Transformer(str(small_bert))
    modes = ["mean", "max"] if kind == "mean and max" else kind
    pooling = modules.Pooling(transformer.get_embedding_dimension(), pooling_mode=modes)
    made = SentenceTransformer(modules=[transformer, pooling], device="cpu")
    made.save_pretrained(str(tmp_path / "saved"), create_model_card=False)

    with encoder_of(tmp_path / "saved") as encoder:
        with pytest.raises(
            RequestError,
            match="the request has spans, and this model pools by .*; send spans as texts",
        ):
            encoder.embed([DOCUMENT[:40]], spans=[(0, 9)])
        assert encoder.embed([LONG], windows=True).shape[0] == 1


def test_a_model_with_several_outputs_has_spans_of_its_vector(make_checkpoint):
    folder = make_checkpoint("BertForMaskedLM", files=pooling_files(pooling_mode_mean_tokens=True))
    spans = spans_of(DOCUMENT[:40], 9)

    with encoder_of(folder) as alone, encoder_of(folder, outputs="sparse_embed,hidden") as several:
        expected, found = (each.embed([DOCUMENT[:40]], spans=spans) for each in (alone, several))

    assert_close(found, expected, roundings=roundings_of(folder))


def test_a_model_without_spans_in_a_batch_gathers_no_rows(make_checkpoint, monkeypatch):
    folder = make_checkpoint(files=pooling_files(pooling_mode_mean_tokens=True))
    with encoder_of(folder) as encoder:
        encoder.embed(["the cat"])
        monkeypatch.setattr(
            torch.Tensor, "index_select", lambda *_: pytest.fail("a plain text gathers rows")
        )
        assert encoder.embed(["the cat"]).shape[0] == 1


def test_refuses_what_has_no_meaning(encoder):
    for options, message in (
        ({"spans": [(0, 3)], "truncate": True}, "spans and windows are parts of whole texts"),
        ({"spans": [(3, 3)]}, r"spans\[0\] is \[3, 3\]; allowed: \[begin, end\] in characters"),
        ({"spans": []}, "spans is"),
        ({"window_overlap": 3}, "the request has window_overlap without windows"),
    ):
        with pytest.raises(RequestError, match=message):
            encoder.embed(["the cat"], **options)
