"""What a forward pass costs the host, measured on a tiny encoder: both ways run, and leave rows."""

import csv

import pytest

from varlen_tools import forward_cost
from varlen_tools.bench_kernels.grid import TINY


def test_measures_both_ways_of_running_a_forward_pass(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(forward_cost, "FULL", TINY)

    forward_cost.main(calls=2, output=tmp_path / "host.csv")

    with (tmp_path / "host.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["way"], row["calls"]) for row in rows] == [
        ("op by op", "2"),
        ("as one graph", "2"),
    ]
    # embedding and pooling, and eight ops a layer
    assert {int(row["ops"]) for row in rows} == {2 + 8 * TINY.encoders[0].layers}
    assert all(float(row["us"]) > 0 for row in rows)
    assert capsys.readouterr().out.count(" us (") == 2


def test_a_product_does_nothing():
    out = object()

    kernels = forward_cost.WithoutProducts()

    assert kernels.linear(1, 2, 3, out=out) is out
    assert callable(kernels.add_layer_norm)
    with pytest.raises(AttributeError):
        kernels.nothing  # noqa: B018
