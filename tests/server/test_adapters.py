"""Adapters of requests on the real server, whose workers are processes."""

import random
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from openai import BadRequestError, NotFoundError, OpenAI

from tests.adapters import WEIGHTS, overwrite, save_adapter, save_scaled_adapters
from tests.backend.models.oracle import load_oracle
from tests.checkpoints import WORDS, save_checkpoint
from tests.closeness import assert_rows_close, encoder_roundings
from varlen_client import Client, InvalidRequest, ServerError
from varlen_client.gateway import GatewaySettings

from .local_gateway import local_gateway
from .serving import add_model, load, metrics, unload, wait_until


def check_metrics(server, names):
    """Each adapter has its requests, and its memory in the two workers."""

    def exported():
        page = metrics(server, "adapted")
        counts = (page[f"varlen_adapter_requests_total {name}"] for name in {*names} - {""})
        loads = (page[f"varlen_adapter_loads_total {name}"] for name in {*names} - {""})
        return sum(counts) >= len(names) - names.count("") and all(loads)

    # twice a second; the last load may come after the request that needed it
    wait_until(exported, "all requests and loads are on the page")
    found = metrics(server, "adapted")
    per_adapter = {key for key in found if key.startswith("varlen_adapter_")}
    assert {key.rpartition(" ")[2] for key in per_adapter} == {*names} - {""}
    for name in {*names} - {""}:
        assert found[f"varlen_adapter_requests_total {name}"] == names.count(name)
        loads = found[f"varlen_adapter_loads_total {name}"]
        assert 1 <= loads <= 2
        assert found[f"varlen_adapter_evictions_total {name}"] == 0
        size = found[f"varlen_adapter_resident_bytes {name}"] / loads
        # every adapter takes as much as one of the largest rank
        assert (
            size
            == found["varlen_adapter_resident_bytes a8"] / found["varlen_adapter_loads_total a8"]
        )
        assert size > 0


def check_gateway(server, client):
    """OpenAI's client names adapters as the list of models does, and gets their vectors."""
    texts = ["the cat", "a river"]
    assert client.adapters()["a3"] == ""
    assert "use_dora" in client.adapters()["dora"]
    with (
        local_gateway(GatewaySettings(url=server.grpc_url)) as address,
        OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as openai,
    ):
        listed = {each.id: each for each in openai.models.list()}
        assert {"adapted", "adapted:a3"} <= listed.keys()
        assert "adapted:dora" not in listed
        assert openai.models.retrieve("adapted:a3").parent == "adapted"

        def vectors(model, **more):
            answer = openai.embeddings.create(model=model, input=texts, extra_body=more)
            return answer.model, np.array([each.embedding for each in answer.data])

        expected = client.embed(texts, adapter="a3")
        for name, more in (("adapted:a3", {}), ("a3", {}), ("adapted", {"lora_path": "a3"})):
            model, found = vectors(name, **more)
            assert model == "adapted:a3"
            np.testing.assert_allclose(found, expected, atol=1e-6)
        assert np.abs(vectors("adapted")[1] - expected).max() > 0.01
        with pytest.raises(NotFoundError, match="adapted:a1, adapted:a2"):
            vectors("adapted:other")
        with pytest.raises(BadRequestError, match="damaged, or not served.*use_dora"):
            vectors("adapted:dora")


@pytest.mark.full
def test_requests_of_many_adapters_share_the_batches_of_worker_processes(
    server, repository, tmp_path
):
    folder = save_checkpoint(tmp_path, "BertModel", words=WORDS)
    models = {"": load_oracle(folder)}
    for rank in range(1, 9):
        name = f"a{rank}"
        models[name] = save_adapter(folder, "BertModel", name, seed=rank, r=rank, lora_alpha=rank)
    save_adapter(folder, "BertModel", "dora", use_dora=True)
    add_model(repository, "adapted", folder, task="embed", outputs="hidden", threads="2")
    numbers = np.random.default_rng(0)
    names = [random.Random(place).choice([*models]) for place in range(200)]
    rows = [numbers.integers(5, 60, length) for length in numbers.integers(1, 40, 200)]
    try:
        assert load(server, "adapted") is None
        with Client(server.grpc_url, "adapted") as client:

            def ask(name, row):
                return client.hidden([row.tolist()], adapter=name or None)[0]

            with ThreadPoolExecutor(16) as pool:
                found = list(pool.map(ask, names, rows))
            with pytest.raises(InvalidRequest, match="adapter is other; allowed: a1, a2"):
                ask("other", rows[0])
            check_metrics(server, names)
            check_gateway(server, client)
    finally:
        unload(server, "adapted")
    with torch.inference_mode():
        expected = [
            models[name](input_ids=torch.from_numpy(row)[None]).last_hidden_state[0]
            for name, row in zip(names, rows, strict=True)
        ]
    assert_rows_close(found, expected, roundings=4 * encoder_roundings(folder))


@pytest.mark.full
def test_200_adapters_take_turns_under_load_and_damaged_ones_harm_no_other(
    server, repository, tmp_path
):
    """None is wrong or lost; one is damaged before the load, one under load."""
    folder = save_checkpoint(tmp_path, "BertModel", words=WORDS)
    every = [f"a{number:03}" for number in range(200)]
    fields = {"r": 2, "lora_alpha": 8, "target_modules": ["query", "dense"]}
    model_of = save_scaled_adapters(folder, "BertModel", every, **fields)
    cut = folder / "adapters/cut"
    shutil.copytree(folder / "adapters/a000", cut)
    (cut / WEIGHTS).write_bytes((cut / WEIGHTS).read_bytes()[:-100])
    changed = "a007"
    numbers = np.random.default_rng(0)
    names = [random.Random(place).choice(every) for place in range(1000)]
    names[500::25] = [changed] * len(names[500::25])
    rows = [numbers.integers(5, 60, length) for length in numbers.integers(1, 40, len(names))]
    settings = {"task": "hidden", "threads": "2", "adapter_bytes": "1000000"}
    add_model(repository, "many", folder, **settings)
    try:
        assert load(server, "many") is None
        with Client(server.grpc_url, "many") as client:

            def ask(place):
                if place == 500:
                    overwrite(folder / "adapters" / changed)
                try:
                    return client.hidden([rows[place].tolist()], adapter=names[place])[0]
                except ServerError as error:
                    return str(error)

            with ThreadPoolExecutor(32) as pool:
                found = list(pool.map(ask, range(len(names))))
            with pytest.raises(InvalidRequest, match='"cut" is damaged.*not downloaded whole'):
                client.hidden([rows[0].tolist()], adapter="cut")
    finally:
        unload(server, "many")
    failed = {place for place, each in enumerate(found) if isinstance(each, str)}
    assert failed
    assert {names[place] for place in failed} == {changed}
    assert all("was changed after it was loaded" in found[place] for place in failed)
    right = [place for place in range(len(names)) if place not in failed]
    with torch.inference_mode():
        expected = [
            model_of(names[place])(input_ids=torch.from_numpy(rows[place])[None]).last_hidden_state[
                0
            ]
            for place in right
        ]
    roundings = 4 * encoder_roundings(folder)
    assert_rows_close([found[place] for place in right], expected, roundings=roundings)


@pytest.mark.full
def test_a_model_that_generates_goes_on_without_an_adapter_that_is_overwritten(
    server, repository, tmp_path
):
    folder = save_checkpoint(tmp_path, "Qwen2ForCausalLM")
    for seed, name in enumerate(("a", "b")):
        save_adapter(folder, "Qwen2ForCausalLM", name, seed=seed, r=4)
    add_model(repository, "writer_of_two", folder, task="generate", max_running_sequences="16")
    names = ["", "a", "b"] * 20
    numbers = np.random.default_rng(0)
    rows = [numbers.integers(5, 90, 12).tolist() for _ in range(20) for _ in range(3)]
    options = {"temperature": 0, "ignore_eos": True, "max_tokens": 12}
    try:
        assert load(server, "writer_of_two") is None
        with Client(server.grpc_url, "writer_of_two") as client:

            def ask(name, row):
                try:
                    return client.generate(row, adapter=name or None, **options).token_ids
                except ServerError as error:
                    return str(error)

            # before the first request that names it, so that it is not in memory
            overwrite(folder / "adapters/b")
            with ThreadPoolExecutor(16) as pool:
                found = list(pool.map(ask, names, rows))
            alone = [ask(names[place], rows[place]) for place in range(6)]
    finally:
        unload(server, "writer_of_two")
    for name, each in zip(names, found, strict=True):
        assert ("was changed after it was loaded" in each) if name == "b" else len(each) == 12
    # an answer is the same by itself and among others
    assert [each for each in alone if len(each) == 12] == [
        each for each in found[:6] if len(each) == 12
    ]
