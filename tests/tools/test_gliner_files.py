"""`fetch` completes models of GLiNER as they are at the hub."""

import fnmatch
import json
import shutil
from types import SimpleNamespace

import huggingface_hub
import pytest
from tokenizers import Tokenizer

from tests.checkpoints import drop_field, set_fields
from tests.gliner2_models import save_gliner2
from tests.gliner_models import Gliner, publish, save_gliner, thresholds_of
from varlen import Encoder
from varlen.models.checkpoint_folder import Checkpoint
from varlen_tools.fetch import FetchError, fetch

from .commands import run_varlen

CONFIG = "gliner_config.json"
TEXT, LABELS = "the cat, sat on the river-bank at 5.", ["person name", "the river"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a model as the library saves it."""
    return save_gliner(tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture
def repository(tmp_path):
    return tmp_path / "served/models"


@pytest.fixture
def hub(saved, monkeypatch, tmp_path):
    """Publish the model at a hub of its own.

    `asked` are the names and revisions that it was asked for, `downloaded` the files.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    published, base = publish(saved, tmp_path / "hub")
    hub = SimpleNamespace(published=published, base=base, asked=[], downloaded=[])

    def model_info(model, *, revision):
        folder = tmp_path / "hub" / model
        if not folder.is_dir():
            raise OSError("offline")
        hub.asked.append((model, revision))
        names = [SimpleNamespace(rfilename=path.name) for path in folder.iterdir()]
        return SimpleNamespace(sha=f"commit-of-{folder.name}", siblings=names)

    def snapshot_download(model, *, revision, allow_patterns, local_dir):
        folder = tmp_path / "hub" / model
        assert revision == f"commit-of-{folder.name}"
        local_dir.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if any(fnmatch.fnmatchcase(path.name, each) for each in allow_patterns):
                hub.downloaded.append(f"{model}/{path.name}")
                shutil.copyfile(path, local_dir / path.name)

    monkeypatch.setattr(huggingface_hub, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return hub


def files_of(model):
    return {path.name for path in (model / "1").iterdir()}


def config_of(model):
    return json.loads((model / "1" / CONFIG).read_text())


def check_files(model, saved):
    """Compare the files of a fetched model with the files that the library saves."""
    Checkpoint.open(model / "1").check_task("extract")
    found, wanted = config_of(model), json.loads((saved / CONFIG).read_text())
    for name in ("class_token_index", "vocab_size"):
        assert found[name] == wanted[name]
    assert found["encoder_config"]["vocab_size"] == wanted["vocab_size"]
    made, original = (
        Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (model / "1", saved)
    )
    assert made.get_vocab() == original.get_vocab()


def check_answers(model, saved):
    """Compare the spans of a fetched model with the arithmetic of the library."""
    oracle = Gliner(saved)
    [threshold] = thresholds_of(oracle, [TEXT], LABELS, (0.8,))
    expected = oracle.entities(TEXT, LABELS, threshold=threshold)
    with Encoder.from_pretrained(model / "1", dtype="fp32", warmup_seconds=0) as encoder:
        [found] = encoder.extract([TEXT], LABELS, threshold=threshold)
    assert expected
    assert [(e.start, e.end, e.text, e.label) for e in found] == [e[:4] for e in expected]


def test_a_model_of_the_hub_is_fetched_with_one_command(saved, hub, repository):
    result = run_varlen("fetch", "org/gliner", "--repository", repository, "--convert-pickle")

    assert result.exit_code == 0, result.output
    model = repository / "gliner"
    assert files_of(model) == {
        *(CONFIG, "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    }
    assert [model for model, _ in hub.asked] == ["org/gliner", "org/base"]
    assert "org/base/model.safetensors" not in hub.downloaded
    assert "made of files of org/base@commit-of-base" in " ".join(result.stderr.split())
    assert not list(repository.parents[1].glob("cache/varlen/downloads/*/*"))
    check_files(model, saved)
    check_answers(model, saved)


def test_pickled_weights_need_the_option(hub, repository):
    with pytest.raises(FetchError, match="reads only tensors, with the option --convert-pickle$"):
        fetch("org/gliner@v1", repository=repository)

    assert not any(name.endswith(".bin") for name in hub.downloaded)
    assert not (repository / "gliner").exists()


def test_a_folder_needs_the_name_of_the_backbone(saved, hub, repository):
    source = str(hub.published)
    message = (
        "lacks tokenizer.json and encoder_config, which the library gliner reads from org/base; name it: varlen"
        f" fetch {source} --backbone org/base, or a folder"
    )
    with pytest.raises(FetchError, match=message):
        fetch(source, repository=repository, convert_pickles=True)
    assert hub.asked == []

    for backbone in ("org/base@main", str(hub.base)):
        model = fetch(
            source, repository=repository, backbone=backbone, convert_pickles=True, force=True
        )
        check_files(model, saved)
    assert hub.asked == [("org/base", "main")]
    # the source stays as it is
    assert {path.name for path in hub.published.iterdir()} == {CONFIG, "pytorch_model.bin"}


def test_a_hub_without_the_backbone_names_it_and_the_option(hub, repository):
    shutil.rmtree(hub.base)

    with pytest.raises(FetchError) as refusal:
        fetch("org/gliner", repository=repository, convert_pickles=True)

    assert str(refusal.value) == (
        "org/gliner lacks tokenizer.json and encoder_config, which the library gliner reads from org/base: there is no"
        " folder org/base, and the hub does not give it: offline; --backbone names another copy, a folder or a hub id"
    )
    assert not (repository / "gliner").exists()


def test_a_name_in_the_files_is_no_folder_of_this_machine(hub, repository):
    set_fields(hub.published, CONFIG, model_name=str(hub.base))

    with pytest.raises(FetchError, match="is no name of the hub; --backbone names another copy"):
        fetch("org/gliner", repository=repository, convert_pickles=True)


def test_ids_that_the_checkpoint_states_are_those_of_the_tokenizer(saved, hub, repository):
    wanted = json.loads((saved / CONFIG).read_text())
    ids = {name: wanted[name] for name in ("class_token_index", "vocab_size")}
    set_fields(hub.published, CONFIG, **ids)

    check_files(fetch("org/gliner", repository=repository, convert_pickles=True), saved)

    set_fields(hub.published, CONFIG, class_token_index=3)
    with pytest.raises(
        FetchError, match="class_token_index 3, and the tokenizer gives <<ENT>> the"
    ):
        fetch("org/gliner", repository=repository, convert_pickles=True, force=True)


def test_only_what_is_missing_is_read(saved, hub, repository):
    shutil.copyfile(saved / "tokenizer.json", hub.published / "tokenizer.json")

    check_files(fetch("org/gliner", repository=repository, convert_pickles=True), saved)

    own = str(shutil.copytree(saved, hub.published.parent / "own"))
    drop_field(hub.published.parent / "own", CONFIG, "class_token_index")
    hub.asked.clear()
    check_files(fetch(own, repository=repository), saved)
    assert hub.asked == []
    with pytest.raises(FetchError, match="lacks no files of a backbone; leave --backbone out"):
        fetch(own, repository=repository, backbone="org/base", force=True)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"labels_decoder": "org/gpt"}, 'labels_decoder "org/gpt", a decoder that generates'),
        ({"model_name": 7}, "model_name 7; allowed: a text"),
        ({"class_token_index": "x"}, "class_token_index 'x'; allowed: whole numbers from -1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_served_is_refused(hub, repository, fields, message):
    set_fields(hub.published, CONFIG, **fields)

    with pytest.raises(FetchError, match=message):
        fetch("org/gliner", repository=repository, convert_pickles=True)


def test_a_damaged_backbone_is_refused(hub, repository):
    drop_field(hub.base, "config.json", "model_type")

    with pytest.raises(FetchError, match=r"config.json of org/base@commit-of-base has no model_t"):
        fetch("org/gliner", repository=repository, convert_pickles=True)


def test_a_backbone_that_is_no_name_is_refused_before_anything_is_asked(hub, repository):
    with pytest.raises(FetchError, match="the backbone './no/such' is no folder and no name"):
        fetch("org/gliner", repository=repository, backbone="./no/such")
    assert hub.asked == []


def test_a_model_of_gliner2_is_fetched_whole(tmp_path, repository):
    source = save_gliner2(tmp_path / "gliner2")

    model = fetch(str(source), repository=repository)

    found, saved = (Checkpoint.open(each) for each in (model / "1", source))
    assert found.task == "extract"
    assert (found.config, found.extraction) == (saved.config, saved.extraction)


@pytest.fixture
def bi_encoder(saved, hub, tmp_path):
    """Publish a bi-encoder in place of the model; return it as the library saves it."""
    own = save_gliner(tmp_path / "bi", labels_kind="BertModel", seed=1)
    shutil.rmtree(tmp_path / "hub")
    publish(own, tmp_path / "hub")
    return own


def test_a_bi_encoder_of_the_hub_gets_the_tokenizer_and_the_configuration_of_labels(
    bi_encoder, hub, repository
):
    model = fetch("org/gliner", repository=repository, convert_pickles=True)

    assert [model for model, _ in hub.asked] == ["org/gliner", "org/base", "org/labels"]
    found, wanted = config_of(model), json.loads((bi_encoder / CONFIG).read_text())
    # the library adds no tokens
    assert found["encoder_config"]["vocab_size"] == wanted["encoder_config"]["vocab_size"]
    assert found["labels_encoder_config"] == wanted["labels_encoder_config"]
    for name in ("tokenizer.json", "labels_tokenizer/tokenizer.json"):
        made, original = (
            Tokenizer.from_file(str(folder / name)) for folder in (model / "1", bi_encoder)
        )
        assert made.get_vocab() == original.get_vocab()
    check_answers(model, bi_encoder)


def test_a_folder_of_a_bi_encoder_needs_the_tokenizer_of_labels(bi_encoder, hub, repository):
    model = fetch(str(bi_encoder), repository=repository)
    assert Checkpoint.open(model / "1").extraction == Checkpoint.open(bi_encoder).extraction

    shutil.rmtree(bi_encoder / "labels_tokenizer")
    with pytest.raises(FetchError, match="lacks labels_tokenizer/tokenizer.json, which the"):
        fetch(str(bi_encoder), repository=repository, force=True)
