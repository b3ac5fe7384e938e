"""The server's log has the stages of a load, and the reason of a failure."""

import pytest

from varlen_tools.local_server import load_failures, loading_stage

# A log of tritonserver 2.51.
LOG = r"""
W1128 18:47:31.392415 18353 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory"
I1128 18:47:31.393937 18353 model_lifecycle.cc:472] "loading: minilm:1"
I1128 18:47:31.398559 18353 python_be.cc:2249] "TRITONBACKEND_ModelInstanceInitialize: minilm_0_0 (CPU device 0)"
varlen: worker 18361: compiling the op norm_bf16; later starts read it
I1128 18:47:33.620308 18353 process.py:208] "varlen: minilm v1: linear layers, measured in 0.4 s: 1536x384 (1.4x)"
a line of another backend
I1128 18:47:34.332695 18353 process.py:208] "varlen: minilm v1: measured 4 of 15 batches, 0.5 s of at most 3"
I1128 18:47:36.243868 18353 model_lifecycle.cc:839] "successfully loaded 'minilm'"
I1128 18:47:36.244036 18353 server.cc:631]
+---------+------+
"""


def test_the_stage_of_a_load_is_the_last_line_of_a_model():
    lines = LOG.splitlines()

    stages = [loading_stage("\n".join(lines[: count + 1])) for count in range(len(lines))]

    assert list(dict.fromkeys(stages)) == [
        None,
        "loading minilm",
        "compiling the op norm_bf16",
        "loading minilm: linear layers, measured in 0.4 s",
        "loading minilm: measured 4 of 15 batches, 0.5 s of at most 3",
        "minilm is loaded",
    ]


@pytest.mark.parametrize("quote", ['"', ""], ids=["newer", "older"])
def test_a_failure_is_told_in_the_words_of_its_model(quote):
    def line(text: str) -> str:
        return f"E1128 18:51:22.251204 23206 model_lifecycle.cc:642] {quote}{text}{quote}\n"

    refused = (
        r"failed to load 'bad' version 1: Internal: TritonModelException: output \"x\" is {'dims': [385]};"
        r" the model has {'dims': [384]}\n\nAt:\n  varlen.server.entry(133): initialize\n"
    )
    raised = (
        r"failed to load 'other' version 2: Internal: RuntimeError: no luck\n\nAt:\n  /a.py(1): b\n"
    )
    misnamed = "Poll failed for model directory 'here': unexpected directory name 'here'"

    log = LOG + line(refused) + line("failed to load 'bad'") + line(raised) + line(misnamed)

    assert load_failures(LOG) == []
    assert load_failures(log) == [
        "bad cannot be loaded: output \"x\" is {'dims': [385]}; the model has {'dims': [384]}",
        "other cannot be loaded: RuntimeError: no luck",
        "here cannot be loaded: unexpected directory name 'here'",
    ]
