"""kill -9 while it writes: what was written is found, and reads back right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nvme_writer
import pytest
from nvme_writer import GEOMETRY, block, payload

from tiers.errors import BadRecordError
from tiers.files import aligned
from tiers.nvme import Nvme, Recovered


def write_and_kill(directory: Path, seed: int, writes: int) -> dict[int, int]:
    """slot: number of what a child said that it wrote before it was killed."""
    child = subprocess.Popen([sys.executable, nvme_writer.__file__, str(directory), str(seed)], stdout=subprocess.PIPE,
                             text=True)
    assert child.stdout
    wrote: dict[int, int] = {}
    with child:
        for n, line in enumerate(child.stdout):
            if n == writes:
                child.kill()
            if line.endswith("\n"):  # the last one may be torn
                slot, number = line.split()
                wrote[int(slot)] = int(number)
    assert child.returncode == -9
    return wrote


@pytest.mark.parametrize("writes", [1, 40, 300, pytest.param(3000, marks=pytest.mark.slow)])
def test_after_kill_9_every_record_that_was_written_is_found_and_right(tmp_path: Path, writes: int) -> None:
    expected: dict[int, int] = {}
    numbers: dict[bytes, int] = {}
    torn: set[int] = set()
    for seed in range(1, 4):  # each round goes on with what the last one left
        wrote = write_and_kill(tmp_path, seed, writes)
        assert len(wrote) >= min(writes, 100)
        expected.update(wrote)
        numbers |= {block(number).digest: number for number in range(seed * 10**6, seed * 10**6 + 2 * writes + 2000)}
        nvme = nvme_writer.open_nvme(str(tmp_path))
        records = {r.slot: r for r in nvme.recover()}
        into = aligned(GEOMETRY.stride)
        bad = {slot for slot, record in records.items() if not reads_right(nvme, record, numbers, into)}
        assert len(bad - torn) <= 1  # the one that was being written when the process ended
        torn = bad
        for slot, number in expected.items():
            if slot not in torn and numbers[records[slot].name.digest] != number:
                # Overwritten, but the child was killed before it could say so: the newest of all.
                assert records[slot].sequence == max(r.sequence for r in records.values())
                expected[slot] = numbers[records[slot].name.digest]
        nvme._directory.release()  # not closed: the next round starts from what the kill left


def reads_right(nvme: Nvme, record: Recovered, numbers: dict[bytes, int], into: memoryview) -> bool:
    try:
        nvme.read(record.slot, record.name, into)
    except BadRecordError:
        return False
    assert into[: GEOMETRY.payload_bytes] == payload(numbers[record.name.digest])
    return True
