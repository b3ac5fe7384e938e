"""The generation benchmark: workloads, passes, figures, and a small run of the whole."""

import os
import sys
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from varlen.scheduling.iteration.step_size import DraftCost
from varlen_bench.compare.passes import Answer, Requests, drive_iterations
from varlen_bench.compare.results import Result
from varlen_bench.compare.worker import Worker
from varlen_bench.generate import (
    GenerateSubject,
    Prompts,
    app,
    equal_share,
    trace_requests,
    uniform_requests,
    with_text,
)
from varlen_bench.harness.rows import bench_line
from varlen_bench.peers import trained
from varlen_bench.peers.checkpoints import (
    GeneratorShape,
    LlamaShape,
    config_field,
    load_generator,
    save_random_decoder,
)
from varlen_bench.peers.engines import Cores
from varlen_bench.peers.gguf_files import write_gguf
from varlen_bench.workers import decode_step, llamacpp, stepped
from varlen_bench.workers.generate import (
    MODEL_DRAFTING,
    OURS,
    REQUEST_LEVEL,
    SYSTEMS,
    figures,
    load_iteration,
)
from varlen_bench.workers.stepped import step_in_thread

from .conftest import read_csv

pytestmark = pytest.mark.full

STATIC, CONTINUOUS = "transformers-fp32-arrival", "transformers-fp32-continuous"


def test_uniform_requests_fit_the_model_and_repeat_for_a_seed():
    one = uniform_requests(64, vocabulary=100, positions=300, seed=0)

    assert one == uniform_requests(64, vocabulary=100, positions=300, seed=0)
    assert one != uniform_requests(64, vocabulary=100, positions=300, seed=1)
    prompts = list(map(len, one.prompts))
    assert (min(prompts) >= 32, max(prompts) <= 256) == (True, True)
    assert (min(one.limits) >= 1, max(one.limits) <= 128) == (True, True)
    assert max(map(sum, zip(prompts, one.limits, strict=True))) <= 300
    assert all(0 < token < 100 for prompt in one.prompts for token in prompt)


def test_prompts_of_a_text_are_parts_of_it_once_or_three_times():
    one, text = uniform_requests(16, vocabulary=100, positions=300, seed=0), list(range(1, 1000))

    plain = with_text(one, text, Prompts.plain, seed=0)
    repeated = with_text(one, text, Prompts.repeated, seed=0)

    for found in (plain, repeated):
        assert [len(prompt) for prompt in found.prompts] == list(map(len, one.prompts))
        assert found.limits == one.limits
    assert all(prompt == list(range(prompt[0], prompt[-1] + 1)) for prompt in plain.prompts)
    for prompt in repeated.prompts:
        period = -(-len(prompt) // 3)
        assert prompt[period:] == prompt[:-period]
        assert len(set(prompt)) == period
    assert repeated.label == f"{one.label}, repeated"


def test_a_trace_gives_both_lengths_in_its_order_scaled_to_the_model(tmp_path):
    path = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:17:03,{100 * n},{10 * n}" for n in range(1, 101)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")

    found = trace_requests(path, 150, vocabulary=50, positions=1089, seed=3)

    # 99 of 100 requests have at most 10,890 tokens
    assert found.label == "trace azure / 10"
    whole = [10 * output for output in found.limits]
    assert [len(prompt) for prompt in found.prompts[:40]] == [10 * n for n in found.limits[:40]]
    assert all(after - before in (10, -990) for before, after in pairwise(whole))
    assert max(len(p) + n for p, n in zip(found.prompts, found.limits, strict=True)) <= 1089


def test_a_trace_without_its_columns_is_refused(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("when,tokens\nnow,5\n")

    with pytest.raises(ValueError, match="lengths.csv is no trace of requests"):
        trace_requests(path, 1, vocabulary=50, positions=64, seed=0)


def test_a_system_that_loses_tokens_is_refused():
    requests = Requests.at_once("", [[7, 7]], [3])

    with pytest.raises(RuntimeError, match="generated 1 tokens; expected 3"):
        figures([Answer(0.0, [1], [0.5], 0.5)], requests)


def test_figures_of_a_pass_are_times_from_arrival():
    answers = [
        Answer(1.0, [1, 2, 3], [1.5, 1.6, 1.8]),
        Answer(2.0, [4], [3.0]),
    ]
    requests = Requests("", [[7], [7]], [3, 1], [1.0, 2.0])

    found = figures(answers, requests)

    assert found["tokens_per_second"] == pytest.approx(4 / 2.0)
    assert (found["ttft_p50_ms"], found["ttft_p99_ms"]) == pytest.approx((500, 1000))
    assert (found["per_token_p50_ms"], found["per_token_p99_ms"]) == pytest.approx((800 / 3, 1000))
    assert (found["gap_p50_ms"], found["gap_p99_ms"]) == pytest.approx((100, 200))
    # a single token has no gap
    assert figures(answers[1:], requests.part([1]))["gap_p50_ms"] is None


def test_equal_tokens_are_counted_by_position():
    assert equal_share([[1, 2], [3]], [[1, 5], [3]]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_a_draft_model_is_beside_its_target_and_drafts_are_counted_by_pass(
    tmp_path, monkeypatch, temperature
):
    # whatever rows of drafts take here
    monkeypatch.setattr(DraftCost, "step_seconds", lambda *_: 1.0)
    monkeypatch.setattr(DraftCost, "row_seconds", lambda *_: 0.0)
    shape = LlamaShape("target", 16, 2, 4, key_heads=2, features=24, positions=64, vocabulary=300)
    for folder in ("target", "draft"):
        save_random_decoder(shape, tmp_path / folder)
    requests, found = Requests.at_once("", [[7, 8], [9]], [12, 20]), {}

    for name in (OURS, MODEL_DRAFTING):
        system = replace(SYSTEMS[name], temperature=temperature)
        submit = load_iteration(system, tmp_path / "target", Cores(1, 1))
        worker = Worker(
            system,
            lambda load, _, submit=submit: drive_iterations(submit, load),
            figures,
            "tokens",
            counts=submit.counts,
        )
        found[name] = [worker.measure(requests) for _ in range(3)]

    plain, drafted = found[OURS], found[MODEL_DRAFTING]
    assert [each["answers"] for each in plain] == [each["answers"] for each in drafted]
    # the second pass has counts of its own
    counts = [
        (each["figures"]["drafted_tokens"], each["figures"]["accepted_tokens"])
        for each in plain + drafted
    ]
    assert counts[:3] == [(0, 0)] * 3
    assert all(10 < accepted <= drafted <= 2 * 32 for drafted, accepted in counts[3:])


def test_only_ours_are_sampled():
    subject = GenerateSubject(temperature=0.8, only="varlen-bf16,varlen-fp32-draft")
    subject.prepare()
    assert {system.temperature for system in subject.chosen} == {0.8}

    with pytest.raises(ValueError, match="allowed with --only varlen"):
        GenerateSubject(temperature=0.8).prepare()


def test_a_pair_is_trained_once_and_prompts_are_of_other_files(tmp_path, monkeypatch):
    for name in ("TARGET", "DRAFT"):
        small = LlamaShape(
            name.lower(), 16, 1, 2, key_heads=1, features=16, positions=32, vocabulary=300
        )
        monkeypatch.setattr(trained, name, small)
    files = trained.library_files
    assert len(files(held_out=False)) > 5 * len(files(held_out=True))
    assert not set(files(held_out=False)) & set(files(held_out=True))
    text = "\n".join(["import os, sys", "def one(self): return 1", "x = 2"]) * 40
    monkeypatch.setattr(trained, "library_files", lambda *, held_out: [text])

    monkeypatch.setattr(trained, "_STEPS", {"target": 2, "draft": 3})

    target = trained.trained_pair(tmp_path)

    draft = tmp_path / "draft"
    assert (target, trained.trained_pair(tmp_path)) == (tmp_path / "target",) * 2
    assert [config_field(each, "vocab_size") for each in (target, draft)] == [300, 300]
    tokenizers = [(each / "tokenizer.json").read_text() for each in (target, draft)]
    assert tokenizers[0] == tokenizers[1]
    assert {"target", "draft"} == {each.name for each in tmp_path.iterdir()}


def result(name, speeds, arrivals="at once", *, model="gpt2-small", ttft=100.0, note=""):
    about = {"workload": "small", "model": model, "arrivals": arrivals}
    made = Result(system=SYSTEMS[name], **about, requests=4, work=100, note=note)
    made.rounds = [{"tokens_per_second": speed, "ttft_p99_ms": ttft} for speed in speeds]
    return made


def results_of_a_run():
    return [
        result(OURS, [300.0, 330.0]),
        result(REQUEST_LEVEL, [150.0, 165.0]),
        result(STATIC, [50.0, 55.0]),
        result("transformers-fp32-sorted", [60.0, 66.0]),
        result("ctranslate2-fp32-sorted", [200.0, 220.0]),
        # not of equal precision
        result("ctranslate2-int8-sorted", [900.0, 900.0]),
        result(CONTINUOUS, [], note="did not run: not installed"),
        result(OURS, [90.0], "poisson", ttft=30.0),
        result(STATIC, [80.0], "poisson", ttft=300.0),
        result(REQUEST_LEVEL, [85.0], "poisson", ttft=20.0),
    ]


def step_of(model):
    made = Result(system=SYSTEMS[OURS], model=model, arrivals="decode step")
    made.rounds = [{"step_ms": 80.0, "limit_ms": 50.0}]
    return made


def test_bench_figures_compare_with_peers_of_equal_precision():
    subject = GenerateSubject(models="gpt2-small,tiny_gpt2")
    subject.prepare()

    found = subject.figures([*results_of_a_run(), step_of("gpt2-small")])

    assert bench_line("generate", found).startswith(
        "BENCH generate: vs_static_batch=5 vs_best_peer=1.5 vs_request_level=2 ttft_p99_ratio=0.1"
        " best_peer=ctranslate2-fp32-sorted tokens_per_second=315 decode_fraction_of_limit=0.625"
        " drafts_vs_none=n/a draft_model_vs_none=n/a tiny_gpt2_vs_static_batch=n/a"
    )


def test_a_system_that_did_not_run_keeps_a_row_with_its_reason():
    results = [*results_of_a_run(), step_of("gpt2-small")]

    rows = GenerateSubject().rows(results)

    failed = next(row for row in rows if row["system"] == CONTINUOUS)
    assert (failed["tokens_per_second"], failed["note"]) == (None, "did not run: not installed")
    assert (rows[-1]["step_ms"], rows[-1]["limit_ms"]) == (80, 50)
    assert (rows[-1]["requests"], rows[-1]["tokens"], rows[-1]["rounds"]) == (None,) * 3
    assert len({tuple(row) for row in rows}) == 1
    # an isolated step that failed has a note, and the command ends with 0
    assert not GenerateSubject().has_failed([Result(system=SYSTEMS[OURS])])
    assert GenerateSubject().has_failed([result(OURS, [])])
    at_once, poisson, step = GenerateSubject().tables(results)
    assert at_once.lines[0][0] == "ctranslate2-int8-sorted"
    assert [len(table.lines) for table in (at_once, poisson, step)] == [7, 3, 1]


def test_a_step_cannot_be_faster_than_memory_or_arithmetic(tmp_path, monkeypatch):
    save_random_decoder(TINY, tmp_path)
    monkeypatch.setattr(decode_step, "read_bandwidth", lambda: 4.0)
    monkeypatch.setattr(decode_step, "product_rate", lambda hidden: 1e30)
    weights, cached = 12 * 1 * 16**2 + 300 * 16, 2 * 1 * 16 * 32 * (128 + 48)

    assert decode_step.limit_seconds(tmp_path) == weights + cached

    monkeypatch.setattr(decode_step, "product_rate", lambda hidden: 1.0)
    assert decode_step.limit_seconds(tmp_path) == 2 * (32 * weights + cached)


def test_a_step_of_llama_reads_fewer_keys_than_it_multiplies(tmp_path, monkeypatch):
    shape = LlamaShape("tiny", 16, 2, 4, key_heads=2, features=24, positions=64, vocabulary=300)
    save_random_decoder(shape, tmp_path)
    model = load_generator("AutoModelForCausalLM", tmp_path, 1)
    matrices = sum(each.numel() for each in model.parameters() if each.ndim == 2)
    weights = matrices - model.get_input_embeddings().weight.numel()
    cached = 2 * 2 * 8 * 32 * (128 + 48)
    monkeypatch.setattr(decode_step, "read_bandwidth", lambda: 4.0)
    monkeypatch.setattr(decode_step, "product_rate", lambda hidden: 1e30)

    assert decode_step.limit_seconds(tmp_path) == weights + cached

    monkeypatch.setattr(decode_step, "product_rate", lambda hidden: 1.0)
    # two query heads share a key head
    assert decode_step.limit_seconds(tmp_path) == 2 * (32 * weights + 2 * cached)


class FakeOpenVino:
    """Packages openvino and openvino_genai: a step gives each request the number of its tokens left."""

    class GenerationStatus:
        RUNNING, FINISHED = "running", "finished"

    class ContinuousBatchingPipeline:
        def __init__(self, folder, limits, device, options):
            self.limits, self.options, self.requests = limits, options, []
            FakeOpenVino.made = self

        def add_request(self, number, ids, options):
            assert (options.ignore_eos, options.do_sample) == (True, False)
            request = FakeOpenVino.Request(ids, options.max_new_tokens)
            self.requests.append(request)
            return request

        def step(self):
            for request in self.requests:
                request.unread += [request.left] if request.left else []
                request.left = max(0, request.left - 1)

    class Request:
        def __init__(self, ids, left):
            self.ids, self.left, self.unread = ids, left, []

        def can_read(self):
            return bool(self.unread)

        def read(self):
            return {0: SimpleNamespace(generated_ids=[self.unread.pop(0)])}

        def get_status(self):
            return "running" if self.left else "finished"

    SchedulerConfig = GenerationConfig = SimpleNamespace
    Tensor = staticmethod(np.ndarray.tolist)


def test_openvino_runs_in_steps_and_reads_each_answer_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", FakeOpenVino)
    monkeypatch.setitem(sys.modules, "openvino_genai", FakeOpenVino)
    exports = []
    monkeypatch.setattr(stepped, "_export_openvino", lambda *about: exports.append(about))

    submit = load_iteration(SYSTEMS["openvino-int8"], tmp_path, Cores(1, 2))
    answers = drive_iterations(submit, Requests.at_once("", [[7, 8], [9]], [3, 1]))

    assert [answer.tokens for answer in answers] == [[3, 2, 1], [1]]
    assert [request.ids for request in FakeOpenVino.made.requests] == [[[7, 8]], [[9]]]
    assert FakeOpenVino.made.options == {"INFERENCE_NUM_THREADS": 2}
    ((checkpoint, _, weights),) = exports
    assert (checkpoint, weights) == (tmp_path, "int8")


class FakeOnnxruntime:
    """Package onnxruntime_genai: a step gives each request the number of its tokens left."""

    FinishReason = SimpleNamespace(NONE="none", MAX="max", FAILED="failed")

    def __init__(self):
        self.requests = []
        self.Model = str
        self.Engine = lambda model: self

    def create_event_buffer(self, capacity):
        return capacity

    def create_request(self):
        return FakeRequest(self)

    class TurnOptions:
        def __init__(self, request):
            self.sampled = True

        def set_do_sample(self, sampled):
            self.sampled = sampled

        def set_max_generated_tokens(self, count):
            self.count = count

        def set_min_generated_tokens(self, count):
            assert count == self.count

    def run(self, capacity):
        for request in list(self.requests):
            token, request.left = request.left, request.left - 1
            reason = "none" if request.left else "max"
            yield SimpleNamespace(
                request=request, token=token, finish_reason=reason, error_code="none"
            )


class FakeRequest:
    def __init__(self, engine):
        self.engine = engine

    def begin_turn(self, tokens, options):
        assert not options.sampled
        self.ids, self.left = tokens.tolist(), options.count
        self.engine.requests.append(self)

    def close(self):
        self.engine.requests.remove(self)


def test_onnxruntime_runs_in_steps_and_closes_what_has_ended(tmp_path, monkeypatch):
    fake, exports = FakeOnnxruntime(), []
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", fake)
    monkeypatch.setattr(stepped, "_export_onnx", lambda *about: exports.append(about))

    submit = load_iteration(SYSTEMS["onnxruntime-int4"], tmp_path, Cores(1, 2))
    answers = drive_iterations(submit, Requests.at_once("", [[7, 8], [9]], [3, 1]))

    assert [answer.tokens for answer in answers] == [[3, 2, 1], [1]]
    assert fake.requests == []
    ((checkpoint, _, *settings),) = exports
    assert (checkpoint, settings) == (tmp_path, ["int4", 64, 2])


class FakeVllm:
    """Packages vllm and vllm.sampling_params: a step gives each request the length of its prompt."""

    def __init__(self):
        self.RequestOutputKind = SimpleNamespace(DELTA="delta")
        self.EngineArgs = self.SamplingParams = SimpleNamespace
        self.LLMEngine = SimpleNamespace(from_engine_args=self.from_engine_args)

    def from_engine_args(self, arguments):
        self.arguments, self.requests = arguments, {}
        return self

    def add_request(self, name, prompt, options):
        assert (options.temperature, options.ignore_eos) == (0.0, True)
        self.requests[name] = [len(prompt["prompt_token_ids"]), options.max_tokens]

    def step(self):
        for name, request in list(self.requests.items()):
            request[1] -= 1
            finished = request[1] == 0
            if finished:
                del self.requests[name]
            output = SimpleNamespace(token_ids=[request[0]])
            yield SimpleNamespace(request_id=name, outputs=[output], finished=finished)


def test_vllm_runs_in_steps_in_the_process_of_the_worker(tmp_path, monkeypatch):
    fake = FakeVllm()
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", fake)
    monkeypatch.setattr("os.environ", {})
    monkeypatch.setattr("ctypes.CDLL", lambda *_: None)

    submit = load_iteration(SYSTEMS["vllm-bf16"], tmp_path, Cores(1, 1))
    answers = drive_iterations(submit, Requests.at_once("", [[7, 8], [9]], [3, 1]))

    assert [answer.tokens for answer in answers] == [[2, 2, 2], [1]]
    assert (fake.arguments.dtype, fake.arguments.enable_prefix_caching) == ("bfloat16", False)
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


class FakeLlama:
    """Package llama_cpp: the next token is the sum of all before it, below 5."""

    def __init__(self):
        self.cache, self.logits, self.steps = {}, {}, []

    def llama_context_default_params(self):
        self.options = SimpleNamespace()
        return self.options

    def llama_init_from_model(self, model, options):
        return "context"

    llama_get_memory = llama_model_get_vocab = staticmethod(lambda of: of)
    llama_vocab_n_tokens = staticmethod(lambda vocabulary: 5)

    def llama_batch_init(self, tokens, embeddings, sequences):
        lists = {name: [0] * tokens for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(seq_id=[[0] for _ in range(tokens)], **lists)

    def llama_decode(self, context, batch):
        self.logits = {}
        self.steps.append(batch.n_tokens)
        for row in range(batch.n_tokens):
            (place,) = batch.seq_id[row]
            tokens = self.cache.setdefault(place, [])
            assert (batch.pos[row], batch.n_seq_id[row]) == (len(tokens), 1)
            tokens.append(batch.token[row])
            if batch.logits[row]:
                self.logits[row] = np.eye(5, dtype=np.float32)[sum(tokens) % 5]
        return 0

    def llama_get_logits_ith(self, context, row):
        return self.logits[row]

    def llama_memory_seq_rm(self, memory, place, first, last):
        assert (first, last) == (-1, -1)
        del self.cache[place]


def test_llamacpp_runs_prompts_in_parts_beside_sequences_that_decode(tmp_path, monkeypatch):
    fake = FakeLlama()
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    monkeypatch.setattr(llamacpp, "_load_model", lambda *about: "model")
    (tmp_path / "config.json").write_text('{"n_positions": 32}')
    prompts, limits = [[1], [2, 1, 1, 1, 1, 1, 1], [3, 3]], [4, 2, 3]
    expected = []
    for prompt, count in zip(prompts, limits, strict=True):
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(sum(tokens) % 5)
        expected.append(tokens[len(prompt) :])

    def load():
        return llamacpp.load_llamacpp(tmp_path, "fp32", Cores(1, 2), running=2, step_tokens=4)

    submit = step_in_thread(load)
    answers = drive_iterations(submit, Requests.at_once("", prompts, limits))

    assert [answer.tokens for answer in answers] == expected
    assert max(fake.steps) <= 4
    assert fake.cache == {}
    assert (fake.options.n_ctx, fake.options.n_seq_max) == (64, 2)
    assert fake.options.n_threads == fake.options.n_threads_batch == 2


class FakeGguf:
    """Package gguf: names stay, and what is written is kept."""

    MODEL_ARCH = SimpleNamespace(GPT2="gpt2", LLAMA="llama")
    LlamaFileType = SimpleNamespace(ALL_F32=0)

    def GGUFWriter(self, path, family):  # noqa: N802  # as the package has it
        self.fields, self.tensors = {}, {}
        return self

    def get_tensor_name_map(self, kind, layers):
        self.layers = layers
        return self

    def get_name(self, name, try_suffixes):
        return name

    def add_tensor(self, name, weight):
        self.tensors[name] = weight

    def __getattr__(self, name):
        if name.startswith("add_"):
            return lambda value: self.fields.update({name.removeprefix("add_"): value})
        return lambda: None


def test_weights_for_llamacpp_have_its_order_of_values(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", fake := FakeGguf())
    shape = LlamaShape("", 16, 2, 4, key_heads=2, features=24, positions=32, vocabulary=300)
    save_random_decoder(shape, tmp_path / "llama")
    save_random_decoder(TINY, tmp_path / "gpt2")

    write_gguf(tmp_path / "llama", tmp_path / "llama.gguf")

    query = "model.layers.1.self_attn.q_proj.weight"
    stored = load_file(tmp_path / "llama/model.safetensors")
    assert fake.tensors.keys() == stored.keys()
    # the values that rotary positions turn together are i and i + 2 of a head of 4
    for head in range(4):
        rows = stored[query][4 * head : 4 * head + 4]
        assert np.array_equal(fake.tensors[query][4 * head : 4 * head + 4], rows[[0, 2, 1, 3]])
    assert (fake.layers, fake.fields["head_count_kv"], fake.fields["vocab_size"]) == (2, 2, 300)

    write_gguf(tmp_path / "gpt2", tmp_path / "gpt2.gguf")

    first = "transformer.h.0.mlp.c_fc.weight"
    stored = load_file(tmp_path / "gpt2/model.safetensors")
    assert np.array_equal(fake.tensors[first], stored[first].T)


TINY = GeneratorShape("tiny", hidden=16, layers=1, heads=2, positions=256, vocabulary=300)


def test_a_small_run_measures_appends_and_ends_with_the_bench_line(
    tmp_path, monkeypatch, peers_in_process
):
    save_random_decoder(TINY, tmp_path / "tiny_gpt2/1")
    monkeypatch.setattr(GenerateSubject, "_after", lambda *_: [step_of("tiny_gpt2")])
    output = tmp_path / "generate.csv"
    arguments = ["--quick", "--repository", str(tmp_path), "--requests", "3", "--threads", "1"]
    arguments += ["--only", f"{OURS},{STATIC}", "--output", str(output)]

    done = CliRunner().invoke(app, arguments)

    assert done.exit_code == 0, done.output
    last = done.output.strip().splitlines()[-1]
    assert last.startswith("BENCH generate: tiny_gpt2_vs_static_batch=")
    assert "tiny_gpt2_best_peer=transformers-fp32-arrival" in last
    rows = read_csv(output)
    assert [row["arrivals"] for row in rows] == [
        "at once",
        "at once",
        "poisson",
        "poisson",
        "decode step",
    ]
    # equal to transformers, one prompt at a time
    assert {row["equal_tokens"] for row in rows[:4]} == {"1"}
    assert all(float(row["tokens_per_second"]) > 0 for row in rows[:4])
    assert str(tmp_path) not in output.read_text()
