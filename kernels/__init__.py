"""Attention over paged KV and the copies around it: tensors and block tables, nothing else.

Knows tensors, strides and block tables. Does not know caches, requests or models' names.
"""
