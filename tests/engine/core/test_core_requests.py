"""The life of a request in the core: hits, flights, cancels, preemption, order; on a runner that shows wrong KV."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from chain_core import Bench, cold
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.core.messages import GenerateRequest, Sampling
from engine.errors import ContextLengthError, OverloadedError, RequestError

Make = Callable[..., Bench]


def prompt(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(900), k=n)


def test_a_cold_request_computes_its_prompt_and_says_so(make: Make) -> None:
    b = make()
    assert b.ask("a", prompt(1, 10), 5) == cold(prompt(1, 10), 5)
    assert b.usage("a") == {"hbm": 0, "never_seen": 9, "last_token": 1}
    assert b.last["a"].finish == "length"
    assert b.runner.computed == 10 + 4  # the last sampled token is never computed


@pytest.mark.parametrize("n", [16, 17, 15, 1, 2, 4, 5])
def test_a_repeated_prompt_computes_its_last_token_only_whatever_its_length(make: Make, n: int) -> None:
    b = make(block_size=4)
    p = prompt(2, n)
    b.ask("a", p, 1)
    before = b.runner.computed
    assert b.ask("b", p, 3) == cold(p, 3)
    assert b.usage("b") == {"hbm": n - 1, "last_token": 1} or n == 1
    assert b.runner.computed - before == 1 + 2


def test_generated_tokens_are_reused_by_the_next_turn(make: Make) -> None:
    b = make()
    p = prompt(3, 13)
    answer = b.ask("a", p, 9)
    more = [*p, *answer, 7, 8, 9]
    assert b.ask("b", more, 4) == cold(more, 4)
    # 22 tokens of the first turn; the last sampled one has no KV, so 21 are known
    assert b.usage("b") == {"hbm": 21, "never_seen": 3, "last_token": 1}


def test_tokens_of_a_block_that_agrees_in_part_are_reused(make: Make) -> None:
    b = make(block_size=4)
    p = prompt(4, 16)
    b.ask("a", p, 1)
    other = [*p[:10], 901, 902, 903, 904, 905]
    assert b.ask("b", other, 3) == cold(other, 3)
    assert b.usage("b") == {"hbm": 10, "never_seen": 4, "last_token": 1}
    assert b.ask("c", p, 2) == cold(p, 2)


def test_a_longer_stored_entry_is_reused_up_to_where_it_agrees(make: Make) -> None:
    """71,320 of 71,324 tokens agree, scaled to this runner: all of them are reused."""
    b = make(slots=2048, block_size=16, step_tokens=4096, max_context=30_000)
    p = prompt(5, 7_132)
    b.ask("a", p, 40)
    other = [*p[:7_128], 901, 902, 903, 904]
    assert b.ask("b", other, 2) == cold(other, 2)
    assert b.usage("b") == {"hbm": 7_128, "never_seen": 3, "last_token": 1}


def test_namespaces_never_meet(make: Make) -> None:
    b = make()
    p = prompt(6, 20)
    b.ask("a", p, 2, namespace=b"one")
    b.ask("b", p, 2, namespace=b"two")
    assert b.usage("b") == {"hbm": 0, "never_seen": 19, "last_token": 1}
    b.ask("c", p, 2, namespace=b"one")
    assert b.usage("c")["hbm"] == 19


def test_what_was_evicted_is_named(make: Make) -> None:
    b = make(slots=8, block_size=4)
    p = prompt(7, 20)
    b.ask("a", p, 1)
    b.ask("b", prompt(8, 24), 1)
    b.ask("c", p, 1)
    usage = b.usage("c")
    assert usage["evicted"] > 0
    assert sum(usage.values()) == 20


# -- flights -------------------------------------------------------------------------------------------------


def test_identical_prompts_at_once_are_prefilled_once(make: Make) -> None:
    b = make()
    p = prompt(9, 40)
    for name in "abcdef":
        b.add(name, p, 3)
    b.run()
    assert all(b.got[n] == cold(p, 3) for n in "abcdef")
    # one prefill; each of the others computes the last token of its prompt, and all decode two more
    assert b.runner.computed == 40 + 5 * 1 + 6 * 2
    assert sorted(b.usage(n)["hbm"] for n in "abcdef") == [0, 39, 39, 39, 39, 39]
    assert b.core.scheduler.flights.joined == 5
    assert len(b.core.scheduler.flights) == 0


def test_a_waiter_wakes_when_its_last_shared_block_is_committed(make: Make) -> None:
    b = make(slots=128, block_size=4, step_tokens=64)
    p = prompt(10, 320)
    b.add("long", p, 1)
    b.add("short", [*p[:66], 901, 902], 1)
    b.step()
    b.step()
    b.step()
    assert "short" in b.last
    assert "long" not in b.last
    b.run()
    assert b.usage("short")["hbm"] == 64


def test_when_the_leader_goes_away_another_leads_from_what_is_ready(make: Make) -> None:
    b = make(slots=128, block_size=4, step_tokens=64)
    p = prompt(11, 200)
    for name in "abc":
        b.add(name, p, 2)
    b.step()
    b.step()
    b.cancel("a")
    b.run()
    assert b.got["b"] == b.got["c"] == cold(p, 2)
    assert b.usage("b")["hbm"] == 128 or b.usage("c")["hbm"] == 128
    assert b.runner.computed <= 200 + 4 + 2 + 2


def test_a_waiter_that_is_cancelled_leaves_nothing(make: Make) -> None:
    b = make(step_tokens=16)
    p = prompt(12, 60)
    b.add("a", p, 2)
    b.add("b", p, 2)
    b.step()
    b.cancel("b")
    assert b.core.scheduler.n_waiting() == 0
    b.run()
    assert b.got["a"] == cold(p, 2)


# -- cancel --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 8])
def test_a_cancel_in_any_state_returns_every_slot(make: Make, steps: int) -> None:
    """steps 0: waiting; 1, 2: prefill; 5, 8: decode."""
    b = make(slots=64, block_size=4, step_tokens=64)
    b.ask("warm", prompt(13, 30), 2)
    baseline = b.core.cache.available()
    b.add("a", prompt(14, 200), 30)
    for _ in range(steps):
        b.step()
    b.cancel("a")
    assert not b.core.has_work()
    assert b.core.cache.available() == baseline
    assert b.core.audit() == []
    assert b.last["a"].finish == "cancelled"
    assert b.ask("c", prompt(15, 100), 3) == cold(prompt(15, 100), 3)


def test_a_prefill_cancelled_at_60_percent_leaves_what_it_did_for_the_retry(make: Make) -> None:
    b = make(slots=512, block_size=4, step_tokens=64)
    p = prompt(16, 960)
    b.add("a", p, 2)
    for _ in range(9):
        b.step()
    b.cancel("a")
    assert b.ask("b", p, 2) == cold(p, 2)
    assert b.usage("b")["hbm"] == 576


def test_cancelling_twice_or_what_was_never_there_is_harmless(make: Make) -> None:
    b = make()
    b.add("a", prompt(1, 5), 2)
    b.cancel("a")
    assert b.core.cancel("a") is None
    assert b.core.cancel("nobody") is None


def test_a_step_that_fails_ends_its_requests_and_the_core_lives(make: Make) -> None:
    b = make(slots=32)
    baseline = b.core.cache.available()
    b.add("a", prompt(1, 20), 5)
    b.runner.fail_at = 2
    b.step()
    with pytest.raises(RuntimeError) as caught:
        b.core.step()
    b.keep(b.core.fail_running(caught.value))
    assert b.last["a"].finish == "error"
    assert "on fire" in (b.last["a"].error or "")
    assert b.core.audit() == []
    assert b.core.cache.available() == baseline
    assert b.ask("b", prompt(1, 20), 2) == cold(prompt(1, 20), 2)


# -- preemption and order ------------------------------------------------------------------------------------


def test_when_slots_run_out_the_last_admitted_is_preempted_and_resumes(make: Make) -> None:
    b = make(slots=20, block_size=4)
    p, q = prompt(17, 30), prompt(18, 30)
    b.add("a", p, 24)
    b.add("b", q, 24)
    b.run()
    assert b.core.scheduler.preemptions > 0
    assert b.got["a"] == cold(p, 24)
    assert b.got["b"] == cold(q, 24)
    assert b.usage("b") == {"hbm": 0, "never_seen": 29, "last_token": 1}  # counted once, no hit of its own work


def test_a_preempted_request_resumes_from_its_blocks(make: Make) -> None:
    b = make(slots=64, block_size=4)
    p = prompt(19, 41)
    b.add("a", p, 20)
    for _ in range(6):
        b.step()
    b.core.scheduler._preempt(b.core.requests["a"])
    before = b.runner.computed
    b.step()
    assert b.runner.computed - before == 1  # as if it had never been away
    b.run()
    assert b.got["a"] == cold(p, 20)


def test_a_prompt_that_needs_every_slot_is_not_kept_out_by_a_block_that_agrees_in_part(make: Make) -> None:
    """Holding that block to copy it takes a slot more than the pool has: it waited for ever, and all others with it."""
    b = make(slots=4, block_size=4)
    p = prompt(25, 15)
    b.ask("a", p, 1)
    other = [*p[:2], 901, *prompt(26, 12)]
    assert b.ask("b", other, 1) == cold(other, 1)
    assert b.usage("b") == {"hbm": 0, "block_rounding": 2, "never_seen": 12, "last_token": 1}


@pytest.mark.parametrize("slots", [4, 5, 7])
def test_a_preempted_request_with_tokens_for_the_whole_pool_resumes(make: Make, slots: int) -> None:
    """With blocks of one token, what it shared is its own again, and it needs a slot for each token, and none more."""
    b = make(slots=slots, block_size=1)
    b.add("a", [7], 9)
    b.add("b", [7], 20)
    b.run(100)
    assert b.core.scheduler.preemptions > 0
    assert all(b.got[n] == cold([7], len(b.got[n])) and b.last[n].finish == "length" for n in "ab")
    assert len(b.got["b"]) >= slots - 1


def test_a_preempted_request_does_not_wait_for_a_prompt_in_prefill(make: Make) -> None:
    """What it has to compute is one token, not its length less what was known of it when it came."""
    b = make(slots=256, block_size=4, step_tokens=64)
    long, p = prompt(27, 500), prompt(28, 200)
    b.add("long", long, 1)
    b.step()
    b.add("a", p, 40)
    while b.core.requests["long"].remaining > 150:
        b.step()
    assert b.got["a"]
    b.core.scheduler._preempt(b.core.requests["a"])
    before = len(b.got["a"])
    b.step()
    assert "long" not in b.last
    assert len(b.got["a"]) == before + 1
    b.run()
    assert b.got["a"] == cold(p, 40)


def test_a_preempted_request_that_waited_in_a_flight_comes_back_to_the_front(make: Make) -> None:
    b = make(slots=64, block_size=4, max_running=2, step_tokens=16)
    scheduler = b.core.scheduler
    head = prompt(29, 40)
    b.add("leader", head, 9)
    b.step()
    b.add("older", prompt(30, 30), 9)
    b.add("late", [*head[:20], 901], 9)
    late = b.core.requests["late"]
    late.preempted = 1  # as if it had run, and its blocks had been evicted since
    scheduler.waiting.reverse()
    scheduler.plan()
    assert scheduler.flights.waiting() == 1
    b.cancel("leader")
    assert scheduler.waiting[0] is late
    b.run()
    assert b.got["late"] == cold([*head[:20], 901], 9)


def test_longest_known_prefix_goes_first(make: Make) -> None:
    b = make(slots=256, block_size=4, max_running=1)
    known = prompt(20, 100)
    b.ask("first", known, 1)
    b.add("cold", prompt(21, 100), 1)
    b.add("warm", [*known, 901], 1)
    b.step()
    assert "warm" in b.last
    assert "cold" not in b.last


def test_a_cold_request_is_not_starved_by_an_endless_line_of_warm_ones(make: Make) -> None:
    b = make(slots=512, block_size=4, max_running=1)
    known = prompt(22, 400)
    b.ask("seed", known, 1)
    b.add("cold", prompt(23, 100), 1)
    for i in range(200):
        b.add(f"warm{i}", [*known, 901, i], 1)
        b.step()
        if "cold" in b.last:
            break
    assert "cold" in b.last
    assert i < 100


def test_the_step_budget_counts_computed_tokens_only(make: Make) -> None:
    b = make(slots=512, block_size=4, step_tokens=64)
    known = prompt(24, 600)
    b.ask("seed", known, 1)
    for i in range(8):
        b.add(f"w{i}", [*known, 901, 902, i], 1)
    b.step()
    assert len([n for n in b.last if n.startswith("w")]) == 8  # 8 x 3 computed tokens fit, 8 x 603 would not


def test_every_agent_hits_when_there_is_room_for_all(make: Make) -> None:
    for agents in (1, 2, 5, 9):
        b = make(slots=agents * 14, block_size=4, max_running=2)
        transcripts = {i: prompt(100 + i, 21) for i in range(agents)}
        for turn in range(3):
            for i, t in transcripts.items():
                b.ask(f"{i}-{turn}", t, 4)
                if turn:
                    assert b.usage(f"{i}-{turn}")["hbm"] == len(t) - 3
                t += [*b.got[f"{i}-{turn}"], 950, 951]


# -- bad input -----------------------------------------------------------------------------------------------


def test_a_prompt_over_the_context_is_refused_with_both_numbers(make: Make) -> None:
    b = make(max_context=50)
    with pytest.raises(ContextLengthError, match=r"50.*|.*50") as caught:
        b.add("a", prompt(1, 51), 1)
    assert "51" in caught.value.message
    assert not b.core.has_work()


def test_a_prompt_over_the_pool_is_refused_with_both_numbers(make: Make) -> None:
    b = make(slots=4, block_size=4)
    with pytest.raises(ContextLengthError) as caught:
        b.add("a", prompt(1, 16), 1)
    assert "16 tokens" in caught.value.message
    assert "--hbm" in caught.value.message
    assert b.ask("b", prompt(1, 15), 1) == cold(prompt(1, 15), 1)


def test_an_answer_that_reaches_the_end_of_the_pool_ends_with_length(make: Make) -> None:
    b = make(slots=6, block_size=4)
    assert b.ask("a", prompt(1, 10), 100) == cold(prompt(1, 10), len(b.got["a"]))
    assert b.last["a"].finish == "length"
    assert 10 + len(b.got["a"]) >= 23


@pytest.mark.parametrize("raw", [b"", b"\x01\x00\x00", (-1).to_bytes(4, "little", signed=True),
                                 (997).to_bytes(4, "little")])
def test_ids_that_are_none_are_refused(make: Make, raw: bytes) -> None:
    b = make()
    with pytest.raises(RequestError):
        b.core.add(GenerateRequest("a", raw, Sampling(max_tokens=1)))
    assert not b.core.has_work()


def test_a_full_queue_refuses_one_more(make: Make) -> None:
    b = make(max_waiting=2)
    b.add("a", prompt(1, 5), 1)
    b.add("b", prompt(2, 5), 1)
    with pytest.raises(OverloadedError):
        b.add("c", prompt(3, 5), 1)
    b.run()


# -- everything at once --------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_mix_of_sessions_cancels_and_tiny_pools_gives_the_cold_answers(make: Make, data: st.DataObject) -> None:
    b = make(slots=data.draw(st.integers(12, 40)), block_size=data.draw(st.sampled_from([2, 4])),
             step_tokens=data.draw(st.sampled_from([16, 64])), max_running=data.draw(st.integers(1, 5)))
    rng = random.Random(data.draw(st.integers(0, 10_000)))
    heads = [prompt(i, rng.randint(1, 12)) for i in range(3)]
    asked: dict[str, tuple[list[int], int]] = {}
    for i in range(25):
        for _ in range(rng.randint(0, 3)):
            b.step()
        base = rng.choice([*heads, *(p + b.got.get(n, []) for n, (p, _) in list(asked.items())[-4:])])
        p, n = [*base, *rng.choices(range(5), k=rng.randint(1, 4))], rng.randint(1, 6)
        if len(p) + n + 4 > b.core.pool_tokens:
            continue
        b.add(str(i), p, n)
        asked[str(i)] = p, n
        if rng.random() < 0.15 and b.core.requests:
            b.cancel(rng.choice(list(b.core.requests)))
    b.run()
    for name, (p, n) in asked.items():
        got = b.got[name]
        assert got == cold(p, len(got))
        assert b.last[name].finish == "cancelled" or len(got) == n
        if b.last[name].finish != "cancelled":
            assert sum(b.usage(name).values()) == len(p)
    assert b.core.cache.available() == b.core.cache.slots.capacity
    assert b.core.audit() == []
