"""tokenizer.json of Marian's SentencePiece files; transformers' protobuf classes write the files."""

import json

import pytest
from transformers.convert_slow_tokenizer import import_protobuf

from tests.checkpoints import save_checkpoint
from varlen.intake.tokenization import Tokenizer
from varlen.models.checkpoint_folder import Checkpoint
from varlen_tools.fetch import FetchError, copy_checkpoint, fetch
from varlen_tools.make_tokenizer import ConversionError, SentencePieceError, convert_marian

# a process may define the messages once only
sentencepiece = import_protobuf()
SPECIAL = {"<unk>": 2, "<s>": 3, "</s>": 3}
SOURCE = {
    "▁the": -2.0,
    "▁cat": -2.5,
    "▁": -3.0,
    "t": -4.0,
    "h": -4.0,
    "e": -4.0,
    "c": -4.5,
    "a": -5.0,
}
# SentencePiece models have a piece of every character in their pieces
TARGET = ["▁die", "▁Kat", "ze", "ße", *"diKzß"]
VOCABULARY = ["</s>", "<unk>", *reversed(TARGET), *SOURCE, ">>deu<<", "<pad>"]


def model_bytes(pieces=SOURCE, types=None, **trainer):
    model = sentencepiece.ModelProto()
    kinds = SPECIAL | (types or {})
    for text, score in {**dict.fromkeys(SPECIAL, 0.0), **pieces}.items():
        model.pieces.add(piece=text, score=score, type=kinds.get(text, 1))
    model.trainer_spec.model_type = trainer.pop("model_type", 1)
    model.trainer_spec.vocab_size = 300
    model.normalizer_spec.name = "identity"
    for name, value in trainer.items():
        setattr(model.normalizer_spec, name, value)
    return model.SerializeToString()


@pytest.fixture
def folder(tmp_path):
    """Return a Marian checkpoint as OPUS-MT publishes them, without tokenizer.json."""
    folder = save_checkpoint(tmp_path / "opus-mt-en-de", "MarianMTModel")
    (folder / "tokenizer.json").unlink()
    (folder / "source.spm").write_bytes(model_bytes())
    ids = {token: number for number, token in enumerate(VOCABULARY)}
    (folder / "vocab.json").write_text(json.dumps(ids))
    return folder


@pytest.mark.parametrize(
    "text, tokens",
    [
        ("the cat", ["▁the", "▁cat"]),
        ("  the   cat ", ["▁the", "▁cat"]),
        ("that", ["▁", "t", "h", "a", "t"]),
        ("", []),
        (">>deu<< the cat", [">>deu<<", "▁the", "▁cat"]),
        # unknown characters side by side are one token
        ("xqw cat", ["▁", "<unk>", "▁cat"]),
        # a character that only targets have is read, but no longer piece of targets
        ("aße", ["▁", "a", "ß", "e"]),
        ("die", ["▁", "d", "i", "e"]),
    ],
)
def test_splits_sources_by_the_pieces_of_sources(folder, text, tokens):
    tokenizer = convert_marian(folder)

    encoding = tokenizer.encode(text)

    expected = [VOCABULARY.index(token) for token in [*tokens, "</s>"]]
    assert encoding.ids == expected


def test_decodes_the_pieces_of_targets(folder):
    ids = [VOCABULARY.index(token) for token in ["▁die", "▁Kat", "ze", "</s>"]]

    assert convert_marian(folder).decode(ids) == "die Katze"


def test_a_copy_of_the_checkpoint_has_the_tokenizer(folder, tmp_path):
    target = tmp_path / "copy"
    target.mkdir()

    copy_checkpoint(folder, target)

    files = {path.name for path in target.iterdir()}
    assert "tokenizer.json" in files
    assert "source.spm" not in files
    Checkpoint.open(target).check_task("translate")
    (prompt,) = Tokenizer(target, 64).encode(["the cat"], truncate=False)
    assert prompt.token_ids.tolist() == convert_marian(folder).encode("the cat").ids


@pytest.mark.parametrize(
    "data, message",
    [
        (model_bytes(model_type=2), "source.spm is not a unigram model"),
        (model_bytes(types={"▁cat": 4}), "pieces of bytes or of users, or keeps spaces"),
        (model_bytes(add_dummy_prefix=False), "pieces of bytes or of users, or keeps spaces"),
        (model_bytes()[:-3], "source.spm is damaged: .*[Pp]ars"),
        (b"\xff" * 20, "source.spm is damaged"),
        (b"no model", "source.spm is damaged"),
    ],
    ids=["byte pairs", "user's pieces", "no space in front", "cut", "endless number", "text"],
)
def test_refuses_a_model_that_is_not_converted(folder, data, message):
    (folder / "source.spm").write_bytes(data)

    with pytest.raises(SentencePieceError, match=message):
        convert_marian(folder)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda ids: ids.pop("▁cat"), "vocab.json does not give ids from 0"),
        (lambda ids: ids.update({"▁cats": ids.pop("▁cat")}), "lacks 1 pieces of source.spm, such"),
        (lambda ids: ids.update({"<PAD>": ids.pop("<pad>")}), "vocab.json has no token <pad>"),
    ],
    ids=["a gap", "a missing piece", "no padding"],
)
def test_refuses_a_vocabulary_that_does_not_fit(folder, tmp_path, change, message):
    path = folder / "vocab.json"
    ids = json.loads(path.read_text())
    change(ids)
    path.write_text(json.dumps(ids))

    with pytest.raises(ConversionError, match=message):
        convert_marian(folder)
    with pytest.raises(FetchError, match=f"no tokenizer.json, and none can be made: .*{message}"):
        fetch(str(folder), repository=tmp_path / "models")
