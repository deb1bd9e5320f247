"""Benchmarks: one file a question, `python -m bench.NAME [--quick] [--json FILE]`."""

import os

# As the core process has it (engine/core/client.py); libgomp reads it when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
