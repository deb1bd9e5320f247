"""The replay: what is sent, in which order, and what a failure does to the rest."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from engine.trace.client import ContextReached, Counts, Reply, TurnFailed
from engine.trace.errors import TraceError
from engine.trace.formats import Session
from engine.trace.replay import Replay, Replayed, ReplaySettings
from engine.trace.report import text_digest

Answer = Callable[[int, Mapping[str, Any]], str]


def session(name: str, turns: int, **options: Any) -> Session:
    messages: list[dict[str, Any]] = [{"role": "system", "content": name}]
    for turn in range(turns):
        messages += [{"role": "user", "content": f"{name}{turn}"},
                     {"role": "assistant", "content": f"recorded {name}{turn}"}]
    return Session(name, messages, **options)


class FakeClient:
    """Answers by a rule, a loop's turn later, and notes what was asked and how many at once."""

    def __init__(self, answer: Answer = lambda number, body: str(body["messages"][-1]["content"])) -> None:
        self.bodies: list[Mapping[str, Any]] = []
        self.running = self.most = 0
        self._answer = answer

    async def chat(self, body: Mapping[str, Any]) -> Reply:
        self.bodies.append(body)
        number = len(self.bodies) - 1
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        return Reply(0.0, 1.0, [0.5], [self._answer(number, body)], "stop", Counts(prompt=1))

    @property
    def asked(self) -> list[str]:
        """The last message of each request."""
        return [str(b["messages"][-1]["content"]) for b in self.bodies]


def play(sessions: list[Session], client: FakeClient | None = None, sleep: Any = asyncio.sleep,
         **settings: Any) -> tuple[Replayed, FakeClient]:
    client = client or FakeClient()
    replay = Replay(client, sessions, ReplaySettings(**settings), clock=itertools.count().__next__, sleep=sleep)
    return asyncio.run(replay.run()), client


def test_each_turn_is_the_recorded_transcript_up_to_the_next_reply() -> None:
    s = session("a", 3)
    seen, client = play([s], FakeClient(lambda number, body: "generated"))
    assert [b["messages"] for b in client.bodies] == [s.messages[:2], s.messages[:4], s.messages[:6]]
    assert "generated" not in str(client.bodies)
    assert [(r.session, r.turn, r.order, r.reply.text) for r in seen.rows] == [
        (0, 0, 0, "generated"), (0, 1, 1, "generated"), (0, 2, 2, "generated")]


def test_a_request_streams_with_usage_and_is_greedy() -> None:
    _, client = play([session("a", 1)], max_tokens=24)
    options = {k: v for k, v in client.bodies[0].items() if k != "messages"}
    assert options == {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0,
                       "max_tokens": 24}


def test_options_that_were_asked_for_are_sent() -> None:
    _, client = play([session("a", 1)], ignore_eos=True, temperature=0.7)
    assert (client.bodies[0]["ignore_eos"], client.bodies[0]["temperature"]) == (True, 0.7)


def test_tools_are_passed_when_the_trace_has_them() -> None:
    tools = [{"type": "function", "function": {"name": "read"}}]
    _, client = play([session("a", 1, tools=tools), session("b", 1)])
    assert [b.get("tools") for b in client.bodies] == [tools, None]


def test_no_session_plays_more_turns_than_allowed() -> None:
    _, client = play([session("a", 5), session("b", 1)], max_turns=2)
    assert client.asked == ["a0", "a1", "b0"]


def test_workers_play_whole_sessions_one_after_another() -> None:
    _, client = play([session(n, 2) for n in "abcd"], concurrency=2)
    assert client.most == 2
    assert client.asked == ["a0", "b0", "a1", "b1", "c0", "d0", "c1", "d1"]


def test_interleaved_each_next_turn_queues_behind_everybody_elses() -> None:
    _, client = play([session(n, 2) for n in "abc"], interleave=True)
    assert client.asked == ["a0", "b0", "c0", "a1", "b1", "c1"]


@pytest.mark.parametrize("interleave", [False, True])
def test_every_turn_is_played_once_whatever_the_concurrency(interleave: bool) -> None:
    sessions = [session(n, t) for n, t in zip("abcde", (1, 4, 2, 5, 3), strict=True)]
    for concurrency in (1, 2, 3, 8):
        seen, client = play(sessions, concurrency=concurrency, interleave=interleave)
        assert len(seen.rows) == len(set(client.asked)) == 15
        assert sorted(r.order for r in seen.rows) == list(range(15))


def test_the_digest_is_of_the_text_alone() -> None:
    sessions = [session(n, 3) for n in "abcd"]
    digests = {text_digest(play(sessions, concurrency=c, interleave=i)[0].rows)
               for c in (1, 3) for i in (False, True)}
    assert len(digests) == 1
    other = play(sessions, FakeClient(lambda n, body: "?" if n == 7 else str(body["messages"][-1]["content"])))
    assert text_digest(other[0].rows) not in digests


def test_recorded_waits_are_scaled_and_by_default_left_out() -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    s = session("a", 3, wait_ms=[0.0, 500.0, 2000.0])
    play([s], sleep=sleep)
    assert waited == []
    play([s], sleep=sleep, speedup=2.0)
    assert waited == [0.0, 0.25, 1.0]


def test_an_error_is_counted_and_the_session_goes_on() -> None:
    def answer(number: int, body: Mapping[str, Any]) -> str:
        if number in (1, 2):
            raise TurnFailed("HTTP 500: out of order")
        return "ok"

    seen, client = play([session("a", 4)], FakeClient(answer))
    assert (len(seen.rows), seen.errors, seen.error_messages) == (2, 2, {"HTTP 500: out of order": 2})
    assert client.asked == ["a0", "a1", "a2", "a3"]


def test_a_session_at_the_context_limit_stops_and_is_no_error() -> None:
    def answer(number: int, body: Mapping[str, Any]) -> str:
        if body["messages"][-1]["content"] == "a1":
            raise ContextReached("9,000 of 8,192")
        return "ok"

    seen, client = play([session("a", 4), session("b", 2)], FakeClient(answer))
    assert (seen.stopped_at_context, seen.errors, seen.context_message) == (1, 0, "9,000 of 8,192")
    assert client.asked == ["a0", "a1", "b0", "b1"]


def test_a_cancelled_replay_returns_what_there_is() -> None:
    async def main() -> Replayed:
        third = asyncio.Event()

        class Slow(FakeClient):
            async def chat(self, body: Mapping[str, Any]) -> Reply:
                if len(self.bodies) == 2:
                    third.set()
                    await asyncio.Event().wait()
                return await super().chat(body)

        replay = Replay(Slow(), [session("a", 5)], ReplaySettings(), clock=lambda: 0.0)
        task = asyncio.create_task(replay.run())
        await third.wait()
        task.cancel()
        return await task

    seen = asyncio.run(main())
    assert (len(seen.rows), seen.interrupted) == (2, True)


CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a.py"}'}}
WITH_TOOLS = Session("t", [
    {"role": "user", "content": "Fix it."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "x = 1"},
    {"role": "assistant", "content": "Done."},
], tools=[{"type": "function", "function": {"name": "read"}}])


def test_tools_are_folded_to_text_when_asked_for() -> None:
    _, client = play([WITH_TOOLS], fold_tools=True)
    first, second = client.bodies
    assert "tools" not in second
    assert {m["role"] for m in second["messages"]} <= {"system", "user", "assistant"}
    assert all(isinstance(m["content"], str) and "tool_calls" not in m for m in second["messages"])
    assert second["messages"][: len(first["messages"])] == first["messages"]
    assert "x = 1" in second["messages"][-1]["content"]


def test_by_default_tools_are_sent_as_they_are() -> None:
    _, client = play([WITH_TOOLS])
    assert client.bodies[1]["messages"] == WITH_TOOLS.messages[:3]


def test_what_can_not_be_folded_is_said_before_anything_is_sent() -> None:
    picture = Session("p", [{"role": "user", "content": [{"type": "image_url"}]}])
    with pytest.raises(TraceError, match="session p can't be folded"):
        play([session("a", 1), picture], fold_tools=True)


def test_more_workers_than_sessions_are_not_made() -> None:
    """--concurrency 1000000000 is no billion tasks."""
    seen, _ = play([session("a", 1)], concurrency=10**9)
    assert (len(seen.rows), seen.errors) == (1, 0)
