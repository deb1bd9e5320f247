"""Servers with RAM and NVMe below HBM, as their user runs them: options, restarts, crashes, salts, caps."""

from __future__ import annotations

import json
import os
import random
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e_server import COMPLETIONS, END_S, ROOT, Answer, Server, environment

StartServer = Callable[..., Server]
TAUBENCH = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces" / "taubench_airline.json"
#: SmolLM2's block in bf16.
BLOCK = 368_640


def ids(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 40_000), k=n)


def ask(server: Server, prompt: list[int], n: int = 6, **more: Any) -> Answer:
    return server.complete(prompt, max_tokens=n, ignore_eos=True, **more)


def text(answer: Answer) -> str:
    return str(answer.body["choices"][0]["text"])


def by_tier(answer: Answer) -> dict[str, int]:
    return dict(answer.usage["cache"]["cached"])


def tiers(folder: Path, *more: str, hbm: str = "64MiB", ram: str = "0") -> list[str]:
    return ["--model", "smollm2", "--hbm", hbm, "--ram", ram, "--nvme", str(folder), "--nvme-size", "1GiB", *more]


def used(folder: Path) -> int:
    """Bytes on disk as `du` counts them."""
    total = 0
    for root, _, files in os.walk(folder):
        for name in (".", *files):
            try:
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def persisted(server: Server) -> bool:
    return bool(server.stats()["persist"]["in_line"] == 0)


def test_what_hbm_has_no_room_for_comes_back_from_ram_with_the_same_answer(start: StartServer) -> None:
    server = start("--model", "smollm2", "--hbm", "32MiB", "--ram", "256MiB").ready()
    cold = ask(server, ids(1, 900))
    ask(server, ids(2, 900))
    again = ask(server, ids(1, 900))
    assert by_tier(again)["ram"] >= 300  # the head had stayed in HBM
    assert sum(by_tier(again).values()) >= 880
    assert text(again) == text(cold)
    moves = server.stats()["moves"]["ram>hbm"]
    assert moves["bytes"] == moves["blocks"] * BLOCK == by_tier(again)["ram"] // 16 * BLOCK


def test_kill_9_and_start_again_hits_with_the_same_answers(start: StartServer, tmp_path: Path) -> None:
    """PITFALLS 34: the API process and the core die together, without a word."""
    server = start(*tiers(tmp_path)).ready()
    cold = ask(server, ids(1, 500))
    server.wait(lambda: persisted(server))
    core = server.core()
    core.kill()
    server.kill()
    psutil.wait_procs([core], END_S)
    again = start(*tiers(tmp_path)).ready()
    warm = ask(again, ids(1, 500))
    assert by_tier(warm) == {"hbm": 0, "nvme": 496}
    assert text(warm) == text(cold)
    assert again.stats()["moves"]["nvme>hbm"]["bytes"] == 31 * BLOCK


def test_a_core_that_dies_alone_finds_its_nvme_tier_again(start: StartServer, tmp_path: Path) -> None:
    server = start(*tiers(tmp_path)).ready()
    cold = ask(server, ids(1, 500))
    server.wait(lambda: persisted(server))
    died = server.core()
    died.kill()
    server.wait(lambda: not died.is_running() or died.status() == psutil.STATUS_ZOMBIE)
    server.wait(lambda: server.said().count("the core process ended") == 1)
    server.wait(lambda: server.ask("/health").status == 200)
    warm = ask(server, ids(1, 500))
    assert by_tier(warm)["nvme"] == 496
    assert text(warm) == text(cold)


def test_sigterm_flushes(start: StartServer, tmp_path: Path) -> None:
    """Nothing is due for 1,000 s: what is found afterwards was written at the end."""
    server = start(*tiers(tmp_path, "--persist-within", "1000")).ready()
    cold = ask(server, ids(1, 500))
    assert server.stats()["persist"]["written"] == 0
    assert server.stop() == 0
    assert "blocks" in server.said().splitlines()[-1]
    again = start(*tiers(tmp_path)).ready()
    warm = ask(again, ids(1, 500))
    assert by_tier(warm)["nvme"] == 496
    assert text(warm) == text(cold)


def test_without_nvme_a_restart_is_cold(start: StartServer) -> None:
    server = start("--model", "smollm2", "--hbm", "64MiB", "--ram", "64MiB").ready()
    ask(server, ids(1, 500))
    assert server.stop() == 0
    again = start("--model", "smollm2", "--hbm", "64MiB", "--ram", "64MiB").ready()
    assert sum(by_tier(ask(again, ids(1, 500))).values()) == 0


def test_persist_within_says_how_soon(start: StartServer, tmp_path: Path) -> None:
    server = start(*tiers(tmp_path, "--persist-within", "0.2")).ready()
    ask(server, ids(1, 500))
    server.wait(lambda: server.stats()["persist"]["written"] >= 31, 5.0)


def test_a_write_limit_holds_writing_back(start: StartServer, tmp_path: Path) -> None:
    server = start(*tiers(tmp_path, "--persist-within", "0", "--nvme-write-limit", "1MB/s")).ready()
    ask(server, ids(1, 1500))
    stats = server.stats()
    assert stats["persist"]["in_line"] == 1
    assert stats["moves"]["hbm>nvme"]["blocks"] < 93


def test_session_idle_says_how_long_a_conversation_is_open(start: StartServer, tmp_path: Path) -> None:
    """What is not open any more, and was used once, is not written for a restart."""
    server = start(*tiers(tmp_path, "--session-idle", "0")).ready()
    ask(server, ids(1, 500))
    server.wait(lambda: server.stats()["persist"]["in_line"] == 0)
    persist = server.stats()["persist"]
    assert (persist["expired"], persist["written"]) == (1, 0)


def test_salts_never_meet_and_last_over_a_restart(start: StartServer, tmp_path: Path) -> None:
    """PITFALLS 52, 53."""
    secret = tmp_path / "secret"
    options = tiers(tmp_path / "nvme", "--secret-file", str(secret), "--api-key", "one", "--api-key", "two")

    def salted(server: Server, key: str, salt: str | None) -> int:
        body = {"prompt": ids(1, 500), "max_tokens": 1, "temperature": 0}
        if salt is not None:
            body["cache_salt"] = salt
        connection = server.connect()
        connection.request("POST", COMPLETIONS, json.dumps(body).encode(), {"Authorization": f"Bearer {key}"})
        reply = json.loads(connection.getresponse().read())
        connection.close()
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

    server = start(*options).ready()
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert salted(server, "one", "mine") == 0
    assert salted(server, "one", "mine") == 499
    assert salted(server, "one", "other") == 0
    assert salted(server, "one", None) == 0
    assert salted(server, "two", "mine") == 0  # guessed, and joins nothing
    assert server.stop() == 0
    again = start(*options).ready()
    assert salted(again, "one", "yours") == 0
    assert salted(again, "two", "mine") >= 496
    assert salted(again, "one", "mine") >= 496
    assert again.stop() == 0
    secret.unlink()
    other = start(*options).ready()
    assert "secret" in other.said().split("listening on")[1]  # another one is named at start
    assert salted(other, "one", "mine") == 0


def test_a_second_server_on_the_folder_waits_and_names_the_owner(start: StartServer, tmp_path: Path) -> None:
    server = start(*tiers(tmp_path)).ready()
    second = start(*tiers(tmp_path))
    assert second.process.wait(60) == 2
    assert str(server.core().pid) in second.said()
    assert "Traceback" not in second.said()


def test_du_is_never_over_the_cap(start: StartServer, tmp_path: Path) -> None:
    """A replay that wants ten times as much (PITFALLS 38), measured all the time."""
    cap = 24 * 2**20
    server = start("--model", "smollm2", "--hbm", "64MiB", "--ram", "16MiB", "--nvme", str(tmp_path), "--nvme-size",
                   str(cap), "--persist-within", "0.1").ready()
    most, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.005):
            most.append(used(tmp_path))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for i in range(11):  # each 1,000 tokens are 22 MiB of KV
        ask(server, ids(i, 1000), 1)
    server.wait(lambda: persisted(server))
    assert server.stop() == 0
    stop.set()
    watcher.join()
    assert cap // 2 < max(most) <= cap


@pytest.mark.parametrize(("options", "said"), [
    (["--nvme", "DIR"], "--nvme-size"),
    (["--nvme-size", "1GiB"], "--nvme"),
    (["--nvme", "DIR", "--nvme-size", "900TiB"], "989,560,464,998,400"),
    (["--nvme", "DIR", "--nvme-size", "1MiB"], "16"),
    (["--ram", "900TiB"], "900"),
    (["--ram", "64KiB"], "368640"),
    (["--nvme", "/proc/none", "--nvme-size", "1GiB"], "/proc/none"),
], ids=lambda v: "-".join(v).replace("/", "_") if isinstance(v, list) else None)
def test_sizes_that_do_not_exist_are_refused_with_the_numbers(start: StartServer, tmp_path: Path, options: list[str],
                                                              said: str) -> None:
    """PITFALLS 41."""
    server = start("--model", "smollm2", "--hbm", "64MiB",
                   *[str(tmp_path / "d") if o == "DIR" else o for o in options])
    assert server.process.wait(60) != 0
    last = server.said().strip().splitlines()[-1]
    assert said in last
    assert "Traceback" not in server.said()


def test_files_removed_underneath_and_a_folder_made_read_only(start: StartServer, tmp_path: Path) -> None:
    """PITFALLS 40: a miss, and the server goes on."""
    server = start(*tiers(tmp_path / "nvme", "--persist-within", "0", hbm="32MiB")).ready()
    cold = ask(server, ids(1, 900))
    server.wait(lambda: persisted(server))
    ask(server, ids(2, 900))
    for file in (tmp_path / "nvme").glob("*/*.kv"):
        file.unlink()
    again = ask(server, ids(1, 900))
    assert text(again) == text(cold)
    for folder in (tmp_path / "nvme").glob("*"):
        if folder.is_dir():
            folder.chmod(0o500)
    ask(server, ids(3, 900))
    assert text(ask(server, ids(1, 900))) == text(cold)
    assert server.stop() == 0
    assert "Traceback" not in server.said()


def test_a_client_that_leaves_while_its_blocks_are_restored(start: StartServer) -> None:
    """PITFALLS 45: slots are what they were."""
    server = start("--model", "smollm2", "--hbm", "64MiB", "--ram", "512MiB").ready()
    ask(server, ids(1, 1500), 1)
    ask(server, ids(2, 1500), 1)
    server.idle()
    slots = server.slots()
    for _ in range(5):
        stream = server.open(COMPLETIONS, {"prompt": ids(1, 1500), "max_tokens": 200, "ignore_eos": True})
        stream.leave()
        ask(server, ids(2, 1500), 1)
    server.idle()
    server.wait(lambda: server.available() == slots)
    assert server.stats()["tree"]["leases"] == 0


# -- the whole of it ---------------------------------------------------------------------------------------


def replay(server: Server, out: Path) -> dict[str, Any]:
    subprocess.run([sys.executable, "-m", "engine.cli.main", "replay", str(TAUBENCH), "--url", server.url, "--sessions",
                    "16", "--concurrency", "4", "--max-tokens", "32", "--timeout", "1200", "--json", str(out)],
                   cwd=ROOT, env=environment(), check=True, stdout=subprocess.DEVNULL)
    report = json.loads(out.read_text())
    assert report["errors"] == 0
    return dict(report)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_tau_bench_after_kill_9_is_warm_and_says_the_same(start: StartServer, tmp_path: Path) -> None:
    """16 sessions in fp32; HBM of 768 MiB and RAM of 512 hold less than half of their KV."""
    if not TAUBENCH.exists():
        pytest.skip("needs ../shared/data/traces/taubench_airline.json: not found")
    small = ["--model", "smollm2", "--dtype", "float32", "--hbm", "768MiB"]
    all_tiers = [*small, "--ram", "512MiB", "--nvme", str(tmp_path / "nvme"), "--nvme-size", "8GiB"]
    server = start(*all_tiers).ready()
    first = replay(server, tmp_path / "first.json")
    server.wait(lambda: persisted(server))
    core = server.core()
    core.send_signal(signal.SIGKILL)
    server.kill()
    psutil.wait_procs([core], END_S)
    again = start(*all_tiers).ready()
    second = replay(again, tmp_path / "second.json")
    assert second["tiers"]["nvme"] > 0
    assert again.stats()["moves"]["nvme>hbm"]["blocks"] > 0
    assert again.stop() == 0
    plain = start(*small).ready()
    third = replay(plain, tmp_path / "third.json")
    assert plain.stop() == 0
    print({k: [r[k] for r in (first, second, third)] for k in ("cached_ratio", "tiers", "computed", "wall_s")})
    assert second["cached_ratio"] >= 0.97
    assert first["text_digest"] == second["text_digest"] == third["text_digest"]


def test_a_block_that_is_longer_than_prompts_can_share_is_noted(start: StartServer) -> None:
    """PITFALLS 16."""
    server = start("--model", "smollm2", "--hbm", "64MiB", "--block-size", "512", "--max-context", "400").ready()
    assert "note: --block-size 512 is as long as the longest sequence (400 tokens)" in server.said()
    plain = start("--model", "smollm2", "--hbm", "64MiB").ready()
    assert "--block-size 16 is" not in plain.said()
