"""Ops that only padded batches need: masked softmax, pack and unpack.

varlen runs packed batches and does not use them. The kernel benchmark measures them as a baseline.
"""
