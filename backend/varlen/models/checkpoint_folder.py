"""A Hugging Face checkpoint folder, read and checked without loading a weight.

Nothing in the folder is executed or unpickled. `fetch` and every load use the same checks, so
`fetch` accepts what the server loads.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

from varlen.config import RerankForm
from varlen.errors import CheckpointError
from varlen.models.blocks.extraction import load_extraction
from varlen.models.blocks.heads import load_masked_lm
from varlen.models.checkpoint.config_fields import (
    FIELDS,
    IgnoredFields,
    Quantization,
    check_ignored,
    check_known,
    check_unquantized,
    read_quantization,
    unread_fields,
    without,
)
from varlen.models.checkpoint.extraction import (
    LABELS_TOKENIZER,
    SCHEMA_MODEL,
    ExtractionConfig,
    LabelEncoderConfig,
    is_extraction,
    read_extraction,
    read_schema_model,
)
from varlen.models.checkpoint.family import (
    NO_LABELS,
    NOTHING,
    Family,
    HeadConfig,
    HeaderReader,
    Labels,
    MaskedLMLayout,
    ModelSizes,
    read_labels,
)
from varlen.models.checkpoint.files import Json, has_file, is_off, read_int, read_object
from varlen.models.checkpoint.first_releases import to_native
from varlen.models.checkpoint.folder_forms import check_is_folder, check_is_transformer
from varlen.models.checkpoint.generation_config import (
    TranslateSettings,
    check_generation,
    read_end_tokens,
    read_translate_settings,
)
from varlen.models.checkpoint.layers import LayerReader
from varlen.models.checkpoint.ranking import (
    PAIR_FORMS,
    STANFORD_ARCHITECTURE,
    check_score_tokens,
    find_logit_score,
)
from varlen.models.checkpoint.sentence_transformers import (
    Router,
    SentenceSettings,
    read_router,
    read_sentence_settings,
)
from varlen.models.checkpoint.tokenizer_files import (
    DEFAULT_TEMPLATE,
    TokenizerSettings,
    check_padding_side,
    read_tokenizer_settings,
)
from varlen.models.checkpoint.vector_layers import (
    M3Heads,
    SpladeConfig,
    VectorConfig,
    check_layers,
    check_widths,
    read_m3_heads,
)
from varlen.models.checkpoint.weights import (
    NO_ADAPTER,
    Adapter,
    check_factors,
    read_adapter,
    read_headers,
)
from varlen.models.registry import family_of, first_name, text_part
from varlen.models.static import STATIC, static_config, static_folder
from varlen.request.row_parameters import TruncationSide
from varlen.tasks import TASKS, Task, further_problem
from varlen_kernels import Pooling

_LATE_TASKS: tuple[Task, ...] = ("token_embed", "hidden")

_SEQUENCES = "ForSequenceClassification"
_HOW_TO_RANK = (
    ", whose files do not say how it ranks: name the form of its pairs with the setting rerank_form"
    f" ({', '.join(PAIR_FORMS)}), or take a copy whose modules.json has the module LogitScore,"
    " such as sentence-transformers writes with CrossEncoder(FOLDER).save_pretrained(NEW_FOLDER)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(SentenceSettings):
    """Architecture and settings of a checkpoint.

    Attributes:
        weights_folder: the folder in it with its weights and its tokenizer, mostly itself.
        config: `config.json`, in the fields of today's transformers, without those that are ignored.
        task: the task of its modules, else the task of its head.
        router: its routes, if queries of `sparse_embed` are looked up.
        longest_query: longest query that is looked up, in tokens; None where no file has it.
        vocab_size: token ids of texts are below this.
        target_vocab_size: token ids that it generates are below this.
        has_token_types: whether the tokens of a pair's second text have type 1: the model has that type, and the
            tokenizer gives it.
        position_limit: longest sequence that has position embeddings, in tokens: a source, and a target with its
            start token.
        max_sequence_tokens: longest sequence by default, in tokens; at most `position_limit`.
    """

    folder: Path
    weights_folder: Path
    config: Json
    ignored: IgnoredFields
    quantization: Quantization | None
    adapter: Adapter | None
    architecture: str
    task: Task
    splade: SpladeConfig
    router: Router | None
    longest_query: int | None
    masked_lm: MaskedLMLayout | None
    extraction: ExtractionConfig | None
    m3: M3Heads | None
    hidden_size: int
    vocab_size: int
    target_vocab_size: int
    has_second_type: bool
    tokenizer_class: str
    has_token_types: bool
    truncation_side: TruncationSide
    labels: Labels
    uncounted_token: int | None
    position_limit: int
    max_sequence_tokens: int
    eos_token_ids: tuple[int, ...]
    chat_templates: Mapping[str, str]
    special_tokens: Mapping[str, str]
    translate: TranslateSettings | None

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        ignore_config_fields: Collection[str] = (),
        adapter: str = NO_ADAPTER,
        rerank_form: RerankForm = "auto",
    ) -> "Checkpoint":
        """Return the checkpoint in a folder, once its files are checked.

        Args:
            ignore_config_fields: fields of config.json that the owner leaves out.
            adapter: name of the adapter that is merged into its weights.
            rerank_form: form of the pairs of a language model that ranks.

        Raises:
            CheckpointError: a file is missing, is not JSON, or asks for something that varlen does not serve.
        """
        folder = Path(folder)
        check_is_folder(folder)
        check_is_transformer(folder)
        model = _Model.read(folder, ignore_config_fields)
        config, family, sizes = model.config, model.family, model.sizes
        architecture = model.architecture
        sentence = _read_sentence(model)
        tokenizer, longest_query = _read_tokenizers(model, lowercase=sentence.lowercase)
        template = tokenizer.chat_templates.get(DEFAULT_TEMPLATE)
        sentence = _with_logit_score(sentence, model, rerank_form, template)
        trained_limit = sentence.max_seq_length or tokenizer.max_length or sizes.positions
        late = sentence.late
        if late is not None:
            late = replace(late, text_length=trained_limit)
            trained_limit = max(trained_limit, late.longest_text)
        has_second_type = family.has_token_types and config.get("type_vocab_size") not in (0, 1)
        own = {each.name: getattr(sentence, each.name) for each in fields(sentence)}
        return cls(
            **own | {"splade": sentence.splade or SpladeConfig(), "late": late},
            folder=folder,
            weights_folder=model.body,
            config=config,
            ignored=model.ignored,
            quantization=read_quantization(model.body),
            adapter=read_adapter(config, adapter),
            architecture=architecture,
            task="extract" if model.extraction else _task(sentence, family, config, architecture),
            router=model.router,
            longest_query=longest_query,
            masked_lm=_masked_lm(config, family, architecture),
            extraction=model.extraction,
            m3=None if late else read_m3_heads(folder, sizes.hidden, tokenizer.special_tokens),
            vocab_size=read_int(config, "vocab_size"),
            target_vocab_size=_target_vocab_size(config),
            hidden_size=sizes.hidden,
            has_second_type=has_second_type,
            tokenizer_class=tokenizer.class_name,
            has_token_types=has_second_type and tokenizer.gives_types,
            truncation_side=tokenizer.truncation_side,
            labels=_labels(config, sentence, family.architectures[architecture]),
            uncounted_token=sizes.uncounted_token,
            position_limit=sizes.positions,
            max_sequence_tokens=min(sizes.positions, trained_limit),
            eos_token_ids=read_end_tokens(folder, config) if family.kind == "decoder" else (),
            chat_templates=tokenizer.chat_templates,
            special_tokens=tokenizer.special_tokens,
            translate=(
                read_translate_settings(folder, config, vocab_size=_target_vocab_size(config))
                if family.kind == "encoder_decoder"
                else None
            ),
        )

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the template that counts if a request names none."""
        return self.chat_templates.get(DEFAULT_TEMPLATE)

    @property
    def embedding_size(self) -> int:
        """Features of an embedding."""
        if self.dense:
            return self.dense[-1].out_features
        return len(self.pooling) * self.hidden_size

    def vector_size(self, task: Task) -> int:
        """Return the features of a vector of `embed` or `token_embed`."""
        layers = self.vector_layers(task)
        return layers[-1].out_features if layers else self.embedding_size

    def vector_layers(self, task: Task) -> tuple[VectorConfig, ...]:
        """Return the layers that a task applies to pooled vectors, or to tokens."""
        if self.m3 is not None:
            own = {"sparse_embed": self.m3.sparse, "token_embed": self.m3.vectors}.get(task)
            if own is not None:
                return (own,)
        return self.dense if TASKS[task].width == "embedding" else ()

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks that its architecture has heads for, its own first."""
        if self.late is not None:
            return _LATE_TASKS
        if self.extraction is not None:
            return ("extract",)
        family = self.family
        heads: tuple[Task, ...] = ("sparse_embed", "token_embed")
        own = [task for task in heads if self._has_m3(task)]
        served = [
            *own,
            *(
                task
                for task in family.tasks
                if task not in ("token_embed", "extract")
                and (task != "generate" or self.is_causal)
                and family.heads.get(task, self.architecture) == self.architecture
            ),
        ]
        return tuple(dict.fromkeys((self.task, *served)))

    @property
    def family(self) -> Family[object]:
        return family_of(self.config)

    @property
    def head(self) -> HeadConfig:
        """What it has on top of the layers in config.json."""
        return HeadConfig(
            self.architecture,
            self.family.architectures[self.architecture],
            self.num_labels,
            self.logit_score,
            masked_tokens=() if self.translate is None else self.translate.masked_tokens,
        )

    @property
    def has_unattended_tokens(self) -> bool:
        """Whether `token_embed` adds unattended tokens."""
        return self.late is not None and self.late.has_unattended_tokens

    @property
    def num_labels(self) -> int:
        return len(self.labels.names)

    @property
    def is_decoder(self) -> bool:
        return self.family.kind == "decoder"

    @property
    def is_causal(self) -> bool:
        return self.family.is_causal(self.config)

    @property
    def adds_special_tokens(self) -> bool:
        """Whether texts get the special tokens of tokenizer.json: static embeddings and GLiNER2 read none."""
        has_prompt = self.extraction is not None and self.extraction.count_layer is not None
        return bool(self.config["model_type"] != STATIC) and not has_prompt

    @property
    def pair_prefixes(self) -> tuple[str, str] | None:
        """Texts in front of both texts of a pair that is read as one.

        None where a pair stays two texts. Only `first_releases` sets this field of config.json.
        """
        prefixes = self.config.get("pair_prefixes")
        return None if prefixes is None else tuple(prefixes)

    def check_task(self, task: Task) -> None:
        """Raise CheckpointError unless this checkpoint has the head and the tensors that `task` needs.

        Reads the headers of the weights, not the weights.
        """
        family = self.family
        if task not in family.tasks:
            raise CheckpointError(
                f'task "{task}" is not served with model_type "{self.config["model_type"]}";'
                f" allowed: {', '.join(family.tasks)}"
            )
        self._check_late(task, family)
        self._check_extraction(task)
        if task == "question_answer":
            check_padding_side(self.folder)
        needed = None if self._has_m3(task) else family.heads.get(task)
        if task == "rerank" and self.logit_score is not None:
            needed = f"{str(needed).removesuffix(_SEQUENCES)}ForCausalLM"
        if needed is not None and needed != self.architecture:
            could_rank = task == "rerank" and self.architecture.endswith("ForCausalLM")
            raise CheckpointError(
                f'task "{task}" needs a {needed} checkpoint; this one is a {self.architecture}'
                f"{_HOW_TO_RANK if could_rank else ''}"
            )
        if task == "generate":
            if not self.is_causal:
                raise CheckpointError(
                    'task "generate" needs a model whose tokens read only earlier ones; config.json says these read'
                    f" all: allowed are {', '.join(self.tasks)}"
                )
            check_generation(self.folder)
        headers = read_headers(self.weights_folder)
        if self.adapter is not None:
            check_factors(headers, self.adapter)
        family.check_tensors(headers, self.config, self.head, self._load_extraction)
        if TASKS[task].needs_masked_lm and not self._has_m3(task):
            assert self.masked_lm is not None
            load_masked_lm(HeaderReader(headers), self.masked_lm, NOTHING)
        check_layers(self.folder, self.vector_layers(task))
        if task == "embed" and self.layer_mix is not None:
            self.layer_mix.check(self.folder)
        if self.router is not None and task == "sparse_embed":
            self.router.check_table(self.folder, self.vocab_size)

    @property
    def runs_output(self) -> bool:
        """Whether its model may run an output layer: it generates, or answers in words."""
        return (
            self.family.kind == "encoder_decoder"
            or self.logit_score is not None
            or self.task == "generate"
        )

    def may_leave_out(self, layer: str) -> bool:
        """Return whether a layer that a program does not run changes no result of it."""
        headers, family = read_headers(self.weights_folder), self.family
        reader = HeaderReader(headers)
        family.load(reader, self.config, self.head)
        return reader.may_be_left_out(layer, lambda name: family.is_unused(name, headers))

    def check_outputs(self, task: Task, further: Sequence[Task]) -> None:
        """Raise CheckpointError unless a task and further outputs can be served; see `check_task`."""
        self.check_task(task)
        problem = further_problem(task, further)
        if "token_embed" in further and self.late is not None:
            problem = "its queries and documents are those of token_embed: serve it with the task token_embed"
        if "embed" in further and not self.pools_prompt:
            problem = "its prompts are not pooled, which only the task embed knows: serve it with that task"
        if further and self.router is not None:
            problem = "its queries are looked up and pass no model, so they have no other output"
        if problem is not None:
            raise CheckpointError(f"outputs is {', '.join(further)}: {problem}")
        for each in further:
            self.check_task(each)

    def _has_m3(self, task: Task) -> bool:
        heads = self.m3
        if heads is None:
            return False
        return (task == "sparse_embed" and heads.sparse is not None) or (
            task == "token_embed" and heads.vectors is not None
        )

    def _check_late(self, task: Task, family: Family[object]) -> None:
        if self.late is None:
            if task == "token_embed" and not self._has_m3(task):
                raise CheckpointError(
                    'task "token_embed" needs a model with a vector for each token, saved by MultiVectorEncoder of'
                    " sentence-transformers or by PyLate; this one is not"
                )
            return
        if task not in _LATE_TASKS:
            raise CheckpointError(
                f'task "{task}" is not served with a model with a vector for each token;'
                f" allowed: {', '.join(_LATE_TASKS)}"
            )
        if (
            task == "token_embed"
            and self.has_unattended_tokens
            and not family.may_have_unattended_tokens
        ):
            raise CheckpointError(
                f"queries are expanded by tokens that others do not read (attend false), which model_type"
                f' "{self.config["model_type"]}" does not know; allowed: attend true'
            )

    def _check_extraction(self, task: Task) -> None:
        if (task == "extract") == (self.extraction is not None):
            return
        if self.extraction is None:
            raise CheckpointError(
                'task "extract" needs a model of GLiNER or GLiNER2; this one is not'
            )
        raise CheckpointError(
            f'task "{task}" is not served with a model of GLiNER or GLiNER2; allowed: extract'
        )

    def _load_extraction(self, read: LayerReader) -> object:
        if self.extraction is None:
            return None
        if self.extraction.labels is not None:
            config = self.extraction.labels.config
            headers = read_headers(self.weights_folder, of_labels=True)
            family_of(config).check_tensors(headers, config, encoder_head(config))
        return load_extraction(read, self.extraction)


@dataclass(frozen=True, slots=True)
class _Model:
    """The transformer of a folder, as its configuration says.

    Attributes:
        body: folder of config.json, the weights and the tokenizer.
        given: config.json as it is; empty for static embeddings, whose configuration varlen makes.
    """

    folder: Path
    body: Path
    given: Json
    config: Json
    ignored: IgnoredFields
    is_static: bool
    router: Router | None
    extraction: ExtractionConfig | None
    family: Family[object]
    architecture: str
    sizes: ModelSizes

    @classmethod
    def read(cls, folder: Path, ignore: Collection[str]) -> "_Model":
        """Return the model of a folder, once its configuration is checked."""
        static, router, extraction = static_folder(folder), read_router(folder), None
        body = static or (folder / router.transformer if router else folder)
        given: Json = {}
        if static is None:
            given, extraction = _read_given(body)
            config, ignored = _read_config(given, ignore)
            if extraction is not None and extraction.labels is not None:
                extraction = replace(extraction, labels=_labels_of(body, extraction.labels, ignore))
        else:
            config, ignored = static_config(static), IgnoredFields((), ())
        family = family_of(config)
        return cls(
            folder=folder,
            body=body,
            given=given,
            config=config,
            ignored=ignored,
            is_static=static is not None,
            router=router,
            extraction=extraction,
            family=family,
            architecture=_architecture(config, family),
            sizes=family.read_sizes(config),
        )


def _read_sentence(model: _Model) -> SentenceSettings:
    family, config = model.family, model.config
    sentence = read_sentence_settings(
        model.folder,
        pooling=family.read_pooling(config) or _default_pooling(model.architecture),
        config=model.given | config,
        transformer=family.own_transformer,
        router=model.router,
    )
    if sentence.layer_mix is not None and not family.names_layers:
        raise CheckpointError(
            f'modules.json has a module "WeightedLayerPooling", which is not served with model_type'
            f' "{config["model_type"]}"; allowed: with relatives of BERT and DeBERTa'
        )
    check_widths(sentence.dense, len(sentence.pooling) * model.sizes.hidden)
    if model.is_static and not has_file(model.folder, "modules.json"):
        return replace(sentence, normalize=config["normalize"])
    return sentence


def _read_tokenizers(model: _Model, *, lowercase: bool) -> tuple[TokenizerSettings, int | None]:
    """Return the settings of the tokenizer, and the longest query of a route for queries."""
    read = partial(read_tokenizer_settings, family=model.family, model_config=model.config)
    tokenizer = read(model.body, lowercase=lowercase, reads_config=not model.is_static)
    if model.router is None:
        return tokenizer, None
    of_queries = read(model.folder / model.router.queries, lowercase=False)
    model.router.check_tokenizers(model.folder, of_queries, tokenizer)
    return tokenizer, of_queries.max_length


def _with_logit_score(
    sentence: SentenceSettings, model: _Model, rerank_form: RerankForm, template: str | None
) -> SentenceSettings:
    if sentence.logit_score is None:
        found = find_logit_score(model.folder, rerank_form, model.architecture, template)
        sentence = replace(sentence, logit_score=found)
    elif rerank_form != "auto":
        raise CheckpointError(
            f"rerank_form is {rerank_form}, and modules.json has the module LogitScore, which says how the"
            " checkpoint ranks; leave rerank_form out"
        )
    if sentence.logit_score is not None:
        check_score_tokens(sentence.logit_score, read_int(model.config, "vocab_size"))
    return sentence


def _read_given(folder: Path) -> tuple[Json, ExtractionConfig | None]:
    """Return config.json, or what GLiNER and GLiNER2 have in place of it."""
    if is_extraction(folder):
        return read_extraction(folder)
    config = read_object(folder, "config.json")
    if config.get("model_type") == SCHEMA_MODEL:
        return read_schema_model(folder, config)
    # `read_quantization` reads them
    return without(config, FIELDS), None


def _labels_of(
    folder: Path, labels: LabelEncoderConfig, ignore: Collection[str]
) -> LabelEncoderConfig:
    config, _ = _read_config(labels.config, ignore)
    family = family_of(config)
    tokenizer = read_tokenizer_settings(folder / LABELS_TOKENIZER, family, config, lowercase=False)
    positions = family.read_sizes(config).positions
    return replace(labels, config=config, longest=min(positions, tokenizer.max_length or positions))


def encoder_head(config: Json) -> HeadConfig:
    """Return what an encoder without a head has on top of it."""
    return HeadConfig(_architecture(config, family_of(config)), "embed")


def _read_config(given: Json, ignore: Collection[str]) -> tuple[Json, IgnoredFields]:
    """Return config.json without the fields that are ignored, once the others are checked."""
    check_unquantized(given)
    if first_name(given.get("architectures")) == STANFORD_ARCHITECTURE:
        raise CheckpointError(
            "config.json has the architecture HF_ColBERT, that of the first release; convert the checkpoint with"
            " sentence-transformers: MultiVectorEncoder(FOLDER).save_pretrained(NEW_FOLDER)"
        )
    by_setting = tuple(name for name in ignore if name in given)
    kept = text_part(without(given, by_setting))
    config = to_native(kept)
    rules = family_of(config).fields
    check_ignored(by_setting, rules)
    # code of a checkpoint may read any field
    has_code = config is not kept or not is_off(given.get("auto_map"))
    unread = () if has_code else unread_fields(config, rules)
    config = without(config, unread)
    check_known(config, rules)
    return config, IgnoredFields(unread, by_setting)


def _task(
    sentence: SentenceSettings, family: Family[object], config: Json, architecture: str
) -> Task:
    """Return the task of a checkpoint's modules, else of its architecture's head."""
    if sentence.splade is not None:
        return "sparse_embed"
    if sentence.late is not None:
        return "token_embed"
    if sentence.logit_score is not None:
        return "rerank"
    if sentence.has_pooling and "embed" in family.tasks:
        return "embed"
    task = family.architectures[architecture]
    return task if task != "generate" or family.is_causal(config) else "embed"


def _labels(config: Json, sentence: SentenceSettings, head_task: Task) -> Labels:
    # a score has one label, whatever config.json says of classifiers, and an answer a beginning and an end
    if sentence.logit_score is not None:
        config = {"num_labels": 1}
    elif head_task == "question_answer":
        config = {"num_labels": 2}
    elif not TASKS[head_task].has_labels:
        return NO_LABELS
    return read_labels(config, sentence.activation_class)


def _target_vocab_size(config: Json) -> int:
    name = "vocab_size" if config.get("decoder_vocab_size") is None else "decoder_vocab_size"
    return read_int(config, name)


def _masked_lm(config: Json, family: Family[object], architecture: str) -> MaskedLMLayout | None:
    if family.masked_lm is None or not architecture.endswith("ForMaskedLM"):
        return None
    return family.masked_lm(config)


def _architecture(config: Json, family: Family[object]) -> str:
    name = first_name(config.get("architectures") or list(family.architectures))
    if not isinstance(name, str) or name not in family.architectures:
        allowed = ", ".join(family.architectures)
        raise CheckpointError(f'config.json has the architecture "{name}"; allowed: {allowed}')
    return name


def _default_pooling(architecture: str) -> Pooling:
    # what sentence-transformers takes where no file says it
    return "last" if architecture.endswith("ForCausalLM") else "mean"
