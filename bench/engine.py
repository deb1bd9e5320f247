"""How fast is the engine by itself, and how soon is it ready?

    python -m bench.engine [--quick] [--json FILE] [--model NAME] [--dtype TYPE]

The core in this process, no HTTP: prefill of 2,048 tokens, decode of one and of eight at a depth of 512 (and
of 2,048, for which nothing was asked), in rounds one after another. Then a real server, from its start until
/health says ok.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request

import numpy as np

from bench.harness import Row, arguments, at_least, at_most, middle, report
from engine.config import ServeConfig
from engine.core.build import build_core
from engine.core.core import Core
from engine.core.messages import GenerateRequest, Sampling

#: Decode steps that are timed, with every sequence in them; the first two are left out.
STEPS = 32


class Rounds:
    """Random prompts, each new, so that nothing is a hit."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._random = np.random.default_rng(0)
        self._n = 0

    def add(self, n_tokens: int, answer: int) -> None:
        ids = self._random.integers(1000, self._core.vocab_size - 100, n_tokens).astype("<i4").tobytes()
        self._n += 1
        self._core.add(GenerateRequest(f"r{self._n}", ids,
                                       Sampling(max_tokens=answer, temperature=0, ignore_eos=True)))

    def prefill(self, n_tokens: int) -> float:
        """tok/s until the first token."""
        self.add(n_tokens, 1)
        began = time.perf_counter()
        self._finish()
        return n_tokens / (time.perf_counter() - began)

    def decode(self, sequences: int, depth: int) -> float:
        """tok/s in all: `sequences` at about `depth` tokens, by the median step."""
        for _ in range(sequences):
            self.add(depth, 2000)
        seconds: list[float] = []
        while len(seconds) < STEPS + 2:
            began = time.perf_counter()
            deltas = self._core.step()
            if len(deltas) == sequences and all(d.ids for d in deltas):
                seconds.append(time.perf_counter() - began)
        for name in list(self._core.requests):
            self._core.cancel(name)
        return sequences / statistics.median(seconds[2:])

    def _finish(self) -> None:
        while self._core.has_work():
            self._core.step()


def ready_seconds(model: str) -> float:
    """From the start of `trunkline serve` until /health answers 200."""
    began = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-m", "engine.cli.main", "serve", "--model", model, "--port", "18431", "--log-level", "error"],
        stdout=subprocess.DEVNULL)
    try:
        while time.perf_counter() - began < 120:
            try:
                with urllib.request.urlopen("http://127.0.0.1:18431/health", timeout=1) as reply:
                    json.load(reply)
                    return time.perf_counter() - began
            except (urllib.error.URLError, OSError):
                time.sleep(0.02)
        raise SystemExit("the server was not ready after 120 s")
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    report(f"The engine alone: {options.model} in {options.dtype}", measure(options), options)


def measure(options: argparse.Namespace) -> list[Row]:
    core = build_core(ServeConfig(model=options.model, dtype=options.dtype)).core
    rounds = Rounds(core)
    rounds.prefill(600)
    repeats = 1 if options.quick else 3
    got: dict[str, list[float]] = {}
    for _ in range(repeats):
        for n in (512, 2048, 6000):
            got.setdefault(f"prefill of {n:,}", []).append(rounds.prefill(n))
        for sequences, depth in ((1, 512), (1, 2048), (8, 512), (8, 2048)):
            got.setdefault(f"decode of {sequences} at {depth:,}", []).append(rounds.decode(sequences, depth))
    ready = [ready_seconds(options.model) for _ in range(repeats)]
    asked = {"prefill of 2,048": 650.0, "decode of 1 at 512": 40.0, "decode of 8 at 512": 150.0}
    rows = []
    for name, values in got.items():
        value, spread = middle(values)
        rows.append(at_least(name, value, "tok/s", asked[name], spread) if name in asked
                    else Row(name, value, "tok/s", spread))
    value, spread = middle(ready)
    return [*rows, at_most("ready after start", value, "s", 5.0, spread)]


if __name__ == "__main__":
    main()
