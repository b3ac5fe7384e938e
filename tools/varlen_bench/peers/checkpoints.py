"""Checkpoints of the benchmarks: their limits, their loading, and random ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from torch import Tensor

Attention = Literal["eager", "sdpa"]
_WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """The sizes of an encoder."""

    name: str
    hidden: int
    layers: int
    heads: int
    features: int
    vocabulary: int = 30_522


BERT_BASE = EncoderShape("bert-base", hidden=768, layers=12, heads=12, features=3072)
MINILM = EncoderShape("minilm", hidden=384, layers=6, heads=12, features=1536)


def config_field(folder: Path, name: str) -> int:
    """Return a number of a checkpoint's config.json, such as `vocab_size`."""
    return int(json.loads((folder / "config.json").read_text(encoding="utf-8"))[name])


def save_random_checkpoint(
    shape: EncoderShape, folder: Path, positions: int, *, scale: int = 1
) -> None:
    """Save a BertModel with random weights, and an empty tokenizer, which varlen requires.

    Args:
        scale: factor of its matrices; at the usual scale vectors of different texts are nearly equal.
    """
    model = random_model(
        "BertModel",
        "BertConfig",
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.features,
        max_position_embeddings=positions,
    )
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.data *= scale
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({}), encoding="utf-8")


@contextmanager
def random_checkpoint(shape: EncoderShape, positions: int) -> Iterator[Path]:
    """Yield a folder with the checkpoint of `save_random_checkpoint`."""
    with TemporaryDirectory(prefix="varlen-bench-") as folder:
        save_random_checkpoint(shape, Path(folder), positions)
        yield Path(folder)


def random_model(kind: str, config: str, **fields: Any) -> Any:
    """Return a model with random weights.

    Args:
        kind, config: classes of transformers, such as "BertModel" and "BertConfig".
        fields: fields of the configuration that differ from the defaults of its class.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**fields))


def load_encoder(
    folder: Path, dtype: torch.dtype, device: torch.device, attention: Attention
) -> Any:
    """Return transformers' model of an encoder checkpoint of any family, ready for inference.

    A family without this attention gets the eager one.
    """
    from transformers import AutoConfig, AutoModel, AutoModelForTextEncoding
    from transformers.utils import logging

    logging.disable_progress_bar()
    # only the encoder, where the family has a decoder too
    has_decoder = AutoConfig.from_pretrained(folder).is_encoder_decoder
    kind = AutoModelForTextEncoding if has_decoder else AutoModel
    try:
        model = kind.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    except ValueError:
        model = kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval().to(device)


def load_generator(kind: str, folder: Path, threads: int) -> Any:
    """Return transformers' fp32 model of a checkpoint on `threads` cores.

    Args:
        kind: class of transformers that loads it.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    auto = getattr(transformers, kind)
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


@dataclass(frozen=True, slots=True)
class GeneratorShape:
    """The sizes of a GPT-2 model, or of each side of a Marian model."""

    name: str
    hidden: int
    layers: int
    heads: int
    positions: int
    vocabulary: int

    @property
    def features(self) -> int:
        """Width of the feed-forward layers."""
        return 4 * self.hidden


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes of a Llama model."""

    name: str
    hidden: int
    layers: int
    heads: int
    key_heads: int
    features: int
    positions: int
    vocabulary: int


GPT2_SMALL = GeneratorShape("gpt2-small", 768, 12, 12, positions=1024, vocabulary=50_257)
LLAMA_SMALL = LlamaShape(
    "llama-small", 1024, 16, 16, key_heads=4, features=2816, positions=2048, vocabulary=32_000
)
TRANSFORMER_BASE = GeneratorShape("transformer-base", 512, 6, 8, positions=512, vocabulary=32_000)


def _random_gpt2(shape: GeneratorShape) -> Any:
    return random_model(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=shape.vocabulary,
        n_positions=shape.positions,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        bos_token_id=0,
        eos_token_id=0,
    )


def llama_of(shape: LlamaShape) -> Any:
    """Return a LlamaForCausalLM with random weights."""
    return random_model(
        "LlamaForCausalLM",
        "LlamaConfig",
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.positions,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        intermediate_size=shape.features,
        bos_token_id=0,
        eos_token_id=0,
    )


def save_random_decoder(shape: GeneratorShape | LlamaShape, folder: Path) -> None:
    """Save a model with random weights, and a tokenizer that splits text into bytes.

    It is a LlamaForCausalLM or a GPT2LMHeadModel.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    model = llama_of(shape) if isinstance(shape, LlamaShape) else _random_gpt2(shape)
    # at the usual scale, random weights repeat one token whatever the prompt
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.data *= 3
    model.save_pretrained(folder)
    known = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    # no text gives the others
    words = [*known, *(f"word{number}" for number in range(len(known), shape.vocabulary))]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(known[:1])
    # CTranslate2 needs all three
    save_tokenizer(
        tokenizer, folder, dict.fromkeys(("bos_token", "eos_token", "unk_token"), known[0])
    )


def save_gptq(checkpoint: Path, folder: Path, *, bits: int, group: int) -> dict[str, Tensor]:
    """Save a GPT-2 or a Llama as GPTQ, rounded to the nearest codes.

    Args:
        group: inputs that share a scale and a zero point.

    Returns:
        The floats that the codes stand for, by name.
    """
    import torch

    most = (1 << bits) - 1
    # its writers subtract 1 from each zero point
    ones = sum(1 << at for at in range(0, 32, bits))

    def parts_of(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = weight.t().reshape(-1, group, len(weight))
        low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
        scale = ((high - low) / most).clamp(min=1e-4).half().float()
        zero = (-low / scale).round().clamp(0, most)
        codes = (groups / scale[:, None] + zero[:, None]).round().clamp(0, most)
        values = ((codes - zero[:, None]) * scale[:, None]).flatten(0, 1)
        parts = {
            ".qweight": _words(codes.flatten(0, 1), bits),
            ".qzeros": (_words(zero.t(), bits) - ones).t().contiguous(),
            ".scales": scale.half(),
            ".g_idx": (torch.arange(len(values)) // group).int(),
        }
        return parts, values.t()

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": False,
        "desc_act": False,
    }
    return _save_codes(checkpoint, folder, config, parts_of)


# Quantiles of the normal distribution, from -1 to 1. Source: Dettmers et al. 2023, arXiv:2305.14314, appendix E.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)


def save_nf4(checkpoint: Path, folder: Path, *, group: int = 64) -> dict[str, Tensor]:
    """Save a Llama in nf4, as bitsandbytes does without a second quantization.

    Returns:
        The floats that the codes stand for, by name.
    """
    import torch

    entries = torch.tensor(_NF4)

    def parts_of(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        blocks = weight.reshape(-1, group)
        largest = blocks.abs().amax(1, keepdim=True)
        codes = ((blocks / largest)[..., None] - entries).abs().argmin(-1)
        pairs = codes.reshape(-1, 2)
        state = {
            "quant_type": "nf4",
            "blocksize": group,
            "dtype": "float32",
            "shape": [*weight.shape],
        }
        parts = {
            ".weight": (pairs[:, :1] * 16 + pairs[:, 1:]).to(torch.uint8),
            ".weight.absmax": largest.flatten(),
            ".weight.quant_map": entries.clone(),
            ".weight.quant_state.bitsandbytes__nf4": torch.tensor(
                [*json.dumps(state).encode()], dtype=torch.uint8
            ),
        }
        return parts, (entries[codes] * largest).view_as(weight)

    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
    }
    return _save_codes(checkpoint, folder, config, parts_of)


def _save_codes(
    checkpoint: Path,
    folder: Path,
    quantization: dict[str, object],
    parts_of: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]],
) -> dict[str, Tensor]:
    """Save a checkpoint whose linear layers are codes; return the floats that these stand for.

    Args:
        parts_of: returns the tensors of a weight `[out, in]` by the ends of their names, and its floats.
    """
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    by_input = config["model_type"] == "gpt2"
    tensors, floats = load_file(folder / _WEIGHTS), {}
    ends = ("_attn.weight", "_proj.weight", "_fc.weight")
    for name in [each for each in tensors if each.endswith(ends)]:
        stored, layer = tensors.pop(name).float(), name.removesuffix(".weight")
        parts, values = parts_of(stored.t() if by_input else stored)
        floats[name] = (values.t() if by_input else values).contiguous()
        tensors |= {f"{layer}{end}": part.contiguous() for end, part in parts.items()}
    save_file(tensors, folder / _WEIGHTS)
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return floats


def _words(codes: Tensor, bits: int) -> Tensor:
    """Return codes `[a, b]` in words of 32 bits, the first in the lowest bits, `[a · bits / 32, b]`."""
    import torch

    shifts = torch.arange(0, 32, bits)
    of_words = codes.long().reshape(-1, len(shifts), codes.shape[1])
    words = (of_words << shifts[:, None]).sum(1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


# Logit of tokens that no answer has.
_NEVER = -100.0


def save_random_translator(shape: GeneratorShape, folder: Path) -> None:
    """Save a MarianMTModel with random weights, and a tokenizer whose words are numbers.

    Its answers never end: the bias of the end token is too low. Tokens 0 and 1 end and pad.
    """
    end, pad = 0, 1
    model = random_model(
        "MarianMTModel",
        "MarianConfig",
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.positions,
        d_model=shape.hidden,
        encoder_layers=shape.layers,
        decoder_layers=shape.layers,
        encoder_attention_heads=shape.heads,
        decoder_attention_heads=shape.heads,
        encoder_ffn_dim=shape.features,
        decoder_ffn_dim=shape.features,
        activation_function="swish",
        scale_embedding=True,
        pad_token_id=pad,
        eos_token_id=end,
        decoder_start_token_id=pad,
        forced_eos_token_id=None,
    )
    model.final_logits_bias[0, [end, pad]] = _NEVER
    # at the usual scale, answers are the same for most sources
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and "positions" not in name:
            weight.data *= 6 if "layers" in name else 2
    model.save_pretrained(folder)
    words = ["</s>", "<pad>", *map(str, range(2, shape.vocabulary))]
    save_word_tokenizer(words, folder)


def save_word_tokenizer(words: list[str], folder: Path) -> None:
    """Save the tokenizer of a translator.

    Args:
        words: the vocabulary, with "</s>" and "<pad>".
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    ids = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    save_tokenizer(tokenizer, folder, special)


def save_tokenizer(tokenizer: Tokenizer, folder: Path, special: dict[str, str]) -> None:
    """Save a tokenizer and its special tokens, by the names of their uses."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
