"""The CPU's copies: what a block is outside the pool, and a thread that ends before its time."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from engine.core.transfer import CpuDevice

LAYERS, KV_HEADS, SLOTS, BLOCK, HEAD_DIM = 2, 3, 4, 8, 5


@pytest.fixture
def pool() -> torch.Tensor:
    return torch.arange(LAYERS * 2 * KV_HEADS * SLOTS * BLOCK * HEAD_DIM, dtype=torch.float32).reshape(
        LAYERS, 2, KV_HEADS, SLOTS, BLOCK, HEAD_DIM)


def wait(device: CpuDevice, woken: threading.Event) -> list[tuple[int, str | None]]:
    while True:
        assert woken.wait(10)
        woken.clear()
        if found := device.finished():
            return found


def test_a_block_goes_out_in_the_layout_of_records_and_comes_back(pool: torch.Tensor) -> None:
    woken = threading.Event()
    device = CpuDevice(pool, woken.set)
    host = bytearray(LAYERS * 2 * BLOCK * KV_HEADS * HEAD_DIM * 4)
    ticket = device.copy_out(1, memoryview(host), device.computed())
    assert wait(device, woken) == [(ticket, None)]
    block = np.frombuffer(host, np.float32).reshape(LAYERS, 2, BLOCK, KV_HEADS, HEAD_DIM)
    assert np.array_equal(block, pool[:, :, :, 1].permute(0, 1, 3, 2, 4).numpy())
    ticket = device.copy_in(3, memoryview(host), device.computed())
    assert wait(device, woken) == [(ticket, None)]
    assert torch.equal(pool[:, :, :, 3], pool[:, :, :, 1])
    device.close()
    assert not device.alive


def test_a_copy_that_can_not_be_made_is_a_result(pool: torch.Tensor) -> None:
    woken = threading.Event()
    device = CpuDevice(pool, woken.set)
    ticket = device.copy_out(1, memoryview(bytearray(7)), None)
    ((found, failed),) = wait(device, woken)
    assert found == ticket
    assert failed is not None
    assert "ValueError" in failed
    assert device.alive
    device.close()


def test_a_thread_that_ends_in_a_copy_fails_all_that_wait_and_says_so(
        pool: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*args: object) -> None:
        raise SystemExit

    monkeypatch.setattr("engine.core.transfer.np.copyto", end)
    woken = threading.Event()
    device = CpuDevice(pool, woken.set)
    host = memoryview(bytearray(LAYERS * 2 * BLOCK * KV_HEADS * HEAD_DIM * 4))
    tickets = {device.copy_out(slot, host, None) for slot in range(3)}
    found = wait(device, woken)
    assert {ticket for ticket, _ in found} == tickets
    why = "the thread that copies has ended: SystemExit()"
    assert {failed for _, failed in found} == {why}
    assert not device.alive
    later = device.copy_in(0, host, None)
    assert device.finished() == [(later, why)]
    device.close()
