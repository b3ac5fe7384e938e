"""Small tokenizers of the kinds that decoders use, trained on a few lines."""

from functools import cache

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "Ein Bär, zwei Bären; où est la bibliothèque? \u041d\u0435 знаю. 你好\uff0c世界\uff01 สวัสดี",
    'naïve café — 12.50 € 😀😀😀 👩‍👩‍👧 {"name": [true, null, 1.5e3]}\n\tindented\n\n',
] * 4

END, PAD = "<|end|>", "<|pad|>"


@cache
def byte_level():
    """Return a byte-pair tokenizer of bytes, as of GPT-2 and Llama 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


@cache
def byte_fallback():
    """Return a byte-pair tokenizer of words with bytes for rare characters, as of Llama 2."""
    letters = "abcdefghijklmnopqrstuvwxyzTE,.?;▁你"
    tokens = ["<unk>", END, PAD, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("o", "x"), ("▁", "d"), ("o", "g")]
    tokens += ["".join(pair) for pair in merges]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([END, PAD])
    return tokenizer


@cache
def metaspace():
    """Return a tokenizer of words and their parts that marks spaces, as of T5."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        TEXTS,
        trainers.UnigramTrainer(
            vocab_size=150,
            special_tokens=["<unk>", END, PAD],
            unk_token="<unk>",
            show_progress=False,
        ),
    )
    return tokenizer


@cache
def word_piece():
    """Return a tokenizer of words and parts that continue them, as of BERT."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.train_from_iterator(
        TEXTS,
        trainers.WordPieceTrainer(
            vocab_size=200, special_tokens=["[UNK]", END, PAD], show_progress=False
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    return tokenizer


KINDS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
    "word_piece": word_piece,
}
