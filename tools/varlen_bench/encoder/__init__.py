"""The encoder benchmark: ours beside transformers, onnxruntime and CTranslate2, in one run.

Every system starts from the same token ids and yields the same thing, a [sequences, hidden] fp32
matrix of mean-pooled, normalised vectors; sorting, batching, padding, pooling and normalising are
inside its time, tokenising is in nobody's. Each system is a process of its own, so that memory,
threads and allocators do not mix. All use every core for one batch at a time. Systems are measured
in turn, A B C A B C …, so that a drift of the machine meets all of them; ratios are taken within a
round and the median over rounds is quoted.

Workloads
    uniform   token lengths uniform in 5-500, random vocabulary ids between [CLS] and [SEP]
    short     English search queries of 3-30 tokens, through the model's own tokenizer

Batches
    Ours gets the whole list in one call and batches by itself, with its default settings.
    A peer gets its best batch size: it times the candidates on a part of the workload before the
    rounds, and the row keeps every candidate's tokens/s (column `calibration`).
    `arrival` keeps the order of arrival; `sorted` goes from the longest to the shortest.
    `transformers-fp32-fifo` is the baseline: padded, arrival order, 20 a batch, uncalibrated, the
    setting of the TurboTransformers paper and close to what a dynamic batcher with a common cap does.

Figures (CSV columns)
    tokens_per_second       real tokens, no padding; median over rounds, with _p20 and _p80
    ratio_to_fifo           tokens/s over the baseline's in the same round; median over rounds
    cosine_mean, _min       to transformers fp32, each sequence alone and so unpadded
    peak_rss_mib            the most memory the process held in any measured pass, weights included

Keys of the BENCH line (uniform workload; with the prefix `short_` the short one)
    ours                        our fastest system whose mean cosine is at least 0.999
    best_peer                   the fastest system of others whose mean cosine is at least 0.999
    vs_transformers_fifo_fp32   ours over the baseline
    vs_transformers_best        ours over the fastest transformers system, any order, size, dtype
    vs_best_peer                ours over best_peer
    cosine                      mean cosine of `ours`
    tokens_per_second           median of `ours`

bf16 on a CPU without bf16 instructions is emulated and slow: such a system still runs, on every
eighth sequence by length, and its row says so. A system that cannot run leaves a row with the reason.
"""
