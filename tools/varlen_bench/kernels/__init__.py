"""The kernel benchmark: every op, the encoder and the beam step on a GPU, beside their peers, in one run.

Each system first has to be right: its result is compared with float64, by ||error|| / ||exact||, at most 5e-6 in
fp32, 1e-3 in fp16 and 1e-2 in bf16 (the beam step's fp32 scores 1e-5, the encoder's unit vectors 0.045, a cosine of
0.999). What a graph replays is compared again. A system that is missing, wrong or fails leaves a row that says
so. Inputs are random; results are written into memory that held NaN.

Shapes
    paper     batches of 1 and 20 of one length out of ten from 10 to 500, 12 heads, hidden 768
    serving   8,192 packed tokens of lengths uniform in 5-500, hidden 384, 768 and 1024
    beam      1, 8, 32 and 128 sequences of 4 beams, vocabularies of 32,000 and 250,000

Times
    In a graph: a CUDA graph replays a pass of calls, each on tensors of its own, so only the device's work counts.
    By Python: the same calls, launched one by one; on small shapes this is what the host costs.
    A pass has from 4 to 64 sets of tensors. Where all together are less than four times the L2 cache, the cache
    is swept between passes by reading twice its size. So no call finds its inputs in the cache. A time is the
    median of 100 passes, divided by the calls of one.
    Peers keep their results for the length of a pass, so they too write memory of their own.
    The encoder alone is timed warm: its weights are where its last batch left them.

Peers
    torch            the op in plain torch; softmax `torch` where no key is masked, `torch-masked` with scale and mask
    compile          the same through torch.compile, "max-autotune" for these shapes alone, without CUDA graphs of
                     its own, since all of this is captured in ours. It takes seconds a shape, so activation and
                     embedding have it at the serving shapes alone, and attention at one
    liger            liger-kernel, if it is installed: softmax, layer norm (after torch's add), add + RMS norm, SwiGLU
    varlen_attn      torch.nn.attention.varlen on the same packed tokens
    sdpa             scaled_dot_product_attention, padded ahead and unmeasured; `-cudnn` with that backend forced
    torch-by-rows    a beam step that searches each row before it adds scores, so writes no log-softmax
    lightseq         LightSeq's R-top-k rule, our own writing of it; see lightseq_rule.py. Its host waits for
                     the device, so no graph can hold it
    sdpa-sorted-4    transformers' BertModel, SDPA or eager attention, in 4 parts by length, each padded; `arrival`
                     cuts the batch in order of arrival; `-compile` is torch.compile at its defaults

Keys of the BENCH line
    gpu              its name
    softmax_frac     bytes per second of ours in a graph over those of a copy of 1 GiB on the same device in the same
                     run, the least over all shapes of at least 32 MB. Bytes are the fewest that must move; a copy's
                     are those read and those written
    layernorm_frac   the same for add + layer norm
    *_vs_best        time of the fastest right peer over ours, the least over all shapes and dtypes measured; a
                     peer counts with the shorter of its two times, ours with that in a graph. Geometric means
                     are in the tables. Where all lengths are equal, SDPA pads nothing and is a peer as any other
    encoder_vs_best  the same for the forward pass of both encoders on 8,192 tokens
    beam_us          ours in a graph: 8 sequences, 4 beams, a vocabulary of 32,000; of the first dtype
    beam_vs_torch    as *_vs_best, over all beam shapes, against torch eager and compiled
A key whose systems were not measured reads n/a.

Besides: `encoder-share` is the time of a graph with all calls of one op of the forward pass and no other;
`encoder-host` the forward pass alone, and the call that serves it from ids to vectors on the host. In tables,
"of copy" is against the copy of 1 GiB, "of its copy" against one of as many bytes as the op moves.
"""
