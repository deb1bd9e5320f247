"""The core's side of the socket: frames however they are cut, one loop, and its end."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from chain_core import Bench, cold, ids, tokens
from hypothesis import given
from hypothesis import strategies as st

from engine.config import ServeConfig
from engine.core.client import CORE_FIELDS
from engine.core.frames import HEADER, MAX_FRAME, FrameReader, frame
from engine.core.messages import (
    Delta,
    GenerateRequest,
    Sampling,
    TokenLogprobs,
    Usage,
    pack,
    pack_delta,
    pack_request,
    unpack,
    unpack_delta,
    unpack_request,
)
from engine.core.process import CoreLoop, Gone

Make = Callable[..., Bench]
#: Generous: it only bounds a test that hangs.
WAIT_S = 60

# -- frames --------------------------------------------------------------------------------------------------

messages = st.recursive(
    st.none() | st.booleans() | st.integers(-2**63, 2**63 - 1) | st.text(max_size=20) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8)


@given(st.lists(messages, max_size=6), st.lists(st.integers(0, 400), max_size=30))
def test_frames_come_whole_however_the_stream_is_cut(sent: list[Any], cuts: list[int]) -> None:
    stream = b"".join(frame(m) for m in sent)
    at = sorted({0, *(c % (len(stream) + 1) for c in cuts), len(stream)})
    reader = FrameReader()
    got = [m for a, b in itertools.pairwise(at) for m in reader.feed(stream[a:b])]
    assert got == sent
    assert reader.feed(b"") == []


@given(st.lists(messages, min_size=1, max_size=3))
def test_frames_come_byte_by_byte_and_not_before_their_last(sent: list[Any]) -> None:
    reader, got = FrameReader(), []
    for number, message in enumerate(sent, 1):
        *most, last = frame(message)
        assert all(reader.feed(bytes([b])) == [] for b in most)
        got += reader.feed(bytes([last]))
        assert len(got) == number
    assert got == sent


def test_a_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(ValueError, match=str(MAX_FRAME + 1)):
        FrameReader().feed(HEADER.pack(MAX_FRAME + 1))


floats = st.floats(allow_nan=False)
samplings = st.builds(
    Sampling, max_tokens=st.integers(1, 2**31), temperature=floats, top_p=floats, top_k=st.integers(0, 2**31),
    min_p=floats, seed=st.none() | st.integers(-2**63, 2**63 - 1), min_tokens=st.integers(0, 99),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple), ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20))
logprobs = st.builds(TokenLogprobs, st.integers(0, 2**31 - 1), floats,
                     st.lists(st.tuples(st.integers(0, 2**31 - 1), floats), max_size=3).map(tuple))
counts = st.dictionaries(st.sampled_from(["hbm", "never_seen", "last_token"]), st.integers(0, 2**40))
usages = st.builds(Usage, st.integers(0, 2**40), st.integers(0, 2**40), counts, counts)


@given(st.builds(GenerateRequest, st.text(), st.binary(), samplings, st.binary(max_size=32),
                 st.none() | st.text()))
def test_a_request_is_itself_behind_the_socket(request: GenerateRequest) -> None:
    assert unpack_request(unpack(pack(pack_request(request)))) == request


@given(st.builds(Delta, st.text(), st.binary(), st.none() | st.lists(logprobs, max_size=3),
                 st.sampled_from([None, "stop", "length", "cancelled", "error"]), st.none() | usages,
                 st.none() | st.text(), st.none() | st.integers(0, 2**31 - 1), st.integers(0, 2**31),
                 st.integers(0, 2**31)))
def test_a_delta_is_itself_behind_the_socket(delta: Delta) -> None:
    assert unpack_delta(unpack(pack(pack_delta(delta)))) == delta


# -- the loop ------------------------------------------------------------------------------------------------


class Peer:
    """The API process: it talks to a loop that runs in a thread. `end` is what ended the loop."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.end: BaseException | None = None
        self._reader = FrameReader()
        self._pending: list[dict[str, Any]] = []
        sock.settimeout(WAIT_S)

    def send(self, message: dict[str, Any], *, each: int = 1 << 20) -> None:
        data = frame(message)
        for i in range(0, len(data), each):
            self.sock.sendall(data[i:i + each])

    def ask(self, name: str, prompt: list[int], n: int = 4, *, each: int = 1 << 20) -> None:
        sampling = Sampling(max_tokens=n, temperature=0)
        self.send(pack_request(GenerateRequest(name, ids(prompt), sampling)), each=each)

    def next(self) -> dict[str, Any]:
        while not self._pending:
            data = self.sock.recv(1 << 16)
            assert data, "the core closed its socket"
            self._pending += self._reader.feed(data)
        return self._pending.pop(0)

    def reply(self, name: str) -> tuple[list[int], Delta]:
        """Tokens and last delta of one request; what others got is dropped."""
        got: list[int] = []
        while True:
            message = self.next()
            assert message["op"] == "deltas", message
            for delta in map(unpack_delta, message["deltas"]):
                if delta.id == name:
                    got += tokens(delta.ids)
                    if delta.finish:
                        return got, delta

    def stats(self, *, audit: bool = False) -> dict[str, Any]:
        """The counters; deltas that come before them are dropped."""
        self.send({"op": "stats", "id": "s", "audit": audit})
        while (message := self.next())["op"] != "stats":
            pass
        return message


@contextmanager
def looping(bench: Bench) -> Iterator[Peer]:
    ours, theirs = socket.socketpair()
    peer = Peer(ours)

    def work() -> None:
        try:
            CoreLoop(theirs, bench.core).run()
        except BaseException as e:
            peer.end = e
        finally:
            theirs.close()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield peer
    finally:
        ours.close()
        thread.join(WAIT_S)
        assert not thread.is_alive()


PROMPT = list(range(3, 33))


def test_a_request_is_answered_and_the_loop_ends_with_its_socket(make: Make) -> None:
    with looping(make()) as peer:
        peer.ask("a", PROMPT, 6)
        got, last = peer.reply("a")
        assert got == cold(PROMPT, 6)
        assert last.finish == "length"
        assert last.usage == Usage(30, 6, {"hbm": 0}, {"never_seen": 29, "last_token": 1})
    assert isinstance(peer.end, Gone)


def test_a_request_that_comes_byte_by_byte_is_the_same(make: Make) -> None:
    with looping(make()) as peer:
        peer.ask("a", PROMPT, 3, each=1)
        assert peer.reply("a")[0] == cold(PROMPT, 3)


def test_the_loop_ends_in_the_middle_of_work_when_the_socket_closes(make: Make) -> None:
    with looping(make(slots=4096, max_context=16_000)) as peer:
        peer.ask("a", PROMPT, 12_000)
        peer.next()
    assert isinstance(peer.end, Gone)


def test_a_refusal_names_its_class_and_its_numbers(make: Make) -> None:
    with looping(make(max_context=20)) as peer:
        peer.ask("a", PROMPT)
        said = peer.next()
        assert (said["op"], said["id"], said["error"], said["code"]) == (
            "refused", "a", "ContextLengthError", "context_length_exceeded")
        assert "30" in said["message"]
        assert "20" in said["message"]
        peer.ask("b", PROMPT[:9], 2)
        assert peer.reply("b")[0] == cold(PROMPT[:9], 2)


def test_a_cancel_brings_the_last_delta_and_every_slot_back(make: Make) -> None:
    bench = make(slots=4096, max_context=16_000)
    with looping(bench) as peer:
        before = peer.stats()["stats"]["tiers"]["hbm"]
        peer.ask("a", PROMPT, 12_000)
        peer.next()
        peer.send({"op": "cancel", "id": "a"})
        _, last = peer.reply("a")
        assert last.finish == "cancelled"
        after = peer.stats(audit=True)
        hbm = after["stats"]["tiers"]["hbm"]
        assert hbm["free"] + hbm["evictable"] == before["free"] + before["evictable"]
        assert after["stats"]["requests"]["running"] == 0
        assert after["audit"] == []


def test_a_cancel_of_nobody_says_nothing(make: Make) -> None:
    with looping(make()) as peer:
        peer.send({"op": "cancel", "id": "nobody"})
        peer.send({"op": "stats", "id": "s"})
        assert peer.next()["op"] == "stats"


def test_a_step_that_raises_ends_what_ran_and_the_loop_lives(
        make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    bench = make()
    bench.runner.fail_at = 1
    with looping(bench) as peer:
        peer.ask("a", PROMPT)
        _, last = peer.reply("a")
        assert (last.finish, last.error) == ("error", "the step failed: RuntimeError: the device is on fire")
        peer.ask("b", PROMPT)
        assert peer.reply("b")[0] == cold(PROMPT, 4)
        assert peer.stats(audit=True)["audit"] == []
    assert "the device is on fire" in capsys.readouterr().err


def test_a_plan_that_raises_with_nothing_running_ends_the_core(
        make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody could be told otherwise, and the loop would spin: the API process sees the end and starts it again."""
    bench = make()

    def plan() -> None:
        raise RuntimeError("a bug of ours")
    monkeypatch.setattr(bench.core.scheduler, "plan", plan)
    with looping(bench) as peer:
        peer.ask("a", PROMPT)
        assert peer.sock.recv(1) == b""
    assert isinstance(peer.end, RuntimeError)
    capsys.readouterr()


def test_a_peer_that_does_not_read_does_not_stop_the_loop(make: Make) -> None:
    """What it has not read yet is kept: a socket's buffer holds a fraction of this."""
    bench = make(slots=4096, max_context=16_000, step_tokens=64)
    with looping(bench) as peer:
        peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.ask("a", PROMPT, 8_000)
        while bench.core.counters.finished == 0:
            threading.Event().wait(0.01)
        assert peer.reply("a")[0] == cold(PROMPT, 8_000)


def test_what_cannot_start_says_so_in_a_frame(tmp_path: Path) -> None:
    """The real command, on a model file that is none."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no model at all")
    config = {**{name: getattr(ServeConfig(), name) for name in CORE_FIELDS}, "model": str(broken)}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen([sys.executable, "-m", "engine.core.process", str(theirs.fileno())],
                                   pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        peer = Peer(ours)
        peer.send({"config": config})
        said = peer.next()
        assert (said["op"], said["error"]) == ("failed", "ModelError")
        assert "broken.gguf" in said["message"]
        assert process.wait(WAIT_S) == 1


def test_a_core_whose_parent_went_away_before_it_began_ends_quietly() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen([sys.executable, "-m", "engine.core.process", str(theirs.fileno())],
                                   pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        ours.close()
    _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (0, b"")


def test_a_core_whose_parent_is_killed_while_it_loads_ends_at_once() -> None:
    """A large model loads for minutes, and an orphan would hold its memory."""
    loads = ("import sys, time, engine.core.build as build, engine.core.process as process\n"
             "def load(config, secret_check):\n"
             "    print('loading', flush=True)\n"
             "    time.sleep(600)\n"
             "build.build_core = load\n"
             "process.main(int(sys.argv[1]))")
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen([sys.executable, "-c", loads, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        ours.sendall(frame({"config": {name: getattr(ServeConfig(), name) for name in CORE_FIELDS}}))
        assert process.stdout is not None
        assert process.stdout.readline() == b"loading\n"
        ours.close()  # as a kill would
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def test_what_crosses_the_socket_is_plain(make: Make) -> None:
    """The counters hold nothing that msgpack would refuse or change."""
    bench = make()
    bench.ask("a", PROMPT)
    assert unpack(pack(bench.core.stats())) == bench.core.stats()
    assert unpack(pack(asdict(bench.last["a"].usage))) == asdict(bench.last["a"].usage)  # type: ignore[arg-type]
