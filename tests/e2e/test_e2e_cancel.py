"""Clients that go away, and clients that ask the same at once. Counts, not times."""

from __future__ import annotations

import random
from typing import Any

from e2e_server import CHAT, COMPLETIONS, Server, chat_body, fresh

LONG, BLOCK = 1200, 16


def prompt_ids(n: int = LONG) -> list[int]:
    """n ids that no test has sent before. Ordinary tokens; what they say does not matter."""
    return random.SystemRandom().choices(range(1000, 40_000), k=n)


def body_of(ids: list[int], **fields: Any) -> dict[str, Any]:
    return {"prompt": ids, "temperature": 0, "ignore_eos": True, **fields}


def computed(server: Server) -> int:
    return int(server.stats()["tokens"]["computed_in_steps"])


def gone_within_two_steps(server: Server) -> None:
    """Nothing runs or waits at most two steps after the server could know of it, and none is made any more."""
    known = server.stats()["speeds"]["steps"]
    server.idle()
    ended = server.stats()["speeds"]["steps"]
    assert ended - known <= 2
    assert server.stats()["speeds"]["steps"] == ended


def test_a_client_that_leaves_in_mid_stream_stops_the_work(server: Server) -> None:
    """PITFALLS 46, and every slot comes back (45, decode)."""
    baseline, before = server.available(), server.stats()
    stream = server.open(CHAT, chat_body(fresh("Tell me everything."), max_tokens=4000, ignore_eos=True))
    stream.read(8)
    assert server.requests("running") == 1
    stream.leave()
    gone_within_two_steps(server)
    after = server.stats()
    assert after["requests"]["cancelled"] == before["requests"]["cancelled"] + 1
    # what was decoded is counted, and it is nowhere near what was asked for
    assert 6 <= after["tokens"]["generated"] - before["tokens"]["generated"] < 400
    assert server.available() == baseline == server.slots()


def test_a_client_that_leaves_an_unstreamed_reply_stops_the_work(server: Server) -> None:
    before = server.stats()
    stream = server.open(COMPLETIONS, {**body_of(prompt_ids(20), max_tokens=4000)})
    plain = server.connect()
    plain.request("POST", COMPLETIONS, body=b'{"prompt": [1000, 1001], "max_tokens": 4000, "ignore_eos": true}')
    server.wait(lambda: server.requests("running") == 2)
    plain.close()
    server.wait(lambda: server.requests("running") == 1)
    stream.leave()
    gone_within_two_steps(server)
    assert server.requests("cancelled") == before["requests"]["cancelled"] + 2
    assert server.available() == server.slots()


def test_a_prefill_that_was_cancelled_is_not_lost(server: Server) -> None:
    """PITFALLS 45 and 47: cancelled at 60%, every slot comes back, and the retry finds at least half."""
    ids, before = prompt_ids(), computed(server)
    stream = server.open(COMPLETIONS, body_of(ids, max_tokens=4))
    server.wait(lambda: computed(server) - before >= 0.6 * len(ids))
    stream.leave()
    server.idle()
    done = computed(server) - before
    assert 0.6 * len(ids) <= done <= len(ids)
    assert server.available() == server.slots()
    retry = server.complete(ids, max_tokens=2)
    assert retry.cached >= len(ids) / 2
    assert retry.cached >= done // BLOCK * BLOCK - 1
    assert computed(server) - before <= len(ids) + BLOCK + 2  # no token twice, but for the open block


def test_who_waits_is_cancelled_without_a_trace(small: Server) -> None:
    """PITFALLS 45, waiting: two run, the third waits and leaves."""
    before = small.stats()
    running = [small.open(COMPLETIONS, body_of(prompt_ids(40), max_tokens=300)).read(1) for _ in range(2)]
    third = small.open(COMPLETIONS, body_of(prompt_ids(40), max_tokens=300))
    small.wait(lambda: small.requests("waiting") == 1)
    third.leave()
    small.wait(lambda: small.requests("waiting") == 0)
    now = small.stats()
    assert now["requests"]["running"] == 2
    assert now["requests"]["cancelled"] == before["requests"]["cancelled"] + 1
    assert now["tokens"]["prompt"] == before["tokens"]["prompt"]  # it was never admitted, so never counted
    for stream in running:
        stream.leave()
    gone_within_two_steps(small)
    assert small.available() == small.slots()


def test_who_waited_runs_when_there_is_room(small: Server) -> None:
    """More at once than may run: all are answered, as if alone."""
    prompts = [prompt_ids(30) for _ in range(5)]
    together = small.together([lambda p=p: small.complete(p, max_tokens=5) for p in prompts])
    alone = [small.complete(p, max_tokens=5) for p in prompts]
    assert [a.body["choices"][0]["text"] for a in together] == [a.body["choices"][0]["text"] for a in alone]
    assert all(a.usage["prompt_tokens"] == 30 for a in together)
    assert small.available() == small.slots()


def test_equal_prompts_at_once_are_prefilled_once(server: Server) -> None:
    """PITFALLS 49."""
    n = 600
    ids, before = prompt_ids(n), server.stats()
    answers = server.together([lambda: server.complete(ids, max_tokens=3) for _ in range(4)])
    after = server.stats()
    assert len({a.body["choices"][0]["text"] for a in answers}) == 1
    # The leader's last block is open while it decodes, so the others may compute what is in it once more.
    first, *others = sorted(a.cached for a in answers)
    assert first == 0
    assert all(n // BLOCK * BLOCK <= cached < n for cached in others)
    assert after["requests"]["joined_flights"] - before["requests"]["joined_flights"] >= 1
    steps = after["tokens"]["computed_in_steps"] - before["tokens"]["computed_in_steps"]
    assert steps == n + sum(n - cached for cached in others) + 4 * 2  # two decodes of each


def test_when_the_leader_leaves_another_goes_on_from_what_is_there(server: Server) -> None:
    """PITFALLS 49: the leader is cancelled in its prefill while two wait for it."""
    ids, before = prompt_ids(), server.stats()
    cold = before["tokens"]["computed_in_steps"]
    leader = server.open(COMPLETIONS, body_of(ids, max_tokens=3))
    server.wait(lambda: server.requests("running") == 1)
    waiters = [server.open(COMPLETIONS, body_of(ids, max_tokens=3)) for _ in range(2)]
    server.wait(lambda: server.requests("waiting") == 2)
    assert computed(server) - cold < len(ids)
    leader.leave()
    texts = set()
    for stream in waiters:
        texts.add("".join(c["text"] for e in stream.rest() if e != "[DONE]" for c in e["choices"]))
        assert stream.events[-1] == "[DONE]"
        stream.leave()
    assert len(texts) == 1
    server.idle()
    # what each leader had done was not done again, but for its open block
    assert computed(server) - cold <= len(ids) + 2 * BLOCK + 2 * 2
    assert server.available() == server.slots()
    assert server.complete(ids, max_tokens=3).body["choices"][0]["text"] in texts
