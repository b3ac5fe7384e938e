"""Adapters that peft makes of small random checkpoints."""

import os
from collections.abc import Sequence
from pathlib import Path

import peft
import torch
from safetensors.torch import load_file, save_file

from tests.backend.models.oracle import load_oracle

WEIGHTS = "adapter_model.safetensors"


def save_adapter(folder: Path, kind: str, name: str, *, seed: int = 0, **config):
    """Save a random adapter beside a checkpoint, and return peft's model of both.

    Args:
        folder: folder of the checkpoint.
        kind: its class in transformers.
        name: name of the adapter.
        config: fields of `LoraConfig`.
    """
    torch.manual_seed(seed)
    fields = {"target_modules": "all-linear", "init_lora_weights": False, **config}
    model = peft.get_peft_model(load_oracle(folder, kind), peft.LoraConfig(**fields)).eval()
    with torch.no_grad():
        for parameter, values in model.named_parameters():
            if "modules_to_save" in parameter:
                values.normal_(std=0.3)
            elif "lora_" in parameter:
                # as large as the weights, so that each adapter changes the answers
                values.normal_(std=0.2)
    # its page of prose takes longer than all else
    model.create_or_update_model_card = lambda _: None
    model.save_pretrained(folder / "adapters" / name)
    return model


def save_scaled_adapters(folder: Path, kind: str, names: Sequence[str], **config):
    """Save adapters that differ by a factor; return what returns peft's models by name.

    Args:
        folder, kind, config: see `save_adapter`.
        names: their names.
    """
    first = save_adapter(folder, kind, names[0], **config)
    stored = load_file(folder / "adapters" / names[0] / WEIGHTS)
    fields = (folder / "adapters" / names[0] / "adapter_config.json").read_text()
    factors = {name: 1 - number / (2 * len(names)) for number, name in enumerate(names)}
    for name in names[1:]:
        copy = folder / "adapters" / name
        copy.mkdir()
        (copy / "adapter_config.json").write_text(fields)
        tensors = {
            key: each * factors[name] if "lora_B" in key else each for key, each in stored.items()
        }
        save_file(tensors, copy / WEIGHTS)

    def model_of(name):
        for module in first.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                module.set_scale("default", factors[name])
        return first

    return model_of


def overwrite(adapter: Path) -> None:
    """Write other weights into the file of an adapter, in place."""
    file = adapter / WEIGHTS
    content = bytearray(file.read_bytes())
    content[-64:] = bytes(64)
    with file.open("r+b") as opened:
        opened.write(content)
    # another time of its last change, however coarse the clock of the file system is
    os.utime(file, ns=(0, 0))
