"""Same bits, for KV that has been down in RAM or on NVMe and came back: after a spill, a restart, a preemption.

As in test_core_same_bits.py, KV and logits are compared with a cold run bit for bit. Each test asserts that bytes
were moved in the tier it is about, and for each way one restored byte is flipped once, and seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_core_same_bits import Cold, Run, _tiny, differences, text
from test_core_same_bits import cold as cold

from engine.config import ServeConfig
from engine.core.build import assemble
from engine.core.request import Request
from engine.core.transfer import CpuDevice
from engine.model.config import load_config
from engine.model.decoder import Decoder
from engine.model.weights import load_weights

#: A prompt of 700 and its answer need 45 slots: with 60, two of them do not fit.
SLOTS = 60
MODELS = ("tiny-gqa-bfloat16", "tiny-gqa-float32", "smollm2-bfloat16", "smollm2-float32")
Start = Callable[..., Run]


@pytest.fixture(scope="module", params=MODELS)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    name, dtype = request.param.rsplit("-", 1)
    files = (request.getfixturevalue("smollm2_files") if name == "smollm2"
             else _tiny(name, tmp_path_factory.mktemp(name)))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    config = load_config(files)
    yield Decoder(config, load_weights(files, config, getattr(torch, dtype)), 2048)
    torch.set_num_threads(threads)


@pytest.fixture
def begin(decoder: Decoder) -> Iterator[Start]:
    """Starts a core with tiers; all are closed at the end."""
    runs: list[Run] = []

    def start(**options: Any) -> Run:
        slots = options.pop("slots", SLOTS)
        config = replace(ServeConfig(), step_tokens=512, persist_within=0.0, **options)
        core, runner = assemble(config, decoder, slots, 2048, fingerprint=bytes(32))
        logits: dict[tuple[str, int], torch.Tensor] = {}

        def keep(request: Request, length: int, row: torch.Tensor) -> None:
            logits[request.id, length] = row.clone()

        core.on_logits = keep
        runs.append(Run(core, runner, logits))
        return runs[-1]

    yield start
    for run in runs:
        run.core.close()


def ram_for(decoder: Decoder, blocks: int = 400) -> int:
    c = decoder.config
    return blocks * c.n_layers * 2 * 16 * c.n_kv_heads * c.head_dim * decoder.weights.dtype.itemsize


def below(tier: str, decoder: Decoder, folder: Path) -> dict[str, Any]:
    """The options of a tier that has room for all."""
    size = 2 * ram_for(decoder)
    return {"ram": size} if tier == "ram" else {"nvme": folder, "nvme_size": size}


def moved(run: Run, way: str) -> int:
    """Bytes that were copied, as the copies count them."""
    return int(run.core.stats()["moves"][way]["bytes"])


def push_out(run: Run) -> None:
    """Another prompt takes the pool."""
    run.add("other", text(99, 720), 1)
    run.run()


def flip_what_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of the first block that goes up."""
    real, count = CpuDevice.copy_in, iter(range(10**6))

    def copy_in(self: CpuDevice, slot: int, source: memoryview, after: object) -> int:
        if next(count) == 0:
            changed = bytearray(source)
            changed[1235] ^= 0x40  # in the exponent, for either type: small enough a change rounds away
            source = memoryview(changed)
        return real(self, slot, source, after)

    monkeypatch.setattr(CpuDevice, "copy_in", copy_in)


def logits_differ(run: Run, cold: Cold) -> bool:
    return any(not torch.equal(run.logits["x", n], row) for n, row in cold.logits.items())


def kv_differs(run: Run, cold: Cold) -> bool:
    """In the prompt's whole blocks: the answer's tokens may be others by now."""
    return not cold.kv.startswith(run.kv(cold.ids))


def ask_again(run: Run, cold: Cold) -> Any:
    run.add("x", cold.ids)
    return run.run()["x"]


@pytest.mark.parametrize("tier", ["ram", "nvme"])
def test_restored(begin: Start, decoder: Decoder, cold: Cold, tier: str, tmp_path: Path) -> None:
    run = begin(**below(tier, decoder, tmp_path))
    run.add("first", cold.ids)
    run.run()
    push_out(run)
    usage = ask_again(run, cold)
    assert usage.cached[tier] >= 400
    assert moved(run, f"{tier}>hbm") == usage.cached[tier] // 16 * run.core.block_bytes
    assert differences(run, cold) == []


def test_restored_from_nvme_through_ram(begin: Start, decoder: Decoder, cold: Cold, tmp_path: Path) -> None:
    """RAM holds 8 blocks of what spilled; the rest is looked ahead for, or comes from NVMe as it is."""
    run = begin(ram=ram_for(decoder, 30), nvme=tmp_path, nvme_size=2 * ram_for(decoder))
    run.add("first", cold.ids)
    run.run()
    push_out(run)
    usage = ask_again(run, cold)
    assert usage.cached["nvme"] >= 100
    assert moved(run, "nvme>ram") > 0
    assert usage.cached["ram"] + usage.cached["nvme"] >= 400
    assert differences(run, cold) == []


def restarted(begin: Start, decoder: Decoder, cold: Cold, folder: Path) -> Run:
    """A core on the folder of one that has computed the prompt, and has ended."""
    options = {"slots": 400, "nvme": folder, "nvme_size": 2 * ram_for(decoder)}
    run = begin(**options)
    run.add("first", cold.ids)
    run.run()
    run.core.flush(30)
    run.core.close()
    return begin(**options)


def preempted(begin: Start, decoder: Decoder, cold: Cold) -> Run:
    """x was admitted last and goes; a third takes its blocks, so that it comes back from RAM."""
    run = begin(ram=ram_for(decoder), slots=78)
    run.add("other", text(5, 520), 40)
    run.run(until=3)
    run.add("x", cold.ids)
    request = run.core.requests["x"]
    while not request.preempted:
        run.run(until=1)
    run.add("third", text(6, 500), 2)
    run.run()
    assert moved(run, "ram>hbm") > 0
    assert request.usage.cached_tokens == 0  # its own work, found again, is no hit
    return run


def test_after_a_restart(begin: Start, decoder: Decoder, cold: Cold, tmp_path: Path) -> None:
    again = restarted(begin, decoder, cold, tmp_path)
    usage = ask_again(again, cold)
    assert usage.cached == {"hbm": 0, "nvme": 688}
    assert sum(usage.computed.values()) == 12
    assert moved(again, "nvme>hbm") == 43 * again.core.block_bytes
    assert differences(again, cold) == []


def test_after_a_preemption(begin: Start, decoder: Decoder, cold: Cold) -> None:
    assert differences(preempted(begin, decoder, cold), cold) == []


@pytest.mark.parametrize("tier", ["ram", "nvme"])
def test_a_flipped_byte_is_seen(begin: Start, decoder: Decoder, cold: Cold, tier: str, tmp_path: Path,
                                monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparisons above can fail."""
    run = begin(**below(tier, decoder, tmp_path))
    run.add("first", cold.ids)
    run.run()
    push_out(run)
    flip_what_is_restored(monkeypatch)
    usage = ask_again(run, cold)
    assert usage.cached[tier] >= 400
    assert kv_differs(run, cold)
    assert logits_differ(run, cold)


def test_a_flipped_byte_after_a_restart_is_seen(begin: Start, decoder: Decoder, cold: Cold, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    again = restarted(begin, decoder, cold, tmp_path)
    flip_what_is_restored(monkeypatch)
    ask_again(again, cold)
    assert kv_differs(again, cold)
    assert logits_differ(again, cold)


def test_a_flipped_byte_after_a_preemption_is_seen(begin: Start, decoder: Decoder, cold: Cold,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    flip_what_is_restored(monkeypatch)
    # Its KV is not compared: the block itself may have gone and come again since.
    assert logits_differ(preempted(begin, decoder, cold), cold)


def test_a_byte_flipped_on_disk_is_a_miss(begin: Start, decoder: Decoder, cold: Cold, tmp_path: Path) -> None:
    """Found by its checksum: what stood behind it is computed, and nothing is garbled."""
    run = begin(nvme=tmp_path, nvme_size=2 * ram_for(decoder))
    run.add("first", cold.ids)
    run.run()
    push_out(run)
    run.core.flush(30)
    for file in tmp_path.glob("*/*.kv"):
        content = np.memmap(file, np.uint8, "r+")
        content[8192:len(content) // 2:5000] ^= 1
        content.flush()
    usage = ask_again(run, cold)
    assert usage.computed["load_failed"] > 0
    assert run.core.stats()["restores_failed"] > 0
    assert differences(run, cold) == []
