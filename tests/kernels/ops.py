"""The names of all ops that every kind of device has."""

from inspect import isfunction

from varlen_kernels import reference

# Ops of a model that several processes hold: on CPUs only, for no machine with two GPUs was available for tests. So are
# the ops of spans, which read the lengths of sequences on the host; adapters are on CPUs.
CPU_OPS = {
    "add_adapters",
    *("all_reduce", "gather_columns", "local_ids"),
    *("bidirectional_lstm", "span_scores", "word_scores"),
    *("count_labels", "gru_states"),
}
OPS = {name: op for name, op in vars(reference).items() if isfunction(op) and name not in CPU_OPS}
