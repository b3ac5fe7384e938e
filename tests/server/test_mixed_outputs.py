"""1,000 requests at once, with adapters, outputs, spans and lengths at random."""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest
import torch

from tests.adapters import save_adapter
from tests.backend.models.oracle import load_oracle
from tests.backend.models.test_long_documents import LONG, Recipe, spans_of
from tests.checkpoints import save_checkpoint
from tests.closeness import assert_close, encoder_roundings
from tests.m3_models import M3Recipe, check_output, save_m3
from varlen_client import Client
from varlen_tools.convert_pickle import convert

from .serving import add_model, load_all, running_server

CLIENTS = 16
LONGEST = 56
# Longest sequence of the model of documents, which reads longer ones in windows.
WINDOW = 48


class Served:
    """A model of several outputs, and the right ones for any token ids.

    Attributes:
        tasks: its own task, then the tasks of its further outputs.
        models: transformers' model without an adapter, whose name is empty, and with each one.
    """

    def __init__(self, folder, kind, tasks, adapters, **fields):
        save_checkpoint(folder, kind, **fields)
        self.folder, self.tasks, self.models = folder, tasks, {"": load_oracle(folder, kind)}
        for rank in range(1, adapters + 1):
            config = {"seed": rank, "r": rank, "target_modules": ["query", "value", "dense"]}
            if "Masked" in kind:
                config["target_modules"] = ["query", "key", "value"]
            made = save_adapter(folder, kind, f"a{rank}", lora_alpha=rank, **config)
            self.models[f"a{rank}"] = made.get_base_model()

    @torch.inference_mode()
    def expected(self, ids, adapter):
        """Return the right outputs of token ids by task."""
        found = self.models[adapter](input_ids=torch.tensor([ids]), output_hidden_states=True)
        hidden = found.hidden_states[-1][0]
        outputs = {"hidden": hidden, "embed": hidden.mean(0)}
        if "sparse_embed" in self.tasks:
            weights = torch.log1p(torch.relu(found.logits[0])).amax(0)
            terms = torch.nonzero(weights)[:, 0]
            outputs["sparse_embed"] = dict(
                zip(terms.tolist(), weights[terms].tolist(), strict=True)
            )
        if "classify" in self.tasks:
            outputs["classify"] = found.logits[0]
        return outputs


class ServedM3(Served):
    """A model with heads of bge-m3."""

    def __init__(self, folder, kind, tasks, adapters):
        super().__init__(folder, kind, tasks, adapters)
        save_m3(folder)
        self.recipe = M3Recipe(folder)
        if "sparse_embed" not in tasks:
            (folder / "sparse_linear.pt").unlink()
        convert(folder)

    def expected(self, ids, adapter):
        """Return the right outputs of token ids by task."""
        return self.recipe.of_ids(ids, self.models[adapter])


MODELS = {
    "m3": partial(
        ServedM3,
        kind="XLMRobertaModel",
        tasks=("embed", "sparse_embed", "token_embed", "hidden"),
        adapters=8,
    ),
    "late": partial(
        ServedM3, kind="BertModel", tasks=("embed", "token_embed", "hidden"), adapters=2
    ),
    "splade": partial(
        Served, kind="BertForMaskedLM", tasks=("sparse_embed", "embed", "hidden"), adapters=2
    ),
    "classifier": partial(
        Served,
        kind="BertForSequenceClassification",
        tasks=("classify", "hidden", "embed"),
        adapters=2,
        num_labels=3,
    ),
}


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """A model of one output that embeds spans."""
    folder = tmp_path_factory.mktemp("documents") / "model"
    return Served(folder, "BertModel", ("embed",), 2)


@pytest.fixture(scope="module")
def served(request, documents, tmp_path_factory):
    """A server, and the models that it serves by name."""
    folder = tmp_path_factory.mktemp("outputs")
    models = {name: MODELS[name](folder / name) for name in request.param}
    for name, model in models.items():
        own, *further = model.tasks
        settings = {"task": own, "outputs": ",".join(further)}
        # the workers of the first are processes
        settings |= {"threads": "2"} if name == "m3" else {}
        add_model(folder / "models", name, model.folder, **settings)
    settings = {"task": "embed", "max_sequence_tokens": str(WINDOW)}
    add_model(folder / "models", "documents", documents.folder, **settings)
    with running_server(folder / "models") as server:
        load_all(server, [*models, "documents"])
        yield server, models


def random_request(number, models):
    """Return model, adapter, rows of token ids, and tasks of a request."""
    chance = random.Random(number)
    # one model has half of the requests, so that batches mix more
    name = chance.choice([*models, *["m3"] * 2])
    model = models[name]
    adapter = chance.choice(["", *model.models])
    rows = [
        [chance.randrange(5, 60) for _ in range(int(LONGEST ** chance.random()))]
        for _ in range(chance.choice((1, 1, 1, 2, 5)))
    ]
    return name, adapter, rows, chance.sample(model.tasks, chance.randint(1, len(model.tasks)))


def random_document(number, model):
    """Return an adapter, a text, and options of its spans and windows."""
    chance = random.Random(number)
    text = LONG[: int(len(LONG) ** chance.uniform(0.5, 1))].rstrip()
    options = {
        "spans": spans_of(text, chance.choice((4, 20, 60))),
        "windows": True,
        "window_overlap": chance.choice((0, 12)),
    }
    return chance.choice([*model.models]), text, options


@pytest.mark.parametrize(
    "served, count",
    [(["m3"], 100), pytest.param(MODELS, 1000, marks=pytest.mark.full)],
    ids=["one model", "all models"],
    indirect=["served"],
)
def test_no_output_of_mixed_requests_is_wrong(served, documents, count):
    server, models = served
    with ExitStack() as stack:
        clients = {
            name: [
                stack.enter_context(Client(url, name)) for url in (server.grpc_url, server.http_url)
            ]
            for name in (*models, "documents")
        }

        def ask(number):
            if number % 5 == 0:
                adapter, text, options = random_document(number, documents)
                client = clients["documents"][number % 2]
                return client.embed([text], adapter=adapter or None, **options)
            name, adapter, rows, tasks = random_request(number, models)
            return clients[name][number % 2].outputs(rows, tasks, adapter=adapter or None)

        with ThreadPoolExecutor(CLIENTS) as threads:
            answers = list(threads.map(ask, range(count)))

    recipe = Recipe("BertModel", documents.folder)
    for number, found in enumerate(answers):
        if number % 5 == 0:
            adapter, text, options = random_document(number, documents)
            recipe.model = documents.models[adapter]
            expected = recipe.long_chunks(text, options["spans"], WINDOW, options["window_overlap"])
            roundings = 4 * encoder_roundings(documents.folder)
            assert_close(found, expected, roundings=roundings)
            continue
        name, adapter, rows, tasks = random_request(number, models)
        assert len(found) == len(rows)
        roundings = 4 * encoder_roundings(models[name].folder)
        for row, outputs in zip(rows, found, strict=True):
            expected = models[name].expected(row, adapter)
            assert list(outputs) == tasks
            for task, output in outputs.items():
                check_output(task, output, expected[task], roundings)
