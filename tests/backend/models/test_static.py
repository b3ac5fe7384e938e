"""Static embeddings equal StaticEmbedding of sentence-transformers, in both forms of folders.

The library model2vec 0.10 gives the same vectors where a text has no unknown token and no more than 512 tokens: it
leaves unknown tokens out and cuts texts, which sentence-transformers does not.
"""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
from tokenizers import Tokenizer

from tests.checkpoints import change_tensors, set_fields, write_file
from tests.closeness import assert_rows_close
from varlen import Encoder
from varlen.errors import RequestError
from varlen.models.checkpoint_folder import Checkpoint

from ..refusals import refused_checkpoint as refused

TEXTS = ["the cat", "a", "river, the river! is it 42?", "x" * 40, "thé 河", "[CLS] the [SEP]"]
MODULES = [
    {"idx": 0, "name": "0", "path": ".", "type": "sentence_transformers.models.StaticEmbedding"},
    {
        "idx": 1,
        "name": "1",
        "path": "1_Normalize",
        "type": "sentence_transformers.models.Normalize",
    },
]
CONFIG = {
    "model_type": "model2vec",
    "architectures": ["StaticModel"],
    "tokenizer_name": "baai/bge-base-en-v1.5",
    "apply_pca": 256,
    "apply_zipf": True,
    "sif_coefficient": 1e-4,
    "hidden_dim": 13,
    "seq_length": 1000000,
    "normalize": True,
    "cache_dir": None,
}


@pytest.fixture
def tokenizer(small_bert):
    return small_bert / "tokenizer.json"


@pytest.fixture
def make_model2vec(tmp_path, tokenizer):
    """Return a function that saves a folder as model2vec does."""

    def make(*parts, modules=MODULES, dtype=torch.float32, **config):
        folder, count = tmp_path / "model2vec", Tokenizer.from_file(str(tokenizer)).get_vocab_size()
        torch.manual_seed(0)
        rows = 11 if "mapping" in parts else count
        tensors = {"embeddings": torch.randn(rows, 13).to(dtype)}
        if "mapping" in parts:
            tensors["mapping"] = torch.randint(rows, (count,))
        if "weights" in parts:
            tensors["weights"] = torch.rand(count, dtype=torch.float64)
        write_file(folder, "config.json", CONFIG | config)
        write_file(folder, "tokenizer.json", tokenizer.read_text())
        write_file(
            folder,
            "tokenizer_config.json",
            {"tokenizer_class": "BertTokenizer", "model_max_length": 5},
        )
        if modules is not None:
            write_file(folder, "modules.json", modules)
            (folder / "1_Normalize").mkdir()
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


def embedded(folder, texts=TEXTS, dtype="fp32", **options):
    """Return our vectors of one batch, which equal the vectors alone."""
    with Encoder.from_pretrained(folder, dtype=dtype) as encoder:
        assert encoder.task == "embed"
        mixed = encoder.embed(texts, **options)
        alone = [encoder.embed([text], **options)[0] for text in texts]
    assert_rows_close(alone, mixed, roundings=8)
    return mixed


@pytest.mark.parametrize("normalized", [False, True])
def test_equals_sentence_transformers(tmp_path, tokenizer, normalized):
    static = StaticEmbedding(Tokenizer.from_file(str(tokenizer)), embedding_dim=13)
    modules = [static, Normalize()] if normalized else [static]
    model = SentenceTransformer(
        modules=modules, device="cpu", prompts={"query": "the query: "}, default_prompt_name=None
    )
    model.save_pretrained(str(tmp_path / "static"))

    actual = embedded(tmp_path / "static")
    prompted = embedded(tmp_path / "static", prompt_name="query")

    assert_rows_close(actual, model.encode(TEXTS), roundings=8)
    assert_rows_close(prompted, model.encode(TEXTS, prompt_name="query"), roundings=8)


def test_reads_a_folder_of_its_own(tmp_path, tokenizer):
    static = StaticEmbedding(Tokenizer.from_file(str(tokenizer)), embedding_dim=13)
    folder = tmp_path / "static" / "0_StaticEmbedding"
    folder.mkdir(parents=True)
    static.save(str(folder))
    modules = [{**MODULES[0], "path": "0_StaticEmbedding"}]
    write_file(tmp_path / "static", "modules.json", modules)
    expected = SentenceTransformer(str(tmp_path / "static"), device="cpu").encode(TEXTS)

    assert_rows_close(embedded(tmp_path / "static"), expected, roundings=8)


@pytest.mark.parametrize("parts", [(), ("weights",), ("mapping",), ("mapping", "weights")])
def test_equals_sentence_transformers_from_folders_of_model2vec(make_model2vec, parts):
    folder = make_model2vec(*parts)
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)

    assert_rows_close(embedded(folder), expected, roundings=16)


def test_weights_multiply_in_fp32_before_a_table_is_rounded(make_model2vec):
    folder = make_model2vec("weights", dtype=torch.float16)
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)

    with Encoder.from_pretrained(folder, dtype="bf16") as encoder:
        actual = encoder.embed(TEXTS)

    assert (np.stack(actual) * expected).sum(axis=1).min() > 0.999


@pytest.mark.parametrize("normalize", [True, False, None])
def test_without_modules_the_configuration_of_model2vec_normalizes(make_model2vec, normalize):
    folder = make_model2vec(modules=None, normalize=normalize)

    lengths = np.linalg.norm(np.stack(embedded(folder)), axis=1)

    assert np.allclose(lengths, 1) == bool(normalize)
    assert Checkpoint.open(folder).normalize == bool(normalize)


def test_a_text_may_be_longer_than_the_tokenizer_says(make_model2vec):
    folder = make_model2vec()
    text = "the cat " * 3000
    expected = SentenceTransformer(str(folder), device="cpu").encode([text])

    assert_rows_close(embedded(folder, [text]), expected, roundings=64)


@pytest.mark.parametrize("direction", ["Right", "Left"])
def test_texts_end_where_tokenizer_json_truncates(make_model2vec, direction):
    folder = make_model2vec()
    cut = {"direction": direction, "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    set_fields(folder, "tokenizer.json", truncation=cut)
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)

    assert Checkpoint.open(folder).max_sequence_tokens == 4
    assert_rows_close(embedded(folder, truncate=True), expected, roundings=16)


def test_a_text_without_tokens_is_refused_by_its_row(make_model2vec):
    folder = make_model2vec()

    with (
        Encoder.from_pretrained(folder, dtype="fp32") as encoder,
        pytest.raises(RequestError, match="row 1: text has no tokens"),
    ):
        encoder.embed(["the cat", ""])


def drop_table(tensors):
    del tensors["embeddings"]


def map_outside(tensors):
    tensors["mapping"][3] = 11


def map_floats(tensors):
    tensors["mapping"] = tensors["mapping"].float()


def map_matrix(tensors):
    tensors["mapping"] = tensors["mapping"][None]


def weigh_others(tensors):
    del tensors["mapping"]


def shorten_weights(tensors):
    tensors["weights"] = tensors["weights"][:-1].contiguous()


@pytest.mark.parametrize(
    "change, message",
    [
        (drop_table, "has no tensor embedding.weight or embeddings"),
        (map_outside, 'the tensor "mapping" names rows from 0 to 11; allowed: 0 to 10'),
        (map_floats, 'the tensor "mapping" is F32'),
        (map_matrix, "; allowed: one axis of at most 4194304"),
        (weigh_others, 'the tensor "weights" has shape'),
        (shorten_weights, 'the tensor "weights" has shape'),
    ],
)
def test_refuses_damaged_tables(make_model2vec, change, message):
    folder = make_model2vec("mapping", "weights")
    change_tensors(folder, change)

    with refused(message):
        Encoder.from_pretrained(folder, dtype="fp32").close()


@pytest.mark.parametrize("path", ["../static", "/tmp"])
def test_refuses_a_folder_elsewhere(tmp_path, path):
    write_file(tmp_path, "modules.json", [{**MODULES[0], "path": path}])

    with refused("allowed: a folder beside it"):
        Checkpoint.open(tmp_path)
