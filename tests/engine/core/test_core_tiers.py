"""A core with tiers below HBM: what it answers, moves, counts, and gives back, on a device that does its worst.

Every answer is compared with what the tokens alone say comes next (`cold`), so a wrong or stale block shows.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from chain_core import cold
from tiered_chain import ChainDevice, TieredBench, tiered

from engine.core.request import State

SEEDS = range(6)


def prompt(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(997), k=n)


def ask(bench: TieredBench, name: str, tokens: list[int], n: int = 2, **more: Any) -> dict[str, int]:
    """Asks, compares the answer, and returns where the prompt came from."""
    assert bench.ask(name, tokens, n, **more) == cold(tokens, n)
    return bench.cached(name)


def baseline(bench: TieredBench) -> int:
    return bench.core.cache.available()


# -- spill and restore -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("tier", "slots"), [("ram", 40), ("nvme", 60)])
def test_what_was_evicted_comes_back_from_below(tier: str, slots: int, seed: int) -> None:
    bench = tiered(20, seed=seed, **{tier: slots})
    first = prompt(1, 60)
    ask(bench, "a", first)
    ask(bench, "b", prompt(2, 70))
    cached = ask(bench, "a again", first)
    assert cached[tier] >= 32
    assert cached[tier] // 4 == bench.moves(f"{tier}>hbm")
    assert cached["hbm"] + cached[tier] >= 56


@pytest.mark.parametrize("seed", SEEDS)
def test_three_long_prompts_into_a_ram_tier_that_holds_two(seed: int) -> None:
    """PITFALLS 25: all three come back from below, with NVMe behind RAM."""
    bench = tiered(20, ram=30, nvme=100, seed=seed)
    prompts = [prompt(i, 60) for i in range(3)]
    for i, tokens in enumerate(prompts):
        ask(bench, f"first {i}", tokens)
    ask(bench, "other", prompt(9, 70))
    for i, tokens in enumerate(prompts):
        cached = ask(bench, f"again {i}", tokens)
        assert cached["hbm"] + cached["ram"] + cached["nvme"] >= 56
        assert cached["ram"] + cached["nvme"] > 0


def test_a_cyclic_working_set_larger_than_hbm() -> None:
    """PITFALLS 22: RAM of twice HBM, a working set of 1.5 times HBM: the hit rate is above HBM's alone."""
    def rate(**tiers: int) -> float:
        bench = tiered(32, **tiers)
        prompts = [prompt(i, 60) for i in range(3)]
        hits = total = 0
        for turn in range(12):
            cached = ask(bench, f"t{turn}", prompts[turn % 3])
            hits, total = hits + sum(cached.values()), total + 60
        return hits / total

    assert rate(ram=64) > rate() + 0.5


def test_counters_are_those_of_the_copies() -> None:
    """PITFALLS 14: move k blocks, read k, in each direction; the tiers add up to what was cached."""
    bench = tiered(20, ram=40)
    first = prompt(1, 60)
    ask(bench, "a", first)
    ask(bench, "b", prompt(2, 70))
    bench.settle()
    down = bench.moves("hbm>ram")
    assert down >= bench.core.stats()["tiers"]["ram"]["used"] > 0
    cached = ask(bench, "a again", first)
    stats = bench.core.stats()
    assert stats["moves"]["ram>hbm"]["blocks"] * 4 == cached["ram"] == stats["tokens"]["cached"]["ram"]
    assert stats["moves"]["ram>hbm"]["bytes"] == cached["ram"] // 4 * 32
    usage = bench.last["a again"].usage
    assert usage is not None
    assert sum(cached.values()) == usage.cached_tokens == 60 - sum(usage.computed.values())


def test_what_was_restored_is_what_the_next_request_uses() -> None:
    """PITFALLS 36."""
    bench = tiered(20, ram=40)
    first = prompt(1, 60)
    ask(bench, "a", first)
    ask(bench, "b", prompt(2, 70))
    ask(bench, "a again", first)
    up = bench.moves("ram>hbm")
    computed = bench.runner.computed
    cached = ask(bench, "a once more", first)
    assert cached == {"hbm": 59, "ram": 0}
    assert bench.moves("ram>hbm") == up
    assert bench.runner.computed - computed == 2  # the last token of the prompt, and one decode


@pytest.mark.parametrize("seed", SEEDS)
def test_a_preempted_request_recomputes_one_block_at_most(seed: int) -> None:
    """PITFALLS 23: its blocks spill, and it resumes from them."""
    bench = tiered(32, ram=64, seed=seed)
    a, b = prompt(1, 50), prompt(2, 60)
    bench.add("a", a, 40)
    bench.add("b", b, 40)
    request = bench.core.requests["b"]
    had = 0
    while not request.preempted:
        had = request.computed
        bench.step()
    while request.state is not State.RUNNING:
        bench.step()
    assert request.computed >= had - 4
    bench.run()
    assert bench.got["a"] == cold(a, 40)
    assert bench.got["b"] == cold(b, 40)
    assert request.usage.cached_tokens == 0  # PITFALLS 11: its own work, found again, is no hit


@pytest.mark.parametrize("tiers", [{"ram": 60}, {"nvme": 200}, {"ram": 30, "nvme": 200}], ids=str)
def test_64_concurrent_requests_answer_as_without_tiers(tiers: dict[str, int]) -> None:
    """PITFALLS 27: shared heads, a pool far too small."""
    bench = tiered(48, max_running=8, **tiers)
    heads = [prompt(i, 40) for i in range(4)]
    asked = {f"r{i}": heads[i % 4] + prompt(100 + i % 16, 10 + i % 7) for i in range(64)}
    for name, tokens in asked.items():
        bench.add(name, tokens, 5)
    bench.run()
    for name, tokens in asked.items():
        assert bench.got[name] == cold(tokens, 5), name
    assert sum(bench.moves(f"{tier}>hbm") for tier in tiers) > 0


class Unfenced(ChainDevice):
    """Ignores the event of one direction, or of none."""

    ignored = ""

    def copy_out(self, slot: int, into: memoryview, after: Any) -> int:
        return super().copy_out(slot, into, None if self.ignored == "spill" else after)

    def copy_in(self, slot: int, source: memoryview, after: Any) -> int:
        return super().copy_in(slot, source, None if self.ignored == "restore" else after)


def unfenced(fence: str) -> type[Unfenced]:
    return type("Unfenced", (Unfenced,), {"ignored": fence})


@pytest.mark.parametrize("fence", ["", "spill"])
def test_a_missing_fence_before_a_spill_shows(fence: str) -> None:
    """PITFALLS 26: what is copied down was launched, and may not have run."""
    wrong = 0
    for seed in SEEDS:
        bench = tiered(16, ram=60, seed=seed, device=unfenced(fence), step_tokens=16)
        head = prompt(1, 48)
        bench.add("gone", head + prompt(2, 8), 1)
        while bench.runner.launched == bench.runner.ran:
            bench.step()
        bench.cancel("gone")
        try:
            bench.ask("other", prompt(3, 56), 1)
            bench.settle()
            wrong += bench.ask("r", head + prompt(4, 8), 2) != cold(head + prompt(4, 8), 2)
        except AssertionError:
            wrong += 1
        assert bench.moves("hbm>ram") > 0
    assert bool(wrong) == bool(fence)


@pytest.mark.parametrize("fence", ["", "restore"])
def test_a_missing_fence_before_a_restore_shows(fence: str) -> None:
    """PITFALLS 26: who went away has launched what writes into slots that others are restored into."""
    wrong = 0
    for seed in SEEDS:
        bench = tiered(16, nvme=200, seed=seed, device=unfenced(fence), step_tokens=16, within=0.0, ahead=0)
        head = prompt(1, 48)
        ask(bench, "head", head)
        bench.settle()
        ask(bench, "other", prompt(2, 52))
        bench.settle()
        # From here on nothing is copied down: the fence of a spill would run what is launched.
        assert bench.lower.persist is not None
        bench.lower.persist.note = lambda owner, path: None  # type: ignore[method-assign]
        bench.lower.spills.recompute_s = lambda tokens: 0.0
        bench.add("gone", prompt(3, 59), 1)
        while bench.runner.launched == bench.runner.ran:
            bench.step()
        written = set(bench.core.requests["gone"].table[:4])
        bench.cancel("gone")
        bench.add("r", head + prompt(4, 10), 2)
        while not bench.core.requests["r"].table:
            bench.step()
        assert written & set(bench.core.requests["r"].table[:12])
        assert bench.runner.ran < bench.runner.launched
        try:
            bench.run()
            wrong += bench.got["r"] != cold(head + prompt(4, 10), 2)
        except AssertionError:
            wrong += 1
        assert bench.moves("nvme>hbm") == 12
    assert bool(wrong) == bool(fence)


# -- a restart ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_restart_finds_what_was_persisted(seed: int) -> None:
    """PITFALLS 34, at the core: no flush, only the background writer's two seconds."""
    disk: dict[int, Any] = {}
    bench = tiered(60, nvme=200, disk=disk, seed=seed)
    tokens = prompt(1, 80)
    answer = bench.ask("a", tokens, 12)
    for _ in range(300):  # 3 s
        bench.clock.now += 0.01
        bench.core.tend()
    again = tiered(60, nvme=200, disk=disk, seed=seed)
    assert again.lower.recovered == len(disk) >= 22
    assert ask(again, "b", tokens + answer[:8], 3) == {"hbm": 0, "nvme": 84}


def test_a_flush_persists_what_is_left() -> None:
    disk: dict[int, Any] = {}
    bench = tiered(60, nvme=200, disk=disk, within=1000.0)
    tokens = prompt(1, 80)
    ask(bench, "a", tokens, 1)
    assert disk == {}
    blocks, left = bench.core.flush(30.0)
    assert (blocks, left) == (20, 0)
    assert ask(tiered(60, nvme=200, disk=disk), "b", tokens)["nvme"] == 76


def test_generated_tokens_are_persisted_while_they_come() -> None:
    disk: dict[int, Any] = {}
    bench = tiered(60, nvme=200, disk=disk, within=0.1)
    bench.add("a", prompt(1, 16), 100)
    for _ in range(90):
        bench.step()
    assert len(disk) >= 18
    bench.run()
    assert bench.got["a"] == cold(prompt(1, 16), 100)


def test_the_write_limit_bounds_what_is_written() -> None:
    bench = tiered(60, nvme=400, write_limit=10 * 32, within=0.0)
    for i in range(6):
        ask(bench, f"a{i}", prompt(i, 60))
    began = bench.clock.now
    written = bench.moves("hbm>nvme")
    for _ in range(500):
        bench.clock.now += 0.01
        bench.core.tend()
    assert 0 < bench.moves("hbm>nvme") - written <= 10 * (bench.clock.now - began) + 11


def test_an_idle_path_that_was_used_once_is_not_written_any_more() -> None:
    bench = tiered(60, nvme=400, within=1.0, session_idle=5.0)
    ask(bench, "a", prompt(1, 40), 1)
    bench.clock.now += 6.0
    bench.settle()
    assert bench.moves("hbm>nvme") == 0
    for turn in range(3):
        ask(bench, f"b{turn}", prompt(2, 40), 1)
    bench.clock.now += 6.0
    bench.settle()
    assert bench.moves("hbm>nvme") == 10


# -- namespaces --------------------------------------------------------------------------------------------


def test_salted_namespaces_never_meet() -> None:
    """PITFALLS 52: in HBM, after a spill, after a restart."""
    disk: dict[int, Any] = {}
    tokens = prompt(1, 60)
    bench = tiered(40, ram=60, nvme=200, disk=disk)
    ask(bench, "a", tokens, namespace=b"salt of a" * 3)
    for other in (b"", b"salt of b" * 3):
        assert sum(ask(bench, f"hbm {other!r}", tokens, namespace=other).values()) == 0
    ask(bench, "pusher", prompt(2, 130))
    assert sum(ask(bench, "spilled", tokens, namespace=b"salt of c").values()) == 0
    assert sum(ask(bench, "a again", tokens, namespace=b"salt of a" * 3).values()) >= 56
    bench.core.flush(30)
    again = tiered(40, ram=60, nvme=200, disk=disk)
    assert sum(ask(again, "restarted", tokens, namespace=b"salt of d").values()) == 0
    assert ask(again, "a", tokens, namespace=b"salt of a" * 3)["nvme"] == 56


def test_another_adapter_is_another_namespace() -> None:
    """PITFALLS 33: the key of an adapter is a field of its own."""
    cache = tiered(20).core.cache
    assert len({cache.namespace(b"f", adapter, b"s") for adapter in (b"", b"a", b"b")}) == 3
    assert cache.namespace(b"f", b"a", b"") != cache.namespace(b"f", b"", b"a")


# -- ends, faults, waiting -----------------------------------------------------------------------------------


def stop_in(bench: TieredBench, name: str, state: str) -> None:
    """Step until the request is in the state, then cancel it."""
    request = bench.core.requests[name]
    for _ in range(1000):
        now = request.state.value
        if now == "running":
            now = "decode" if request.generated else "prefill"
        if now == state or (state == "spilling" and bench.lower.spills.leaving):
            bench.cancel(name)
            return
        bench.step()
    raise AssertionError(f"never {state}")


@pytest.mark.parametrize("state", ["waiting", "restoring", "prefill", "decode", "spilling"])
@pytest.mark.parametrize("seed", SEEDS)
def test_an_abort_in_each_state_gives_everything_back(state: str, seed: int) -> None:
    """PITFALLS 45: free and evictable slots are what they were, and the engine lives."""
    bench = tiered(24, ram=50, nvme=100, seed=seed, step_tokens=16, ahead=0, within=1e6)
    known = prompt(1, 60)
    ask(bench, "known", known)
    ask(bench, "pusher", prompt(2, 80))
    bench.settle_moves()
    before = baseline(bench)
    if state == "spilling":
        ask(bench, "dirty", prompt(3, 80))
        bench.settle_moves()
        before = baseline(bench)
        bench.add("x", prompt(4, 80), 30)
    else:
        bench.add("x", known + prompt(5, 28), 30)
    stop_in(bench, "x", state)
    bench.settle_moves()
    assert baseline(bench) == before == 24
    assert bench.core.audit() == []
    assert bench.core.stats()["tree"]["leases"] == 0
    ask(bench, "after", known)


@pytest.mark.parametrize("seed", SEEDS)
def test_who_waits_for_a_restore_gets_it_though_its_leader_goes(seed: int) -> None:
    bench = tiered(24, ram=50, seed=seed)
    known = prompt(1, 60)
    ask(bench, "known", known)
    ask(bench, "pusher", prompt(2, 80))
    bench.add("leader", known + prompt(3, 4), 3)
    bench.add("waiter", known + prompt(4, 4), 3)
    request = bench.core.requests["leader"]
    while request.state is not State.RESTORING:
        bench.step()
    bench.cancel("leader")
    bench.run()
    assert bench.got["waiter"] == cold(known + prompt(4, 4), 3)
    assert sum(bench.cached("waiter").values()) >= 56


@pytest.mark.parametrize("what", ["read", "write", "device", "bad"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_fault_costs_a_miss_and_no_answer(what: str, seed: int) -> None:
    bench = tiered(24, ram=30, nvme=100, seed=seed, within=0.05)
    rng = random.Random(seed)
    if what == "device":
        bench.device.fail = lambda: "the link is down" if rng.random() < 0.2 else None  # type: ignore[union-attr]
    elif what == "bad":
        def spoil(op: str) -> None:
            disk = bench.nvme.disk  # type: ignore[union-attr]
            if op == "read" and disk and rng.random() < 0.3:
                slot = rng.choice(sorted(disk))
                disk[slot] = disk[slot][0]._replace(digest=bytes(16)), disk[slot][1]
        bench.nvme.fail = spoil  # type: ignore[union-attr,assignment]
    else:
        bench.nvme.fail = lambda op: (  # type: ignore[union-attr]
            OSError(5, "Input/output error") if op == what and rng.random() < 0.3 else None)
    heads = [prompt(i, 48) for i in range(5)]
    for i in range(40):
        ask(bench, f"r{i}", heads[rng.randrange(5)] + prompt(50 + rng.randrange(6), 12))
    bench.device.fail = lambda: None  # type: ignore[union-attr]
    bench.nvme.fail = lambda op: None  # type: ignore[union-attr]
    bench.clock.now += 100
    bench.core.tend()
    bench.settle()
    assert bench.core.audit() == []


def test_a_load_that_fails_is_a_reason() -> None:
    bench = tiered(20, nvme=100, within=0.0)
    first = prompt(1, 60)
    ask(bench, "a", first)
    ask(bench, "b", prompt(2, 70))
    bench.settle()
    bench.nvme.fail = lambda op: OSError(5, "Input/output error") if op == "read" else None  # type: ignore[union-attr]
    cached = ask(bench, "a again", first)
    usage = bench.last["a again"].usage
    assert usage is not None
    assert usage.computed["load_failed"] >= 32
    assert cached["nvme"] == 0
    bench.nvme.fail = lambda op: None  # type: ignore[union-attr]
    ask(bench, "c", prompt(3, 70))
    assert ask(bench, "a once more", first)["nvme"] >= 32  # a passing fault: the record was kept


def test_a_full_disk_stops_writing_and_starts_again() -> None:
    """PITFALLS 39, at the core."""
    from tiers import NoSpaceError

    bench = tiered(40, nvme=100, within=0.0)
    bench.nvme.fail = lambda op: NoSpaceError(28, "No space left") if op == "write" else None  # type: ignore[union-attr]
    ask(bench, "a", prompt(1, 60))
    for _ in range(50):
        bench.clock.now += 0.01
        bench.core.tend()
    failed = bench.lower.persist.failed  # type: ignore[union-attr]
    assert failed > 0
    for _ in range(50):
        bench.clock.now += 0.01
        bench.core.tend()
    assert bench.lower.persist.failed == failed  # type: ignore[union-attr]
    bench.nvme.fail = lambda op: None  # type: ignore[union-attr]
    bench.clock.now += 31
    bench.core.tend()
    bench.settle()
    assert len(bench.nvme.disk) >= 15  # type: ignore[union-attr]


def test_look_ahead_moves_what_a_waiting_request_will_need() -> None:
    bench = tiered(24, ram=40, nvme=200, max_running=1, within=0.0)
    known = prompt(1, 60)
    ask(bench, "known", known)
    bench.settle()
    for i in range(6):
        ask(bench, f"pusher {i}", prompt(10 + i, 80))
    bench.settle()
    assert bench.moves("nvme>ram") == 0
    bench.add("long", prompt(30, 40), 30)
    bench.step()
    bench.add("x", known, 2)
    assert bench.core.requests["x"].state is State.WAITING
    for _ in range(20):
        bench.step()
    assert bench.core.requests["x"].state is State.WAITING
    assert bench.moves("nvme>ram") >= 8
    bench.run()
    assert bench.got["x"] == cold(known, 2)
    assert bench.cached("x")["nvme"] >= 32  # look-ahead included: the lowest tier that it came from
    assert bench.moves("nvme>hbm") + bench.moves("ram>hbm") == sum(
        bench.cached("x")[tier] for tier in ("ram", "nvme")) // 4


def test_fifty_requests_that_wait_for_one_load_do_not_stop_the_others() -> None:
    bench = tiered(60, nvme=400, max_running=64, within=0.0)
    known = prompt(1, 60)
    ask(bench, "known", known)
    for i in range(4):
        ask(bench, f"pusher {i}", prompt(10 + i, 200))
    bench.settle()
    reader = bench.reader
    assert reader is not None
    reader.paused = True
    for i in range(50):
        bench.add(f"w{i}", known + prompt(100 + i, 3), 1)
    bench.add("other", prompt(5, 20), 3)
    for _ in range(40):
        bench.step()
    assert bench.got["other"] == cold(prompt(5, 20), 3)
    assert not any(f"w{i}" in bench.last for i in range(50))
    reader.paused = False
    bench.run()
    for i in range(50):
        assert bench.got[f"w{i}"] == cold(known + prompt(100 + i, 3), 1)
    assert bench.moves("nvme>hbm") <= 15


# -- a long time -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_50_000_requests_leave_no_trace() -> None:
    """PITFALLS 20: a steady load: the hit rate does not drift, nothing is leased that nobody owns, memory is flat."""
    import tracemalloc

    bench = tiered(64, ram=100, nvme=300, step_tokens=64, within=0.5)
    rng = random.Random(7)
    heads = [prompt(i, 24) for i in range(40)]

    def window(first: int, n: int) -> float:
        cached = total = 0
        for i in range(first, first + n):
            # So few that all have been ghosts in the first window: from then on memory is flat.
            tokens = heads[min(int(rng.expovariate(0.1)), 39)] + prompt(rng.randrange(40), 8)
            bench.add(f"r{i}", tokens, 2)
            while bench.core.has_work():
                bench.clock.now += 0.01
                bench.keep(bench.core.step())
            assert bench.got.pop(f"r{i}") == cold(tokens, 2)
            usage = bench.last.pop(f"r{i}").usage
            assert usage is not None
            cached, total = cached + usage.cached_tokens, total + usage.prompt_tokens
        return cached / total

    window(0, 5_000)
    tracemalloc.start()
    rates, sizes = [], []
    for i in range(9):
        rates.append(window(5_000 * (i + 1), 5_000))
        sizes.append(tracemalloc.get_traced_memory()[0])
        assert bench.core.audit() == []
        assert bench.core.stats()["tree"]["leases"] <= 4  # persist's own, under way
    tracemalloc.stop()
    assert max(rates) - min(rates) < 0.05, rates
    assert sizes[-1] < sizes[2] + 2_000_000, sizes
    assert all(bench.moves(way) > 1_000 for way in ("hbm>ram", "ram>hbm", "nvme>ram"))


def soak(seed: int) -> TieredBench:
    """Tiers of any sizes, however little fits: a crowd that shares heads, some of which go away."""
    rng = random.Random(seed)
    hbm = rng.randint(12, 60)
    bench = tiered(hbm, ram=rng.choice([0, rng.randint(1, 30)]), nvme=rng.choice([0, rng.randint(1, 90)]) or 1,
                   seed=seed, within=rng.choice([0.0, 0.1, 5.0]), ahead=rng.choice([0, 4, 16]),
                   step_tokens=rng.choice([16, 64]), max_running=rng.choice([1, 3, 8]),
                   write_limit=rng.choice([None, None, 2000]), session_idle=rng.choice([0.5, 600.0]))
    fails = rng.choice([0.0, 0.0, 0.1])
    assert bench.nvme is not None
    assert bench.device is not None
    bench.nvme.fail = lambda what: OSError(5, "Input/output error") if rng.random() < fails else None
    bench.device.fail = lambda: "the copy failed" if rng.random() < fails else None
    longest = 4 * hbm - 12
    heads = [prompt(1000 * seed + i, rng.randint(4, longest)) for i in range(rng.randint(1, 6))]
    asked: dict[str, list[int]] = {}
    for i in range(40):
        head = rng.choice(heads)
        tokens = (head[:rng.randint(1, len(head))] + prompt(seed + i, rng.randint(0, 20)))[:longest]
        asked[f"r{i}"] = tokens
        bench.add(f"r{i}", tokens, rng.randint(1, 8))
        for _ in range(rng.randint(0, 12)):
            bench.step()
        if rng.random() < 0.2 and bench.core.requests:
            bench.cancel(rng.choice(sorted(bench.core.requests)))
    bench.run(6_000)
    for name, tokens in asked.items():
        assert bench.got.get(name, []) == cold(tokens, 8)[:len(bench.got.get(name, []))], name
    return bench


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_sizes_answers_are_right_and_nothing_stands_still(seed: int) -> None:
    bench = soak(seed)
    bench.lower.persist._idle = 0.0  # type: ignore[union-attr]
    bench.clock.now += 1000
    bench.settle_moves()
    assert bench.core.stats()["leaving"] == 0
    assert bench.core.audit() == []


@pytest.mark.parametrize(("hbm", "ram", "nvme", "blocks"), [
    (182, 45, 64, 62), (45, 11, 16, 30), (40, 4, 8, 30), (40, 0, 8, 30), (40, 2, 30, 30)])
def test_paths_that_nvme_has_no_room_for_hold_up_nobody(hbm: int, ram: int, nvme: int, blocks: int) -> None:
    """What RAM would let go is dirty, and NVMe can't take it: then it is dropped, not written again and again."""
    bench = tiered(hbm, ram=ram, nvme=nvme, within=0.1, ahead=8)
    for i in range(8):
        tokens = prompt(i, 4 * blocks - 2)
        bench.add(f"r{i}", tokens, 1)
        bench.run(1_000)
        assert bench.got[f"r{i}"] == cold(tokens, 1)
    written = bench.moves("hbm>nvme") + (bench.moves("ram>nvme") if ram else 0)
    assert 0 < written < 2 * 8 * blocks


# -- a disk that fails, and long paths ---------------------------------------------------------------------


def failing() -> TieredBench:
    """A core whose disk has just failed a write, with something in line to be written."""
    bench = tiered(24, nvme=200, within=0.5)
    assert bench.nvme is not None
    bench.nvme.fail = lambda what: OSError(5, "Input/output error") if what == "write" else None
    ask(bench, "a", prompt(1, 60))
    bench.clock.now += 1
    bench.settle_moves()
    assert bench.lower.persist is not None
    assert bench.lower.persist.is_paused()
    return bench


def test_while_a_disk_fails_what_leaves_hbm_does_not_pile_up() -> None:
    """Each would keep its whole path in memory, for as long as the disk is full."""
    bench = failing()
    assert bench.lower.persist is not None
    before = bench.lower.persist.waiting()
    for i in range(20):
        ask(bench, f"b{i}", prompt(100 + i, 60))
    assert bench.lower.persist.waiting() <= before + 20  # the conversations themselves
    assert not any(line.whole for line in bench.lower.persist._line.values())


def test_paths_in_line_are_bounded_and_who_has_waited_longest_falls_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.core.persist.MOST_PATHS", 3)
    bench = tiered(60, nvme=200, within=1000.0)
    for i in range(5):
        ask(bench, f"r{i}", prompt(i, 20))
    assert bench.lower.persist is not None
    assert list(bench.lower.persist._line) == ["r2", "r3", "r4"]
    assert bench.core.stats()["persist"]["skipped"] == 2


def test_a_disk_that_fails_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = failing()
    assert bench.lower.persist is not None
    assert not bench.lower.persist.idle()
    monkeypatch.setattr("engine.core.lower.select.select", None)  # waiting would fail
    assert bench.core.flush(20.0) == (0, bench.lower.persist.waiting())


def test_digests_are_computed_for_what_goes_to_nvme_alone_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SHA-256 for each block has no place on a request's way."""
    import radix.tree

    named: list[bytes] = []
    compute = radix.tree.block_digest

    def count(parent: bytes, tokens: bytes) -> bytes:
        named.append(tokens)
        return compute(parent, tokens)

    monkeypatch.setattr(radix.tree, "block_digest", count)
    bench = tiered(20, ram=60)
    ask(bench, "a", prompt(1, 60))
    ask(bench, "b", prompt(2, 70))
    assert ask(bench, "a again", prompt(1, 60))["ram"] > 0
    assert named == []
    bench = tiered(20, nvme=60, within=0.0)
    ask(bench, "a", prompt(1, 60))
    ask(bench, "b", prompt(2, 70))
    assert ask(bench, "a again", prompt(1, 60))["nvme"] > 0
    assert len(named) == len(set(named)) > 0
