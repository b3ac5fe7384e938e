"""The benchmark of adapters: figures, and a small run of the whole."""

from functools import partial

import pytest
from typer.testing import CliRunner

from varlen_bench import adapters
from varlen_bench.adapters import AdapterResult, AdaptersSubject, app
from varlen_bench.harness.rows import bench_line
from varlen_bench.peers.checkpoints import (
    EncoderShape,
    GeneratorShape,
    LlamaShape,
    save_random_decoder,
    save_random_translator,
)
from varlen_bench.workers.adapters import SYSTEMS

from .conftest import read_csv

pytestmark = pytest.mark.full

TINY_ENCODER = EncoderShape("tiny", hidden=16, layers=1, heads=2, features=32, vocabulary=300)
TINY_DECODER = LlamaShape("tiny", 16, 1, 2, 1, features=32, positions=64, vocabulary=300)
TINY_TRANSLATOR = GeneratorShape("tiny", hidden=16, layers=1, heads=2, positions=64, vocabulary=300)


def result(name, speeds, targets="all", agreement=None):
    made = AdapterResult(
        system=SYSTEMS[name], model="minilm", targets=targets, workload="embed", requests=4, work=8
    )
    made.rounds = [{"tokens_per_second": speed} for speed in speeds]
    made.agreement = agreement
    return made


def test_bench_figures_compare_with_the_model_alone_and_with_the_faster_form_of_peft():
    results = [
        result("varlen-base", [100.0, 110.0]),
        result("varlen-unused", [100.0, 110.0]),
        result("varlen-mixed", [90.0, 88.0], agreement=1.0),
        result("transformers-base", [50.0, 50.0]),
        result("peft-mixed", [10.0, 10.0]),
        result("peft-merged", [30.0, 22.0]),
    ]
    subject = AdaptersSubject()

    found = subject.figures(results)

    assert bench_line("adapters", found) == (
        "BENCH adapters: embed_all_vs_base=0.85 embed_all_unused_vs_base=1 embed_all_vs_peft=3.5"
        " embed_all_agreement=1"
    )
    rows = {row["system"]: row for row in subject.rows(results)}
    assert rows["peft-mixed"]["ratio_to_base"] == 0.2
    assert rows["varlen-base"]["agreement"] is None
    assert rows["varlen-mixed"]["precision"] == "fp32"


@pytest.mark.parametrize("model", ["minilm", "llama-6x768", "transformer-base"])
def test_a_small_run_measures_appends_and_ends_with_the_bench_line(
    tmp_path, monkeypatch, peers_in_process, model
):
    made = adapters._MODELS[model]
    save, shape = {
        "embed": (lambda shape, folder: adapters._save_encoder(folder, shape), TINY_ENCODER),
        "generate": (save_random_decoder, TINY_DECODER),
        "translate": (save_random_translator, TINY_TRANSLATOR),
    }[made.kind]
    tiny = adapters._Model(made.kind, partial(save, shape), 300, (3, 20), made.targets)
    monkeypatch.setitem(adapters._MODELS, model, tiny)
    output = tmp_path / "adapters.csv"
    arguments = ["--quick", "--models", model, "--threads", "1", "--output", str(output)]

    done = CliRunner().invoke(app, arguments)

    assert done.exit_code == 0, done.output
    assert done.output.strip().splitlines()[-1].startswith(f"BENCH adapters: {made.kind}_all_vs")
    rows = read_csv(output)
    assert [row["note"] for row in rows] == [""] * 12
    assert {row["targets"] for row in rows} == {"all", "q,v"}
    mixed = [row for row in rows if row["system"] in ("varlen-mixed", "peft-merged")]
    assert all(float(row["agreement"]) > 0.999 for row in mixed)
    assert str(tmp_path) not in output.read_text()
