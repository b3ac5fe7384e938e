"""A checkpoint folder in Hugging Face form."""

import json
from pathlib import Path

from safetensors.torch import save_file
from tokenizers import Tokenizer

from varlen_tools.train_demo.gpt2 import GPT2, Shape
from varlen_tools.train_demo.train import END_OF_TEXT

WEIGHTS = "model.safetensors"


def save_checkpoint(folder: Path, model: GPT2, shape: Shape, tokenizer: Tokenizer) -> None:
    """Write a GPT2LMHeadModel with its tokenizer; the weights come last, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None
    files = {
        "config.json": shape.config(end),
        "generation_config.json": {
            "_from_model_config": True,
            "bos_token_id": end,
            "eos_token_id": end,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "GPT2Tokenizer",
            "add_prefix_space": False,
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "unk_token": END_OF_TEXT,
            "model_max_length": shape.positions,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = {f"transformer.{name}": value for name, value in model.state_dict().items()}
    partial = folder / f"{WEIGHTS}.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.rename(folder / WEIGHTS)
