"""The small model: its text, its training, and its checkpoint as transformers reads it."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from tests.closeness import assert_close
from varlen_tools.train_demo import __main__ as command
from varlen_tools.train_demo.__main__ import python_documents
from varlen_tools.train_demo.loop import orthogonalized
from varlen_tools.train_demo.save import save_gpt2
from varlen_tools.train_demo.train import END_OF_TEXT, encode, train, train_tokenizer
from varlen_tools.train_demo.transformer import Shape, Training

from .commands import run_module

pytestmark = pytest.mark.full

TINY = Training(
    Shape(vocabulary=300, positions=24, hidden=16, layers=2, heads=2), steps=12, samples=2
)
DOCUMENTS = ["The cat sat on the mat, and the dog sat on the cat." * 5, "A list is mutable. " * 9]


def trained(training=TINY):
    """Return a model trained on the two documents, its tokenizer, and its losses."""
    tokenizer = train_tokenizer(DOCUMENTS, training.shape.vocabulary)
    losses = []
    token_ids = encode(tokenizer, DOCUMENTS)
    model = train(training, token_ids, lambda step, loss: losses.append((step, loss)))
    return model, tokenizer, losses


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a trained model."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model, tokenizer, _ = trained()
    save_gpt2(folder, model, TINY.shape, tokenizer)
    return folder


def test_the_text_is_prose_of_python_itself():
    documents = python_documents()

    assert documents == python_documents()
    assert sum(map(len, documents)) > 15_000
    paragraphs = [part for document in documents for part in document.split("\n\n")]
    assert all(part[0].isupper() and part[-1] in ".:" for part in paragraphs)
    assert not any(set(part) & set('\n"*()_<>=') for part in paragraphs)


def test_training_lowers_the_loss_and_repeats_for_a_seed():
    model, _, losses = trained()
    again, _, _ = trained()
    other, _, _ = trained(replace(TINY, seed=1))

    assert [step for step, _ in losses] == list(range(1, TINY.steps + 1))
    assert losses[-1][1] < losses[0][1] - 0.2
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
    assert not torch.equal(model.wte.weight, other.wte.weight)


def test_training_leaves_the_random_numbers_of_the_caller():
    torch.manual_seed(5)
    expected = torch.rand(3)

    torch.manual_seed(5)
    trained(replace(TINY, steps=1))

    assert torch.equal(torch.rand(3), expected)


def test_the_tokenizer_gives_back_any_text_and_ends_documents():
    tokenizer = train_tokenizer(DOCUMENTS, 300)
    text = "Naïve 🙂 tabs\tand\n\nlines"

    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids = encode(tokenizer, ["The cat", "A list"]).tolist()
    assert (ids.count(end), ids[-1]) == (2, end)


@pytest.mark.parametrize("rows, columns", [(6, 20), (20, 6), (8, 8)])
def test_an_orthogonalized_matrix_has_singular_values_near_one(rows, columns):
    torch.manual_seed(0)
    matrix = torch.randn(rows, columns)

    values = torch.linalg.svdvals(orthogonalized(matrix))

    # the source's polynomial ends between 0.7 and 1.2, smallest values excepted
    assert values.max() < 1.3
    assert values.median() > 0.6


def test_matrices_are_orthogonalized_together_as_each_alone():
    torch.manual_seed(0)
    matrices = torch.randn(3, 7, 5)

    together = orthogonalized(matrices)

    for matrix, updated in zip(matrices, together, strict=True):
        assert torch.allclose(updated, orthogonalized(matrix), atol=1e-5)


def test_transformers_loads_the_checkpoint_and_gives_the_same_logits(checkpoint):
    model, tokenizer, _ = trained()
    theirs, report = transformers.GPT2LMHeadModel.from_pretrained(
        checkpoint, output_loading_info=True
    )
    ids = torch.tensor([tokenizer.encode("The cat sat on a list").ids])

    with torch.inference_mode():
        expected, actual = theirs(ids).logits, model(ids)

    assert not any(report.values())
    assert_close(actual.numpy(), expected.numpy(), roundings=64)
    assert theirs.generation_config.eos_token_id == tokenizer.token_to_id(END_OF_TEXT)


def test_transformers_reads_the_same_tokenizer_and_configuration(checkpoint):
    theirs = transformers.AutoTokenizer.from_pretrained(checkpoint)
    ours = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    for text in ("The cat sat.", " leading  spaces", "🙂\n"):
        assert theirs(text)["input_ids"] == ours.encode(text).ids
        assert theirs.decode(theirs(text)["input_ids"]) == text
    assert (theirs.eos_token, theirs.model_max_length) == (END_OF_TEXT, TINY.shape.positions)
    written = json.loads((checkpoint / "config.json").read_text())
    read = transformers.AutoConfig.from_pretrained(checkpoint).to_dict()
    assert {key: read[key] for key in written} == written


def test_the_command_writes_a_checkpoint_and_keeps_one_that_exists(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "DEFAULT", TINY)
    monkeypatch.setattr(command, "python_documents", lambda: DOCUMENTS)
    arguments = ["gpt2", "--output", tmp_path / "model/1", "--steps", "2"]

    first = run_module(command.main, *arguments)
    second = run_module(command.main, *arguments)

    assert first.exit_code == 0, first.output
    assert "model/1 is ready after" in first.output
    assert second.exit_code == 2
    assert "holds a checkpoint already; --force replaces it" in second.output
    assert run_module(command.main, *arguments, "--force").exit_code == 0
    assert sorted(path.name for path in (tmp_path / "model/1").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
