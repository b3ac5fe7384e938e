"""Perplexities of a small model in every form, and blocks of GGUF files."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from varlen_bench import perplexity
from varlen_bench.peers import trained
from varlen_bench.peers.checkpoints import LlamaShape
from varlen_bench.peers.gguf_files import quantized

from .conftest import read_csv

gguf = pytest.importorskip("gguf")

pytestmark = pytest.mark.full

# A row is a block of 256.
SHAPE = LlamaShape("target", 256, 1, 4, key_heads=2, features=256, positions=128, vocabulary=512)


@pytest.mark.parametrize(
    ("kind", "size", "levels"),
    [("Q8_0", 32, 254), ("Q6_K", 16, 62), ("Q5_K", 32, 31), ("Q4_K", 32, 15)],
)
def test_blocks_are_the_nearest_codes(kind, size, levels):
    weight = np.random.default_rng(0).standard_normal((6, 512)).astype(np.float32)
    weight[1, :256] *= 100

    found = gguf.quants.dequantize(quantized(weight, kind), gguf.GGMLQuantizationType[kind])

    # of groups with one scale
    groups, error = (each.reshape(6, -1, size) for each in (weight, np.abs(found - weight)))
    spread = 2 * np.abs(groups).max(2) if levels in {254, 62} else np.ptp(groups, axis=2)
    # half a code; scales of 6 bits, or of 8, and minima are rounded too
    rounding = np.abs(weight).reshape(6, -1, 256).max(2).repeat(256 // size, axis=1) / 63
    assert (error.max(2) <= spread / levels / 2 + 2 * rounding).all()
    assert error.max() > 0


def test_every_form_has_the_perplexity_of_its_floats(tmp_path, monkeypatch):
    monkeypatch.setattr(trained, "TARGET", SHAPE)
    monkeypatch.setattr(trained, "DRAFT", SHAPE)
    monkeypatch.setattr(trained, "_STEPS", {"target": 3})
    (text,) = trained.library_files(held_out=True)[:1]
    for module in (trained, perplexity):
        monkeypatch.setattr(module, "library_files", lambda *, held_out: [text])
    output = tmp_path / "perplexity.csv"
    arguments = ["--quick", "--models", "llama-trained", "--pair", str(tmp_path)]

    done = CliRunner().invoke(perplexity.app, [*arguments, "--output", str(output)])

    assert done.exit_code == 0, done.output
    rows = read_csv(output)
    forms = [row["form"] for row in rows[::3]]
    assert forms == ["floats", "gptq", "gptq", "gptq", "nf4", "Q8_0", "Q6_K", "Q5_K", "Q4_K"]
    for theirs, ours, rounded in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        exact = float(theirs["perplexity"])
        # `fetch` rounds what a GGUF file stands for to bf16
        in_fp32 = 1e-5 if theirs["form"] in {"floats", "gptq", "nf4"} else 1e-2
        assert float(ours["perplexity"]) == pytest.approx(exact, rel=in_fp32)
        assert float(rounded["perplexity"]) == pytest.approx(exact, rel=1e-2)
    # codes are there, and not the floats
    config = json.loads((tmp_path / "target/config.json").read_text())
    assert "quantization_config" not in config
    assert len({row["perplexity"] for row in rows[::3]}) == len(forms)
