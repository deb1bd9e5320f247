"""The end of a server, and the end of its core: a signal with a stream open, a core that is killed."""

from __future__ import annotations

import signal
from collections.abc import Callable

import psutil
import pytest
from e2e_server import CHAT, COMPLETIONS, END_S, OpenStream, Server, chat_body

StartServer = Callable[..., Server]


def streaming(server: Server) -> OpenStream:
    return server.open(CHAT, chat_body("Tell me everything.", max_tokens=4000, ignore_eos=True)).read(3)


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def small(start: StartServer, *more: str) -> Server:
    return start("--model", "smollm2", "--hbm", "64MiB", *more).ready()


def test_sigterm_ends_the_server_with_0_though_a_stream_is_open(start: StartServer) -> None:
    server = small(start)
    core, stream = server.core(), streaming(server)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(END_S) == 0
    events = stream.rest()
    stream.leave()
    assert "error" in events[-1]  # it was told, and not left with half a reply that looks whole
    assert "shutting down" in events[-1]["error"]["message"]
    assert "[DONE]" not in events
    psutil.wait_procs([core], END_S)
    assert is_gone(core)
    assert "Traceback" not in server.said()


def test_a_core_that_is_killed_is_named_restarted_and_answers_again(start: StartServer) -> None:
    """PITFALLS 45's last word: the engine lives."""
    server = small(start)
    first = server.chat("What is the sea?", max_tokens=8)
    core, stream = server.core(), streaming(server)
    core.kill()
    events = stream.rest()
    stream.leave()
    assert "error" in events[-1]
    assert "died" in events[-1]["error"]["message"]
    health, refused = server.ask("/health"), server.ask(COMPLETIONS, {"prompt": "Hi", "max_tokens": 2})
    # A machine on which a model is there again before two questions are asked: not in this decade.
    assert (health.status, health.body["status"]) == (503, "restarting")
    assert (refused.status, refused.error["code"]) == (503, "restarting")
    assert int(refused.headers["Retry-After"]) >= 1
    server.wait(lambda: server.ask("/health").status == 200)
    assert server.core().pid != core.pid
    again = server.chat("What is the sea?", max_tokens=8)
    assert again.body["choices"] == first.body["choices"]
    assert again.cached == 0  # what it knew was in the core's memory
    assert server.stats()["requests"]["running"] == 0
    assert server.stop() == 0


def test_the_core_ends_with_its_server(start: StartServer) -> None:
    """kill -9 leaves nothing behind."""
    server = small(start)
    core, stream = server.core(), streaming(server)
    server.kill()
    psutil.wait_procs([core], END_S)
    assert is_gone(core)
    stream.leave()
    assert "Traceback" not in server.said()


def test_only_the_core_has_torch_in_it(server: Server) -> None:
    """What the processes have mapped, after all that the tests before this one have asked."""
    try:
        maps = [{m.path for m in p.memory_maps()} for p in (psutil.Process(server.process.pid), server.core())]
    except (AttributeError, psutil.AccessDenied) as e:
        pytest.skip(f"needs the memory maps of a process: {e}")
    api, core = ([path for path in paths if "libtorch" in path] for paths in maps)
    assert core
    assert api == []
