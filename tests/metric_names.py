"""Kind of every series that a model has, by name."""

SERIES = {
    **dict.fromkeys(
        """
        varlen_queued_requests varlen_queued_tokens varlen_queued_seconds varlen_slots
        varlen_open_requests varlen_draining varlen_queued_text_bytes
        varlen_weight_bytes varlen_arena_capacity_bytes varlen_arena_reserved_bytes
        varlen_arena_chunks varlen_arena_footprint_bytes
        varlen_arena_peak_live_bytes varlen_response_cache_bytes varlen_response_cache_entries
        varlen_grammars varlen_grammar_bytes
        varlen_running_sequences varlen_waiting_sequences varlen_kv_blocks_used
        varlen_kv_blocks_reserved varlen_kv_blocks_capacity
        varlen_cuda_graphs varlen_cuda_graph_bytes varlen_cuda_graph_capture_seconds varlen_draft_saved_seconds
        """.split(),
        "GAUGE",
    ),
    **dict.fromkeys(
        """
        varlen_queue_wait_seconds varlen_request_latency_seconds varlen_batch_sequences
        varlen_batch_tokens varlen_batch_seconds varlen_batch_predicted_seconds
        varlen_time_to_first_token_seconds varlen_time_per_output_token_seconds
        """.split(),
        "HISTOGRAM",
    ),
    **dict.fromkeys(
        """
        varlen_requests_total varlen_refused_requests_total varlen_sequences_total
        varlen_tokens_total varlen_padding_tokens_total varlen_split_batches_total
        varlen_busy_seconds_total varlen_worker_restarts_total varlen_scheduling_seconds_total varlen_plan_seconds_total
        varlen_plan_cache_hits_total
        varlen_plan_cache_misses_total varlen_response_cache_hits_total
        varlen_response_cache_joined_total varlen_response_cache_misses_total
        varlen_response_cache_evictions_total varlen_prefill_tokens_total
        varlen_decode_tokens_total varlen_preemptions_total varlen_order_preemptions_total
        varlen_prefix_cache_hit_tokens_total
        varlen_draft_tokens_total varlen_draft_tokens_accepted_total
        varlen_grammar_compilations_total varlen_grammar_evictions_total
        """.split(),
        "COUNTER",
    ),
}
# Series of one name, by their additional label.
LABELS = {
    "varlen_requests_total": ("ok", "invalid", "refused", "cancelled", "failed"),
    "varlen_refused_requests_total": (
        "queue_full",
        "deadline",
        "expired",
        "shared_memory",
        "draining",
    ),
}
