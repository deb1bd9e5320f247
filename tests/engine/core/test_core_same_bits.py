"""Same bits: whatever way a token's KV came about, its bytes and the logits are those of a cold run.

Cold: alone, whole chunks, an empty cache. Each test also proves that the way it is about was taken, and one
shows that a flipped byte is seen.
"""

from __future__ import annotations

import random
import select
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import ServeConfig
from engine.core.build import assemble
from engine.core.core import Core
from engine.core.messages import GenerateRequest, Sampling
from engine.core.request import Request
from engine.core.runner import CpuRunner
from engine.model.config import load_config
from engine.model.decoder import Decoder
from engine.model.library import ModelFiles
from engine.model.weights import load_weights

MODELS = ("tiny-gqa", "tiny-mha", "tiny-qknorm", "smollm2")
#: Longer than one window of 512 keys, so that sums over several windows are compared.
PROMPT, ANSWER = 700, 8
KV, LOGITS = "kv", "logits"


def _tiny(name: str, folder: Path) -> ModelFiles:
    """A random model of its architecture, as Transformers writes it."""
    transformers = pytest.importorskip("transformers")
    shared = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
              "max_position_embeddings": 2048}
    torch.manual_seed(7)
    config = {
        "tiny-gqa": lambda: transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **shared),
        "tiny-mha": lambda: transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **shared),
        "tiny-qknorm": lambda: transformers.Qwen3Config(num_attention_heads=6, num_key_value_heads=2,
                                                        head_dim=64, **shared),
    }[name]()
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.inference_mode():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    return ModelFiles(name, folder, "hf")


@pytest.fixture(scope="module", params=[f"{m}-{d}" for d in ("bfloat16", "float32") for m in MODELS])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    name, dtype = request.param.rsplit("-", 1)
    if name == "smollm2":
        files = request.getfixturevalue("smollm2_files")
    else:
        files = _tiny(name, tmp_path_factory.mktemp(name))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    config = load_config(files)
    yield Decoder(config, load_weights(files, config, getattr(torch, dtype)), 2048)
    torch.set_num_threads(threads)


@dataclass
class Run:
    """A core on the decoder, and all logits it sampled from, by (request, length)."""

    core: Core
    runner: CpuRunner
    logits: dict[tuple[str, int], torch.Tensor]

    def add(self, name: str, ids: bytes, n: int = ANSWER) -> None:
        self.core.add(GenerateRequest(name, ids, Sampling(max_tokens=n, temperature=0, ignore_eos=True)))

    def run(self, until: int = 10**6) -> dict[str, object]:
        last = {}
        while self.core.has_work() and until > 0:
            until -= 1
            deltas = self.core.step()
            for d in deltas:
                if d.finish:
                    last[d.id] = d.usage
            if not deltas and self.core.wake_fd is not None:  # what is left waits for a copy
                select.select([self.core.wake_fd], [], [], 0.05)
        assert self.core.audit() == []
        return last

    def kv(self, ids: bytes) -> bytes:
        """The bytes of every whole block of `ids` that is in the pool."""
        path = self.core.cache.tree.match(self.core.cache.namespace(self.core.fingerprint, b"", b""), ids)
        assert path.n_tokens == len(ids) // 4 // 16 * 16
        slots = self.core.cache.tree.slots(path, "hbm").tolist()
        return b"".join(self.runner.read_block(s).view(torch.uint8).numpy().tobytes() for s in slots)


def start(decoder: Decoder, *, slots: int = 400, **options: int) -> Run:
    config = replace(ServeConfig(), **{"step_tokens": 512, **options})
    core, runner = assemble(config, decoder, slots, 2048)
    logits: dict[tuple[str, int], torch.Tensor] = {}

    def keep(request: Request, length: int, row: torch.Tensor) -> None:
        logits[request.id, length] = row.clone()

    core.on_logits = keep
    return Run(core, runner, logits)


def text(seed: int, n: int = PROMPT) -> bytes:
    return np.asarray(random.Random(seed).choices(range(512), k=n), "<i4").tobytes()


@dataclass
class Cold:
    ids: bytes
    whole: bytes
    kv: bytes
    logits: dict[int, torch.Tensor]


@pytest.fixture(scope="module")
def cold(decoder: Decoder) -> Cold:
    run = start(decoder)
    ids = text(1)
    run.add("x", ids)
    request = run.core.requests["x"]
    usage = run.run()["x"]
    assert usage.cached_tokens == 0  # type: ignore[attr-defined]
    whole = bytes(request.tokens[:-4])
    return Cold(ids, whole, run.kv(whole), {n: row for (_, n), row in run.logits.items()})


def differences(run: Run, cold: Cold, name: str = "x") -> list[str]:
    """Where KV or logits differ from cold, bit for bit; empty if nowhere."""
    bad = [f"{LOGITS} at {n}" for n, row in cold.logits.items() if not torch.equal(run.logits[name, n], row)]
    return bad + ([KV] if run.kv(cold.whole) != cold.kv else [])


@pytest.mark.parametrize("step_tokens", [16, 64, 200, 1024])
def test_another_chunking(decoder: Decoder, cold: Cold, step_tokens: int) -> None:
    run = start(decoder, step_tokens=step_tokens)
    run.add("x", cold.ids)
    before = run.core.counters.steps
    run.run()
    assert run.core.counters.steps - before >= PROMPT // step_tokens + ANSWER - 1
    assert differences(run, cold) == []


def test_another_batch(decoder: Decoder, cold: Cold) -> None:
    """Prefilled beside decodes and other prefills, decoded beside five others of other lengths."""
    run = start(decoder, step_tokens=200)
    for i, n in enumerate((30, 520, 17, 300)):
        run.add(f"o{i}", text(10 + i, n), 40)
    run.run(until=4)
    run.add("x", cold.ids)
    run.add("o5", text(20, 200), 40)
    run.run()
    assert run.core.counters.steps < 80  # they did run together
    assert differences(run, cold) == []


def test_a_hit_and_a_partial_tail(decoder: Decoder, cold: Cold) -> None:
    """605 tokens are known: 37 whole blocks and a tail of 13."""
    run = start(decoder)
    run.add("before", cold.ids[:605 * 4], 1)
    run.run()
    run.add("x", cold.ids)
    usage = run.run()["x"]
    assert usage.cached == {"hbm": 605}  # type: ignore[attr-defined]
    assert differences(run, cold) == []


def test_part_of_a_whole_block(decoder: Decoder, cold: Cold) -> None:
    """Another transcript agrees for 600 tokens: 37 whole blocks and 8 tokens of the next."""
    run = start(decoder)
    run.add("before", cold.ids[:600 * 4] + text(3, 60), 1)
    run.run()
    run.add("x", cold.ids)
    usage = run.run()["x"]
    assert usage.cached["hbm"] in (600, 601)  # type: ignore[attr-defined]
    assert differences(run, cold) == []


def test_a_whole_prompt_hit_computes_the_last_token_once(decoder: Decoder, cold: Cold) -> None:
    run = start(decoder)
    run.add("before", cold.ids)
    run.run()
    run.add("x", cold.ids)
    usage = run.run()["x"]
    assert usage.computed == {"last_token": 1}  # type: ignore[attr-defined]
    assert differences(run, cold) == []


def test_two_that_share_a_flight(decoder: Decoder, cold: Cold) -> None:
    run = start(decoder, step_tokens=200)
    run.add("leader", cold.ids[:650 * 4] + text(4, 20), 20)
    run.add("x", cold.ids)
    run.run()
    assert run.core.scheduler.flights.joined == 1
    assert differences(run, cold) == []


def test_preempted_and_resumed(decoder: Decoder, cold: Cold) -> None:
    """78 slots hold both prompts (33 + 44) and not both answers: x, admitted last, goes and comes back."""
    run = start(decoder, slots=78)
    run.add("other", text(5, 520), 40)
    run.run(until=3)
    run.add("x", cold.ids)
    request = run.core.requests["x"]
    run.run()
    assert request.preempted >= 1
    assert request.usage.cached_tokens == 0  # its own work, found again, is no hit
    assert differences(run, cold) == []


def test_a_flipped_byte_is_seen(decoder: Decoder, cold: Cold) -> None:
    """The comparison can fail: one byte of a reused block, and logits and KV differ."""
    run = start(decoder)
    run.add("before", cold.ids[:608 * 4], 1)
    run.run()
    path = run.core.cache.tree.match(run.core.cache.namespace(run.core.fingerprint, b"", b""), cold.ids)
    slot = int(run.core.cache.tree.slots(path, "hbm")[3])
    block = run.runner.read_block(slot)
    block.view(torch.uint8).view(-1)[1234] ^= 0x40
    run.runner.write_block(slot, block)
    run.add("x", cold.ids)
    run.run()
    bad = differences(run, cold)
    assert KV in bad
    assert any(b.startswith(LOGITS) for b in bad)
