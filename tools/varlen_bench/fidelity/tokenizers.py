"""Small tokenizers of the kinds that checkpoints of the hub have."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

# Tokens of each tokenizer at most: all bytes, special tokens, letters and words.
VOCABULARY = 320
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'-"
_WORDS = "the cat river house water small word of and in is a to bank".split()
_BERT = ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
_ROBERTA = ("<s> $A </s>", "<s> $A </s> </s> $B </s>")


@dataclass(frozen=True, slots=True)
class TokenizerKind:
    """A kind of tokenizer.

    Attributes:
        model: "wordpiece", "bytes" (byte-level BPE), "bytes-nfc" (the same of NFC), or
            "unigram" (SentencePiece's).
        tokens: special tokens by role, in the order of their ids.
        single, pair: templates; None: nothing is added.
        class_name: `tokenizer_class`.
        lower: whether texts become lower case.
    """

    model: str
    tokens: dict[str, str]
    single: str | None = None
    pair: str | None = None
    class_name: str = "PreTrainedTokenizerFast"
    lower: bool = False

    @property
    def types(self) -> bool:
        """Whether the second text of a pair has another type, for models that have types."""
        return self.pair is not None and ":1" in self.pair

    @property
    def ids(self) -> dict[str, int]:
        """Ids of the special tokens, by the names of fields in config.json."""
        order = self.special
        return {f"{role}_token_id": order.index(token) for role, token in self.tokens.items()}

    @property
    def special(self) -> list[str]:
        """The special tokens, in the order of their ids."""
        return list(dict.fromkeys(self.tokens.values()))


def _roles(text: str) -> dict[str, str]:
    return dict(each.split("=", 1) for each in text.split())


_BERT_TOKENS = _roles("pad=[PAD] unk=[UNK] cls=[CLS] sep=[SEP] mask=[MASK]")
_ROBERTA_TOKENS = _roles("bos=<s> pad=<pad> eos=</s> unk=<unk> mask=<mask> cls=<s> sep=</s>")
_MPNET_TOKENS = _roles("bos=<s> pad=<pad> eos=</s> unk=[UNK] mask=<mask> cls=<s> sep=</s>")
_ALBERT_TOKENS = _roles("pad=<pad> unk=<unk> cls=[CLS] sep=[SEP] mask=[MASK]")
_DEBERTA_TOKENS = _roles("pad=[PAD] cls=[CLS] sep=[SEP] unk=[UNK] mask=[MASK]")
_GPT_TOKENS = _roles("eos=<|endoftext|> bos=<|endoftext|> pad=<|endoftext|>")
_LLAMA_TOKENS = _roles("unk=<unk> bos=<s> eos=</s>")
_GEMMA_TOKENS = _roles("pad=<pad> eos=<eos> bos=<bos> unk=<unk>")
TOKENIZERS = {
    "wordpiece": TokenizerKind("wordpiece", _BERT_TOKENS, *_BERT, "BertTokenizer", lower=True),
    "wordpiece-cased": TokenizerKind("wordpiece", _BERT_TOKENS, *_BERT, "BertTokenizer"),
    "wordpiece-mpnet": TokenizerKind("wordpiece", _MPNET_TOKENS, *_ROBERTA, lower=True),
    "bytes-bert": TokenizerKind("bytes", _BERT_TOKENS, *_BERT),
    "bytes-roberta": TokenizerKind("bytes", _ROBERTA_TOKENS, *_ROBERTA),
    "bytes": TokenizerKind("bytes", _GPT_TOKENS),
    "bytes-qwen": TokenizerKind("bytes-nfc", _GPT_TOKENS),
    "bytes-end": TokenizerKind(
        "bytes-nfc", _GPT_TOKENS, "$A <|endoftext|>", "$A <|endoftext|> $B:1 <|endoftext|>:1"
    ),
    "unigram-roberta": TokenizerKind("unigram", _ROBERTA_TOKENS, *_ROBERTA),
    "unigram-albert": TokenizerKind("unigram", _ALBERT_TOKENS, *_BERT, lower=True),
    "unigram-deberta": TokenizerKind("unigram", _DEBERTA_TOKENS, *_BERT),
    "unigram-t5": TokenizerKind(
        "unigram", _roles("pad=<pad> eos=</s> unk=<unk>"), "$A </s>", "$A </s> $B </s>"
    ),
    "unigram-begin": TokenizerKind("unigram", _LLAMA_TOKENS, "<s> $A", "<s> $A <s>:1 $B:1"),
    "unigram-gemma": TokenizerKind("unigram", _GEMMA_TOKENS, "<bos> $A", "<bos> $A <bos> $B"),
    "unigram-gemma-end": TokenizerKind(
        "unigram", _GEMMA_TOKENS, "<bos> $A <eos>", "<bos> $A <eos> $B <eos>"
    ),
}

# By model_type, the kind of tokenizer; names with "cased" have one that keeps case.
TOKENIZER_OF = {
    **dict.fromkeys("albert".split(), "unigram-albert"),
    **dict.fromkeys("deberta-v2".split(), "unigram-deberta"),
    **dict.fromkeys("xlm-roberta camembert jina_embeddings_v3 new gte".split(), "unigram-roberta"),
    **dict.fromkeys("roberta".split(), "bytes-roberta"),
    **dict.fromkeys("modernbert deberta eurobert".split(), "bytes-bert"),
    **dict.fromkeys("gpt2 granite hunyuan_v1_dense olmo2 olmo3 smollm3".split(), "bytes"),
    **dict.fromkeys("qwen2 qwen3".split(), "bytes-qwen"),
    **dict.fromkeys("llama mistral phi3".split(), "unigram-begin"),
    **dict.fromkeys("gemma gemma2 gemma3_text".split(), "unigram-gemma"),
    "t5": "unigram-t5",
    "mpnet": "wordpiece-mpnet",
}


@cache
def count_tokens(name: str) -> int:
    """Return how many rows the table of tokens has; Qwen's has spare rows."""
    kind = TOKENIZERS[name]
    if kind.model == "bytes-nfc":
        return VOCABULARY
    tokenizer = _MAKERS[kind.model](kind)
    tokenizer.add_special_tokens(kind.special)
    return int(tokenizer.get_vocab_size())


def write_tokenizer(folder: Path, name: str, settings: dict[str, object]) -> None:
    """Write tokenizer.json and tokenizer_config.json; `settings` are more fields of the second."""
    kind = TOKENIZERS[name]
    tokenizer = _MAKERS[kind.model](kind)
    special = kind.special
    if kind.single is not None:
        used = [token for token in special if token in f"{kind.single} {kind.pair}"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=kind.single,
            pair=kind.pair,
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in used],
        )
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {f"{role}_token": token for role, token in kind.tokens.items()}
    if kind.class_name == "BertTokenizer":
        settings = {"do_lower_case": kind.lower, **settings}
    content = {"tokenizer_class": kind.class_name, **roles, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")


def _word_pieces(kind: TokenizerKind) -> Tokenizer:
    pieces = [*kind.special, *_WORDS[:7], *_LETTERS, *(f"##{each}" for each in _LETTERS)]
    if not kind.lower:
        pieces += [each for each in _LETTERS.upper() if each not in pieces]
    ids = {token: index for index, token in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token=kind.tokens["unk"]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=kind.lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _bytes(kind: TokenizerKind) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("c", "a"), ("Ġ", "ca"), ("Ġca", "t")]
    tokens = [*kind.special, *alphabet, *(first + second for first, second in merges)]
    ids = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if kind.model == "bytes-nfc":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _unigrams(kind: TokenizerKind) -> Tokenizer:
    special = kind.special
    pieces = [(token, 0.0) for token in special]
    pieces += [(f"\N{LOWER ONE EIGHTH BLOCK}{word}", -3.0 - i / 8) for i, word in enumerate(_WORDS)]
    letters = ["\N{LOWER ONE EIGHTH BLOCK}", *_LETTERS]
    letters += [] if kind.lower else [each for each in _LETTERS.upper() if each not in letters]
    known = {piece for piece, _ in pieces}
    pieces += [(each, -6.0 - i / 64) for i, each in enumerate(letters) if each not in known]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=special.index(kind.tokens["unk"])))
    steps = [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    steps += [normalizers.Lowercase()] if kind.lower else []
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


_MAKERS = {"wordpiece": _word_pieces, "bytes": _bytes, "bytes-nfc": _bytes, "unigram": _unigrams}
