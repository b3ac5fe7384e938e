"""The fields of config.json that transformers reads, found and stored."""

from pathlib import Path

import pytest
import transformers

from tests.ci.scripts import load_script
from varlen.models import gemma
from varlen.models.checkpoint.config_fields import fields_read, is_unread, releases
from varlen.models.registry import ENCODERS_BY_NAME, FAMILIES

write_config_fields = load_script("write_config_fields")

RULES = {name: family.fields for name, family in FAMILIES.items()} | {
    "T5EncoderModel": ENCODERS_BY_NAME["T5EncoderModel"].fields
}
KNOWN = write_config_fields.KNOWN_FIELDS
# Fields that no release reads: fields of sentence-transformers, and fields that the families' first releases read.
OWN_FIELDS = frozenset(
    "sbert_ce_default_activation_function sentence_transformers add_final_layer_norm normalize_before"
    " normalize_embedding static_position_embeddings".split()
)
SOURCE = """
class ToyConfig(PreTrainedConfig):
    attribute_map = {"hidden_size": "d_model"}
    base_model_tp_plan = {"layers": "colwise"}
    base_model_pp_plan: dict[str, str] = {"norm": "rowwise"}
    width: int = 3

    def __init__(self, depth=2, **kwargs):
        self.height = kwargs.pop("old_height", depth)

    def write(self, path): ...

class ToyOnnxConfig:
    def inputs(self, axes): ...

class Toy:
    def __init__(self, config, other):
        self.size = config.size + self.config.shape + getattr(config, "scale", 1) + other.number
        self.kind = model.config.get("kind") or ("flag" in cfg) or config["entry"]

    def text_config(self, config):
        for name in ("decoder", "text_encoder"):
            getattr(config, name)
"""


def test_finds_what_code_reads_of_a_configuration(tmp_path):
    folder = tmp_path / "models" / "bert"
    folder.mkdir(parents=True)
    (folder / "modeling_bert.py").write_text(SOURCE)
    (folder / "modeling_tf_bert.py").write_text("config.only_tensorflow")
    (tmp_path / "modeling_utils.py").write_text("config.of_every_model")
    (tmp_path / "trainer.py").write_text("config.only_training")

    found = write_config_fields.fields_read(tmp_path)

    assert found["shared"] == {"of_every_model"}
    expected = "hidden_size d_model width self depth kwargs height old_height size shape scale kind flag entry"
    expected += " base_model_pp_plan"
    assert found["bert"] == {*expected.split(), "decoder", "text_encoder"}
    assert found["llama"] == set()


@pytest.mark.full
def test_the_file_holds_every_field_that_the_installed_release_reads():
    found = write_config_fields.fields_read(Path(transformers.__file__).parent)

    missing = {
        family: unknown
        for family, names in found.items()
        if (unknown := names - KNOWN - fields_read("shared") - fields_read(family))
    }
    assert not missing, f"run `{write_config_fields.COMMAND}`"
    assert found.keys() == {"shared", *FAMILIES}
    # a family whose folder has another name than its `model_type`
    assert [family for family in FAMILIES if not fields_read(family)] == []
    assert releases() == [write_config_fields.RELEASES[0], write_config_fields.RELEASES[-1]]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fields_of_the_configuration_class_are_read(family):
    """A check of the parsed sources by another way: the class as Python made it."""
    settings = transformers.AutoConfig.for_model(family)

    fields = settings.to_dict().keys() | settings.attribute_map.keys()

    assert not {name for name in fields - KNOWN if is_unread(name, family)}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_fields_that_no_release_reads_are_in_no_list(rules):
    named = {*rules.harmless, *rules.fixed} - OWN_FIELDS - KNOWN

    assert not {name for name in named if all(is_unread(name, family) for family in FAMILIES)}


@pytest.mark.parametrize(
    "rules", [*RULES.values(), gemma._PART_RULES], ids=[*RULES, "T5Gemma part"]
)
def test_the_file_leaves_out_only_fields_that_a_family_knows(rules):
    assert not {name for name in KNOWN if not (rules.know(name) or name in rules.fixed)}
