"""Checks of a GPT-2 checkpoint: fields of config.json, names and shapes of tensors.

Source of the names: GPT-2 as saved by Hugging Face transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from varlen.models.checkpoint import decoder_fields
from varlen.models.checkpoint.config_fields import FieldRules
from varlen.models.checkpoint.config_file import (
    ACTIVATIONS,
    Json,
    check_multiple,
    read_choice,
    read_flag,
    read_int,
    read_layers,
    read_norm_eps,
)
from varlen.models.checkpoint.family import Family, ModelSizes
from varlen.models.checkpoint.weights import CheckpointWeights, TensorHeader, check_shapes
from varlen.tasks import Task
from varlen_kernels import Activation

# Fields that this version reads.
READ_FIELDS = decoder_fields.READ_FIELDS | frozenset(
    "activation_function layer_norm_epsilon n_embd n_head n_inner n_layer n_positions".split()
)
# Fields that are served with one value, which is what transformers assumes where they are absent.
FIXED_FIELDS: Mapping[str, object] = {
    **decoder_fields.FIXED_FIELDS,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
}
# Fields that transformers reads, and that change no logit and no hidden state.
HARMLESS_FIELDS = decoder_fields.HARMLESS_FIELDS | frozenset(
    # training
    "attn_pdrop embd_pdrop resid_pdrop"
    # a head for several choices
    " summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj"
    # another order of the same operations
    " reorder_and_upcast_attn".split()
)


@dataclass(frozen=True, slots=True)
class Gpt2Config:
    """The fields of config.json that shape the model."""

    vocab_size: int
    positions: int
    hidden: int
    inner: int
    num_heads: int
    num_layers: int
    activation: Activation
    norm_eps: float
    has_tied_output: bool

    @classmethod
    def read(cls, config: Json) -> "Gpt2Config":
        """Return the fields; raise CheckpointError for a configuration that is not served."""
        hidden, num_heads = read_int(config, "n_embd"), read_int(config, "n_head")
        check_multiple(config, "n_embd", "n_head")
        has_inner = config.get("n_inner") is not None
        return cls(
            vocab_size=read_int(config, "vocab_size"),
            positions=read_int(config, "n_positions"),
            hidden=hidden,
            inner=read_int(config, "n_inner") if has_inner else 4 * hidden,
            num_heads=num_heads,
            num_layers=read_layers(config, "n_layer", lowest=0),
            activation=read_choice(config, "activation_function", ACTIVATIONS, default="gelu_new"),
            norm_eps=read_norm_eps(config, "layer_norm_epsilon", default=1e-5),
            has_tied_output=read_flag(config, "tie_word_embeddings", default=True),
        )


def prefix_of(tensors: Mapping[str, TensorHeader] | CheckpointWeights) -> str:
    """Return the prefix of the decoder's tensor names; models with a head may have one."""
    return "transformer." if "transformer.wte.weight" in tensors else ""


def tensor_shapes(
    config: Gpt2Config, prefix: str, *, has_output: bool
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors that loading reads, by name.

    Args:
        config: of the checkpoint.
        prefix: of the tensor names.
        has_output: whether the output layer has a matrix of its own.
    """
    hidden, inner = config.hidden, config.inner
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}wte.weight": (config.vocab_size, hidden),
        f"{prefix}wpe.weight": (config.positions, hidden),
    }

    def add(name: str, *weight: int) -> None:
        shapes[f"{prefix}{name}.weight"], shapes[f"{prefix}{name}.bias"] = weight, weight[-1:]

    for index in range(config.num_layers):
        add(f"h.{index}.ln_1", hidden)
        add(f"h.{index}.attn.c_attn", hidden, 3 * hidden)
        add(f"h.{index}.attn.c_proj", hidden, hidden)
        add(f"h.{index}.ln_2", hidden)
        add(f"h.{index}.mlp.c_fc", hidden, inner)
        add(f"h.{index}.mlp.c_proj", inner, hidden)
    add("ln_f", hidden)
    if has_output:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _read_sizes(config: Json) -> ModelSizes:
    sizes = Gpt2Config.read(config)
    return ModelSizes(sizes.hidden, sizes.positions)


def _check_tensors(
    headers: Mapping[str, TensorHeader],
    config: Json,
    architecture: str,
    task: Task,  # noqa: ARG001  # every task reads the same tensors
) -> None:
    sizes = Gpt2Config.read(config)
    has_output = architecture == "GPT2LMHeadModel" and not sizes.has_tied_output
    expected = tensor_shapes(sizes, prefix_of(headers), has_output=has_output)
    check_shapes(headers, expected, _is_harmless)


def _is_harmless(name: str) -> bool:
    # the causal mask of old releases; a copy of the table where the output is tied to it
    return name.endswith((".attn.bias", ".attn.masked_bias")) or name == "lm_head.weight"


FAMILY = Family(
    architectures={"GPT2LMHeadModel": "generate", "GPT2Model": "embed"},
    heads={"generate": "GPT2LMHeadModel"},
    fields=FieldRules(READ_FIELDS, HARMLESS_FIELDS, FIXED_FIELDS),
    read_sizes=_read_sizes,
    check_tensors=_check_tensors,
    tokenizer_class="GPT2Tokenizer",
    kind="decoder",
)
