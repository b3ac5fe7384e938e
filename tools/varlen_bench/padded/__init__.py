"""Ops that only padded batches need, beside `masked_softmax`: pack and unpack.

varlen runs packed batches and does not use them. The kernel benchmark measures them as a baseline.
"""
