"""A GGUF file becomes a checkpoint of transformers: equal fields, tensors and token ids."""

import json
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import sentencepiece
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.checkpoints import WEIGHTS, save_checkpoint, set_fields
from varlen.errors import CheckpointError
from varlen.models.checkpoint_folder import Checkpoint
from varlen_tools import gguf_checkpoint
from varlen_tools.fetch import FetchError, fetch
from varlen_tools.gguf_checkpoint import _PATTERNS, GgufFile, convert_gguf
from varlen_tools.sample_texts import TEXTS

from .commands import run_varlen
from .gguf_files import save_gguf

gguf = pytest.importorskip("gguf")

FULL = pytest.mark.full
IDS = torch.arange(1, 60)[None]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
ROTARY = {"rope_theta": 500_000.0}
LONGROPE = {
    "original_max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.05, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        "long_factor": [1.5, 9.0, 30.0, 31.0, 32.0, 33.0, 34.0, 35.0],
    },
}
GEMMA3 = {"sliding_window": 7, "query_pre_attn_scalar": 16, "num_hidden_layers": 7}
# Class, fields, and metadata that only this model has.
MODELS = {
    "llama": ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "default", **ROTARY}}, {}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "tie_word_embeddings": True}, {}),
    "llama-linear": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **ROTARY}},
        {},
    ),
    "qwen2": ("Qwen2ForCausalLM", {}, {}),
    "qwen2-yarn": (
        "Qwen2ForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 160,
                **ROTARY,
            }
        },
        {},
    ),
    "qwen3": ("Qwen3ForCausalLM", {"tie_word_embeddings": True}, {}),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": 7}, {}),
    "phi3-partial": ("Phi3ForCausalLM", {"rope_parameters": {"partial_rotary_factor": 0.5}}, {}),
    "gemma": ("GemmaForCausalLM", {}, {}),
    "gemma2": ("Gemma2ForCausalLM", {"sliding_window": 7, "query_pre_attn_scalar": 16}, {}),
    "gemma3": ("Gemma3ForCausalLM", {**GEMMA3, "layer_types": None}, {}),
}


@pytest.fixture
def make(tmp_path):
    """Return a checkpoint, and the folder of the one that its GGUF file becomes."""

    def make(name, kind="F32", **more):
        of_class, fields, metadata = MODELS[name]
        folder = save_checkpoint(tmp_path / "original", of_class, **{**SIZES, **fields})
        path = save_gguf(folder, tmp_path / "m.gguf", kind=kind, **{**metadata, **more})
        return folder, converted(path)

    return make


def converted(path, report=print):
    into = path.parent / f"of-{path.stem}"
    into.mkdir()
    convert_gguf(path, into, report)
    # transformers' default is beyond a small vocabulary
    set_fields(into, "config.json", pad_token_id=0)
    return into


def logits_of(folder, dtype=torch.float32):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("llama", "qwen2-yarn", "gemma2") else pytest.param(name, marks=FULL)
        for name in MODELS
    ],
)
def test_answers_equal_those_of_the_checkpoint(make, name):
    original, made = make(name)

    checkpoint = Checkpoint.open(made)

    assert checkpoint.task == "generate"
    before, after = load_file(original / WEIGHTS), load_file(made / WEIGHTS)
    before.pop("lm_head.weight", None) if checkpoint.config["tie_word_embeddings"] else None
    assert before.keys() == after.keys()
    for each in before:
        # norms of Gemma are stored plus one, and rounded there: values are below 4
        torch.testing.assert_close(after[each], before[each], rtol=0, atol=2**-22)
    torch.testing.assert_close(logits_of(made), logits_of(original), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "F16", "BF16"])
def test_matrices_are_widened_and_norms_stay(make, kind):
    original, made = make("llama", kind)

    after = load_file(made / WEIGHTS)

    dtype = torch.float16 if kind == "F16" else torch.bfloat16
    matrix = "model.layers.1.mlp.up_proj.weight"
    assert (after[matrix].dtype, after["model.norm.weight"].dtype) == (dtype, torch.float32)
    values = load_file(original / WEIGHTS)[matrix].numpy()
    kind = gguf.GGMLQuantizationType[kind]
    stored = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
    assert torch.equal(after[matrix], torch.from_numpy(np.ascontiguousarray(stored)).to(dtype))


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
def test_weights_equal_transformers_own_reading(make, tmp_path, name):
    _, made = make(name, "Q8_0")

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf")

    expected = theirs.state_dict()
    for each, values in load_file(made / WEIGHTS).items():
        assert torch.equal(values, expected[each].to(values.dtype))


def test_factors_of_rotary_positions_are_those_of_llama3(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 40,
        "rope_theta": 100.0,
    }
    original = save_checkpoint(
        tmp_path / "original", "LlamaForCausalLM", **SIZES, rope_parameters=scaling
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(original)
    plain = 100.0 ** (-torch.arange(0, 16, 2) / 16)
    factors = plain / model.model.rotary_emb.inv_freq
    path = save_gguf(original, tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors.numpy()})

    made = converted(path)

    assert Checkpoint.open(made).position_limit == 320
    torch.testing.assert_close(logits_of(made), logits_of(original), rtol=1e-4, atol=1e-4)


def test_factors_of_phi3_are_longrope(tmp_path):
    original = save_checkpoint(tmp_path / "original", "Phi3ForCausalLM", **SIZES, **LONGROPE)
    model = transformers.AutoModelForCausalLM.from_pretrained(original)
    names = {"short": "short_factor", "long": "long_factor"}
    tensors = {
        f"rope_factors_{name}.weight": np.array(LONGROPE["rope_parameters"][each], np.float32)
        for name, each in names.items()
    }
    attention = float(model.model.rotary_emb.attention_scaling)
    more = {
        "phi3.rope.scaling.original_context_length": 128,
        "phi3.rope.scaling.attn_factor": attention,
    }
    made = converted(save_gguf(original, tmp_path / "m.gguf", tensors=tensors, **more))

    assert Checkpoint.open(made).position_limit == 128
    torch.testing.assert_close(logits_of(made), logits_of(original), rtol=1e-4, atol=1e-4)


def tokenizer_of(architecture="llama", **rules):
    """Return the tokenizer of metadata, whose names begin with `tokenizer.ggml`."""
    metadata = {f"tokenizer.ggml.{name}": value for name, value in rules.items()}
    metadata["general.architecture"] = architecture
    return gguf_checkpoint._read_tokenizer(GgufFile("m.gguf", metadata, {}))


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2", "smollm"])
def test_byte_pairs_split_texts_as_the_original(pre):
    pattern = _PATTERNS[pre]
    original = Tokenizer(models.BPE())
    split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("gpt-2", "smollm"))
    original.pre_tokenizer = pre_tokenizers.Sequence([*split, last])
    original.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<|eot|>"], initial_alphabet=alphabet, show_progress=False
    )
    original.train_from_iterator(TEXTS, trainer)
    ids = original.get_vocab()
    merges = json.loads(original.to_str())["model"]["merges"]

    made = tokenizer_of(
        model="gpt2",
        pre=pre,
        tokens=sorted(ids, key=ids.__getitem__),
        token_type=[3, *[1] * (len(ids) - 1)],
        merges=[" ".join(each) for each in merges],
        eos_token_id=0,
        add_bos_token=False,
    )

    for each in (*TEXTS, "12345 it's<|eot|>  x"):
        assert made.encode(each).ids == original.encode(each).ids
        assert made.decode(made.encode(each).ids) == original.decode(original.encode(each).ids)


@pytest.mark.parametrize("adds_space", [True, False])
def test_pieces_split_texts_as_sentencepiece(tmp_path, adds_space):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(tmp_path / "m"),
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=adds_space,
        minloglevel=2,
    )
    original = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    count = original.get_piece_size()
    kinds = [
        2
        if original.is_unknown(i)
        else 3
        if original.is_control(i)
        else 6
        if original.is_byte(i)
        else 1
        for i in range(count)
    ]

    made = tokenizer_of(
        model="llama",
        tokens=[original.id_to_piece(i) for i in range(count)],
        scores=[original.get_score(i) for i in range(count)],
        token_type=kinds,
        bos_token_id=1,
        eos_token_id=2,
        add_space_prefix=adds_space,
    )

    for each in TEXTS:
        ids = original.encode(each)
        assert made.encode(each).ids == [1, *ids]
        assert made.decode(ids) == original.decode(ids)


def test_user_tokens_stand_whole_and_the_ends_are_as_stated():
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "▁a", "  ", "<tool>"]
    made = tokenizer_of(
        model="llama",
        tokens=tokens,
        scores=[0.0, 0.0, 0.0, -3.0, -2.0, -1.0, 0.0, 0.0],
        token_type=[2, 3, 3, 1, 1, 1, 4, 4],
        bos_token_id=1,
        eos_token_id=2,
        add_eos_token=True,
        add_space_prefix=False,
    )

    encoded = made.encode("a a  a<tool></s>").tokens

    assert encoded == ["<s>", "a", "▁a", "  ", "a", "<tool>", "</s>", "</s>"]


@pytest.mark.parametrize("pre, added", [("llama-bpe", [0]), ("dbrx", []), ("qwen2", [])])
def test_only_llama3_begins_a_text_where_the_file_does_not_say_it(pre, added):
    tokens = ["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    kinds = [3, *[1] * 256]
    made = tokenizer_of(
        model="gpt2", pre=pre, tokens=tokens, token_type=kinds, merges=[], bos_token_id=0
    )

    assert made.encode("a").ids == [*added, tokens.index("a")]


def test_template_and_ends_of_answers_are_kept(make):
    _, made = make("llama", **{"tokenizer.chat_template": "{{ messages[0].content }}"})

    checkpoint = Checkpoint.open(made)

    assert checkpoint.chat_template is not None
    assert json.loads((made / "generation_config.json").read_text()) == {"eos_token_id": [0]}
    assert checkpoint.special_tokens["eos_token"] == "<|endoftext|>"


REFUSED = {
    "architecture": ({"general.architecture": "mamba"}, "has the architecture mamba, not one of"),
    "split": ({"split.count": 3}, "is one of 3 files; join them: llama-gguf-split"),
    "experts": ({"llama.expert_count": 8}, "has experts, or vectors for its answers; take the"),
    "vectors": ({"llama.pooling_type": 3}, "has experts, or vectors for its answers"),
    "values": ({"llama.attention.value_length": 8}, "has keys and values of different sizes"),
    "scaling": ({"llama.rope.scaling.type": "su"}, "has scaled positions of the type su"),
    "heads": ({"llama.attention.head_count": 5}, "has damaged metadata (cannot reshape"),
    "rules": (
        {"tokenizer.ggml.pre": "viking"},
        "has a tokenizer gpt2 with the rules viking; allowed",
    ),
    "kind": ({"tokenizer.ggml.model": "t5"}, "has a tokenizer t5 with"),
}


@pytest.mark.parametrize("fields, message", REFUSED.values(), ids=REFUSED)
def test_what_is_not_served_is_named(tmp_path, fields, message):
    folder = save_checkpoint(tmp_path / "original", "LlamaForCausalLM", **SIZES)
    path = save_gguf(folder, tmp_path / "m.gguf", **fields)

    with pytest.raises(CheckpointError) as error:
        converted(path)

    assert message in str(error.value)
    assert not [*(tmp_path / "of-m").iterdir()]


def test_a_file_without_room_on_the_disk_is_not_written(make, monkeypatch):
    monkeypatch.setattr(gguf_checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))

    with pytest.raises(CheckpointError, match=r"has 0\.0 MB free; needed are 0\.\d MB"):
        make("llama")


@pytest.fixture
def small(tmp_path):
    """A GGUF file in a folder of its own."""
    folder = save_checkpoint(tmp_path / "original", "LlamaForCausalLM", **SIZES)
    (tmp_path / "Tiny-GGUF").mkdir()
    return save_gguf(folder, tmp_path / "Tiny-GGUF/Tiny-Q8_0.gguf", kind="Q8_0")


@pytest.mark.parametrize(
    "is_folder", [False, pytest.param(True, marks=FULL)], ids=["file", "folder"]
)
def test_fetch_makes_a_model_of_a_file_and_says_what_it_found(small, tmp_path, is_folder):
    source = small.parent if is_folder else small
    (small.parent / "mmproj-f16.gguf").write_bytes(b"of images")

    result = run_varlen("fetch", source, "--repository", tmp_path / "models")

    assert result.exit_code == 0, result.output
    name = "tiny-gguf" if is_folder else "tiny-q8_0"
    files = {each.name for each in (tmp_path / "models" / name / "1").iterdir()}
    assert files == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (
        "Tiny-Q8_0.gguf: llama, F32, Q8_0, 8.6 bits a weight; its checkpoint has 0."
        in result.output
    )
    assert "made of Tiny-Q8_0.gguf" in result.output


def test_one_of_several_files_is_to_be_named(small, tmp_path):
    (small.parent / "Tiny-Q4_K_M.gguf").write_bytes(small.read_bytes())

    with pytest.raises(FetchError) as error:
        fetch(str(small.parent), repository=tmp_path / "models")

    assert "has 2 GGUF files; give one, as FOLDER/FILE.gguf or org/name:PART" in str(error.value)
    assert "It has Tiny-Q4_K_M.gguf, Tiny-Q8_0.gguf" in str(error.value)


@pytest.fixture
def hub(small, monkeypatch, tmp_path):
    """The names that are downloaded from a hub with two GGUF files and other weights."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = ["README.md", "model.safetensors", "Tiny-Q4_K_M.gguf", small.name]
    listed = [SimpleNamespace(rfilename=name) for name in names]
    asked = []

    def download(model, *, allow_patterns, local_dir, **_):
        asked.extend(allow_patterns)
        local_dir.mkdir(parents=True)
        (local_dir / small.name).write_bytes(small.read_bytes())

    monkeypatch.setattr(
        huggingface_hub, "model_info", lambda *_, **__: SimpleNamespace(sha="feed", siblings=listed)
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def test_a_part_of_the_name_chooses_a_file_of_the_hub(hub, small, tmp_path):
    target = fetch("someone/Tiny-GGUF@main:q8_0", repository=tmp_path / "models")

    assert hub == [small.name]
    assert target.name == "tiny-gguf"
    assert Checkpoint.open(target / "1").task == "generate"


@pytest.mark.parametrize("part, count", [("Q5", 0), ("Tiny", 2)])
def test_a_part_that_is_not_of_one_file_is_refused_before_a_download(hub, tmp_path, part, count):
    with pytest.raises(FetchError, match=f"has {count} GGUF files with {part} in the name; give"):
        fetch(f"someone/Tiny-GGUF:{part}", repository=tmp_path / "models")

    assert hub == []
