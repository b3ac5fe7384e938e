"""tokenizer.json made of older files gives the token ids of the tokenizer that wrote them."""

import sys
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers.convert_slow_tokenizer import DebertaV2Converter
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from tests.checkpoints import save_checkpoint, set_fields
from varlen import Encoder
from varlen_tools import make_tokenizer as module
from varlen_tools.fetch import FetchError, fetch
from varlen_tools.make_tokenizer import ConversionError, make_tokenizer
from varlen_tools.sample_texts import TEXTS

# Words that tokenizers are trained on, and more that they have not seen.
CORPUS = [
    "the cat sat by the river and the river ran to the sea",
    "walking talking reading writing; a walker, a talker, 2 readers: 42%",
    "Das Mädchen liest ein Buch über Bäume. Le garçon déjà vu.",
    *TEXTS,
]
SAMPLES = [*TEXTS, "the walker's river", "walking-talking 2024", "unseen zebras quizzically jump"]
BERT_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def word_pieces(*, lowercase=True):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=BERT_TOKENS, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def byte_pairs():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=ROBERTA_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), add_prefix_space=False
    )
    return tokenizer


def save_old(folder, kind, tokenizer, **config):
    """Save a checkpoint that has only the files of its tokenizer's model."""
    size = tokenizer.get_vocab_size()
    save_checkpoint(folder, kind, vocab_size=size, **config)
    (folder / "tokenizer.json").unlink()
    tokenizer.model.save(str(folder))
    return folder


def ids(tokenizer, texts=SAMPLES):
    return [tokenizer.encode(text).ids for text in texts]


@pytest.mark.parametrize(
    "kind, family",
    [("BertModel", "bert"), ("DistilBertModel", "distilbert"), ("ElectraModel", "electra")],
)
def test_vocab_txt_alone_gives_the_ids_of_the_original(tmp_path, kind, family):
    original = word_pieces()
    folder = save_old(tmp_path / family, kind, original)

    made = make_tokenizer(folder)

    assert made.sources == ("vocab.txt",)
    assert ids(made.tokenizer) == ids(original)
    slow = BertTokenizerLegacy(str(folder / "vocab.txt"))
    assert ids(made.tokenizer) == [slow(text)["input_ids"] for text in SAMPLES]
    assert made.tokenizer.encode("the cat", "a river").type_ids.count(1) > 0


def test_what_tokenizer_config_says_of_case_is_followed(tmp_path):
    original = word_pieces(lowercase=False)
    folder = save_old(tmp_path / "cased", "BertModel", original)
    set_fields(folder, "tokenizer_config.json", do_lower_case=False)

    made = make_tokenizer(folder)

    assert ids(made.tokenizer) == ids(original)


def test_vocab_json_and_merges_give_the_ids_of_the_original(tmp_path):
    original = byte_pairs()
    folder = save_old(tmp_path / "roberta", "RobertaModel", original, pad_token_id=1)

    made = make_tokenizer(folder)

    assert made.sources == ("vocab.json", "merges.txt")
    assert ids(made.tokenizer) == ids(original)


def test_a_fetched_model_has_the_tokenizer_that_was_made(tmp_path):
    original = word_pieces()
    folder = save_old(tmp_path / "old", "BertModel", original)
    found = []

    target = fetch(str(folder), repository=tmp_path / "models", on_found=found.append)

    assert found[0].text.made_of == ("vocab.txt",)
    assert Tokenizer.from_file(str(target / "1/tokenizer.json")).get_vocab() == original.get_vocab()
    Encoder.from_pretrained(target / "1").close()


def test_without_transformers_a_refusal_names_what_to_install(tmp_path, monkeypatch):
    folder = save_old(tmp_path / "old", "BertModel", word_pieces())
    monkeypatch.setattr(module, "find_spec", lambda name: None)

    message = "vocab.txt can be converted with transformers: pip install transformers, then fetch"
    with pytest.raises(FetchError, match=f"there is no tokenizer.json, .*: {message}"):
        fetch(str(folder), repository=tmp_path / "models")


def test_files_that_cannot_be_converted_are_refused(tmp_path):
    folder = save_old(tmp_path / "old", "RobertaModel", byte_pairs(), pad_token_id=1)
    (folder / "vocab.json").write_text("[]")

    message = (
        r"transformers does not convert vocab.json and merges.txt \(.*\); copy tokenizer.json of"
    )
    with pytest.raises(ConversionError, match=message):
        make_tokenizer(folder)


def test_the_reason_of_transformers_is_shown_whole(tmp_path):
    folder = save_old(tmp_path / "old", "BertModel", word_pieces())
    set_fields(folder, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")

    with pytest.raises(ConversionError) as error:
        make_tokenizer(folder)

    message = str(error.value)
    assert message.startswith("transformers does not convert vocab.txt (Couldn't instantiate")
    assert "(3) an equivalent slow tokenizer class" in message
    assert message.endswith("AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)")
    assert "\n" not in message


def test_code_of_a_tokenizer_is_not_run(tmp_path):
    folder = save_old(tmp_path / "old", "BertModel", word_pieces())
    (folder / "mine.py").write_text("raise SystemExit('this ran')")
    mapped = {"AutoTokenizer": ["mine.Mine", None]}
    set_fields(folder, "tokenizer_config.json", tokenizer_class="Mine", auto_map=mapped)

    with pytest.raises(ConversionError, match="transformers does not convert vocab.txt"):
        make_tokenizer(folder)
    assert "mine" not in sys.modules


def test_there_is_nothing_to_make_without_files(tmp_path):
    assert make_tokenizer(tmp_path) is None


@pytest.fixture(scope="module")
def sentencepiece():
    return pytest.importorskip("sentencepiece")


def train(sentencepiece, folder, name, **settings):
    """Write a small SentencePiece model into a folder, and return its processor."""
    trained = folder / name
    with trained.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS),
            model_writer=file,
            vocab_size=300,
            hard_vocab_limit=False,
            minloglevel=2,
            **settings,
        )
    return sentencepiece.SentencePieceProcessor(model_file=str(trained))


@pytest.mark.parametrize(
    "kind, name",
    [
        ("XLMRobertaModel", "sentencepiece.bpe.model"),
        ("CamembertModel", "sentencepiece.bpe.model"),
        ("T5ForConditionalGeneration", "spiece.model"),
    ],
)
def test_a_sentencepiece_model_gives_the_pieces_of_the_original(
    tmp_path, sentencepiece, kind, name
):
    folder = save_checkpoint(tmp_path / "old", kind)
    (folder / "tokenizer.json").unlink()
    original = train(sentencepiece, folder, name)

    made = make_tokenizer(folder)

    assert made.sources == (name,)
    for text in SAMPLES:
        pieces = made.tokenizer.encode(text, add_special_tokens=False).tokens
        known = [each if original.piece_to_id(each) else "<unk>" for each in pieces]
        expected = original.encode(text, out_type=str)
        assert known == [each if original.piece_to_id(each) else "<unk>" for each in expected]


@pytest.fixture
def deberta(tmp_path, sentencepiece):
    """Return a folder with the files of DeBERTa-v3 at the hub, and its SentencePiece model."""
    folder = save_checkpoint(tmp_path / "old", "DebertaV2Model")
    (folder / "tokenizer.json").unlink()
    tokens = {f"{name}_id": number for number, name in enumerate(("pad", "bos", "eos", "unk"))}
    pieces = zip(("pad", "bos", "eos", "unk"), ("[PAD]", "[CLS]", "[SEP]", "[UNK]"), strict=True)
    tokens |= {f"{name}_piece": piece for name, piece in pieces}
    return folder, train(sentencepiece, folder, "spm.model", user_defined_symbols=["<n>"], **tokens)


@pytest.mark.parametrize(
    "fields", [{}, {"do_lower_case": True}, {"split_by_punct": True}], ids=lambda each: str([*each])
)
def test_the_model_of_deberta_keeps_its_rules(deberta, fields):
    folder, original = deberta
    set_fields(folder, "tokenizer_config.json", vocab_type="spm", **fields)
    slow = SimpleNamespace(
        vocab_file=str(folder / "spm.model"),
        convert_tokens_to_ids=original.piece_to_id,
        **{"do_lower_case": False, "split_by_punct": False, "add_prefix_space": True, **fields},
    )
    converted = DebertaV2Converter(slow).converted()

    made = make_tokenizer(folder)

    samples = [
        *SAMPLES,
        "\ufb01ne\u3000\uff46\uff55\uff4c\uff4c width",
        "a<n>b [MASK] [SEP]",
        "\uff21\uff0cb; c",
    ]
    converted.add_special_tokens(["[MASK]"])
    assert made.sources == ("spm.model",)
    assert ids(made.tokenizer, samples) == ids(converted, samples)
    assert made.tokenizer.token_to_id("[MASK]") == original.get_piece_size()
    pair = made.tokenizer.encode("the cat", "a river")
    assert pair.type_ids == converted.encode("the cat", "a river").type_ids
    for text in samples[:-2] if not fields else []:
        pieces = made.tokenizer.encode(text, add_special_tokens=False).ids
        assert [each for each in pieces if each != 3] == [
            each for each in original.encode(text) if each != 3
        ]


def test_a_model_of_deberta_without_special_tokens_is_refused(tmp_path, sentencepiece):
    folder = save_checkpoint(tmp_path / "old", "DebertaV2Model")
    (folder / "tokenizer.json").unlink()
    train(sentencepiece, folder, "spm.model")

    with pytest.raises(ConversionError, match=r"spm.model lacks \[CLS\], \[SEP\] or the piece of"):
        make_tokenizer(folder)
    (folder / "spm.model").write_bytes(b"no model")
    with pytest.raises(ConversionError, match="spm.model is damaged"):
        make_tokenizer(folder)


def test_a_conversion_that_splits_texts_in_another_way_is_refused(tmp_path, sentencepiece):
    folder = save_checkpoint(tmp_path / "old", "LlamaForCausalLM")
    (folder / "tokenizer.json").unlink()
    # it drops double spaces, which transformers' class keeps
    train(sentencepiece, folder, "tokenizer.model", model_type="bpe")

    with pytest.raises(ConversionError, match=r"splits .* into .*, where SentencePiece has \["):
        make_tokenizer(folder)
