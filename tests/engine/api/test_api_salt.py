"""Salted namespaces, and the secret that makes them (PITFALLS 52, 53)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from api_harness import FakeCore, ask, run, send, serving

from engine.api.secret import SECRET_BYTES, check_value, load_secret, salt
from engine.config import ServeConfig
from engine.errors import ConfigError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def namespaces(*bodies: dict[str, Any], config: ServeConfig | None = None,
               keys: tuple[str, ...] = ("",)) -> list[bytes]:
    """Where the core is told to look for each request."""
    core = FakeCore()

    async def go() -> None:
        async with serving(core, config=config) as url:
            for key in keys:
                for body in bodies:
                    headers = {"Authorization": f"Bearer {key}"} if key else {}
                    path = CHAT if "messages" in body else COMPLETIONS
                    assert (await send(url, "POST", path, body, headers=headers)).status == 200
    run(go())
    return [r.namespace for r in core.requests]


def test_without_a_salt_all_share() -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert namespaces({"prompt": "hi"}, {"prompt": "hi", "cache_salt": None}, chat) == [b""] * 3


def test_the_same_salt_is_the_same_namespace_in_chats_and_completions() -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "cache_salt": "mine"}
    one, two, other = namespaces({"prompt": "hi", "cache_salt": "mine"}, chat, {"prompt": "hi", "cache_salt": "Mine"})
    assert len(one) == 32
    assert one == two != other


def test_each_choice_of_each_prompt_is_salted() -> None:
    found = namespaces({"prompt": ["hi", "you"], "n": 2, "cache_salt": "mine"})
    assert len(found) == 4
    assert len(set(found)) == 1
    assert found[0]


def test_another_key_with_the_same_salt_joins_nothing() -> None:
    config = ServeConfig(api_key=("one", "two"))
    one, two = namespaces({"prompt": "hi", "cache_salt": "mine"}, config=config, keys=("one", "two"))
    assert one != two


def test_what_clients_send_as_a_key_does_not_matter_where_none_is_asked_for() -> None:
    one, two = namespaces({"prompt": "hi", "cache_salt": "mine"}, keys=("sk-1", "sk-2"))
    assert one == two


@pytest.mark.parametrize("value", ["", "x" * 1025, 7, ["a"]])
def test_what_is_no_salt_is_refused_by_name(value: Any) -> None:
    answer = ask(COMPLETIONS, {"prompt": "hi", "cache_salt": value})
    assert answer.status == 400
    assert answer.error["param"] == "cache_salt"


def test_a_salt_of_half_a_character_is_a_salt_or_an_error_of_the_client() -> None:
    assert ask(COMPLETIONS, rb'{"prompt": "hi", "cache_salt": "\ud800"}').status in (200, 400)


def test_a_derived_salt_sent_as_a_salt_joins_nothing() -> None:
    secret = bytes(range(32))
    derived = salt(secret, b"one", "mine")
    assert salt(secret, b"one", derived.hex()) != derived
    assert salt(secret, b"one", derived.decode("latin-1")) != derived


def test_where_tenant_and_salt_meet_is_part_of_what_is_hashed() -> None:
    secret = bytes(range(32))
    assert salt(secret, b"ab", "c") != salt(secret, b"a", "bc")
    assert salt(secret, b"", "abc") != salt(secret, b"abc", "")


def test_another_secret_is_another_salt_and_another_check_value() -> None:
    one, two = bytes(32), bytes(31) + b"\1"
    assert salt(one, b"", "mine") != salt(two, b"", "mine")
    assert check_value(one) != check_value(two)
    assert len(check_value(one)) == 8
    assert check_value(one) == check_value(bytes(32))


# -- the file ----------------------------------------------------------------------------------------------


def test_a_secret_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "secret"
    secret = load_secret(path)
    assert len(secret) == SECRET_BYTES
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_secret(path) == secret == path.read_bytes()
    assert os.listdir(path.parent) == ["secret"]


def test_two_secrets_are_two(tmp_path: Path) -> None:
    assert load_secret(tmp_path / "a") != load_secret(tmp_path / "b")


def test_servers_that_start_at_once_end_with_one_secret(tmp_path: Path) -> None:
    code = (f"from pathlib import Path\nfrom engine.api.secret import load_secret\ninput()\n"
            f"print(load_secret(Path({str(tmp_path / 'secret')!r})).hex())")
    servers = [subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
               for _ in range(4)]
    for server in servers:
        assert server.stdin is not None
        server.stdin.write("\n")
        server.stdin.flush()
    assert len({server.communicate()[0] for server in servers}) == 1
    assert os.listdir(tmp_path) == ["secret"]


def test_where_there_are_no_hard_links_it_is_made_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")
    monkeypatch.setattr(os, "link", link)
    assert load_secret(tmp_path / "secret") == load_secret(tmp_path / "secret")
    assert os.listdir(tmp_path) == ["secret"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_one_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_bytes(bytes(32))
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:o}\): `chmod 600 .*secret`"):
        load_secret(path)


@pytest.mark.parametrize(("size", "said"), [(0, "0 bytes"), (31, "31 bytes"), (5000, "more than 4096 bytes")])
def test_one_of_another_size_is_refused(tmp_path: Path, size: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.api.secret.WRITTEN_S", 0.05)
    path = tmp_path / "secret"
    path.write_bytes(bytes(size))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=said):
        load_secret(path)
    assert path.stat().st_size == size  # never overwritten


def test_a_folder_and_a_pipe_are_no_secret(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match=r"--secret-file"):
            load_secret(path)


def test_it_is_neither_shown_nor_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from engine.api.state import ServerState

    secret = load_secret(tmp_path / "secret")
    shown = repr(ServerState(ServeConfig(), secret=secret))
    assert repr(secret) not in shown
    assert secret.hex() not in shown
