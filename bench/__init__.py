"""Benchmarks: one file a question, `python -m bench.NAME [--quick] [--json FILE]`."""
