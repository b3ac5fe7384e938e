"""The padded baseline: softmax over padded scores, and copies between packed and padded tokens.

varlen runs packed batches and needs none of these ops; the kernel benchmark compares and measures them.
"""
