"""One server for most tests, one small one for what a small pool or a strange template shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e_server import Server

from engine.model.library import ModelFiles

LOG_LINES = 40
#: Raises, loops or renders, by the first message's text.
STRANGE_TEMPLATE = """\
{%- if messages[0].content == 'raise' %}{{ raise_exception('this template wants no raise') }}{% endif -%}
{%- if messages[0].content == 'loop' %}
{%- for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}
{%- endif -%}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}assistant:"""

StartServer = Callable[..., Server]


@pytest.fixture(scope="session")
def model(smollm2_files: ModelFiles) -> ModelFiles:
    return smollm2_files


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


def _started(servers: list[Server], logs: Path, device: str) -> StartServer:
    def start(*options: str) -> Server:
        server = Server(logs / f"server-{len(list(logs.iterdir()))}.log", "--device", device, *options)
        servers.append(server)
        return server
    return start


@pytest.fixture(scope="session")
def _session_start(model: ModelFiles, logs: Path, device: str) -> Iterator[StartServer]:
    servers: list[Server] = []
    yield _started(servers, logs, device)
    for server in servers:
        server.kill()


@pytest.fixture
def start(model: ModelFiles, logs: Path, device: str) -> Iterator[StartServer]:
    """Start a server of the test's own; it is killed afterwards if it is still there."""
    servers: list[Server] = []
    yield _started(servers, logs, device)
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def _main(_session_start: StartServer) -> Server:
    # Small steps: a test that looks at a prefill on its way has more of them to look between.
    return _session_start("--model", "smollm2", "--hbm", "512MiB", "--step-tokens", "128").ready()


@pytest.fixture(scope="session")
def _small(_session_start: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Server:
    template = tmp_path_factory.mktemp("template") / "strange.jinja"
    template.write_text(STRANGE_TEMPLATE)
    return _session_start("--model", "smollm2", "--hbm", "16MiB", "--max-running", "2", "--chat-template",
                          str(template)).ready()


@pytest.fixture
def server(_main: Server) -> Server:
    """Smollm2 with 512 MiB of KV and steps of 128 tokens, idle."""
    _main.idle()
    return _main


@pytest.fixture
def small(_small: Server) -> Server:
    """Smollm2 with 16 MiB of KV (46 blocks), two sequences at a time, and STRANGE_TEMPLATE; idle."""
    _small.idle()
    return _small


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A failure shows the end of the log of each server that the test had."""
    report = yield
    if report.failed:  # type: ignore[attr-defined]
        had = {id(s): s for s in getattr(item, "funcargs", {}).values() if isinstance(s, Server)}
        for server in had.values():
            lines = server.said().splitlines()[-LOG_LINES:]
            report.sections.append((f"log of the server at {server.url}", "\n".join(lines)))  # type: ignore[attr-defined]
    return report  # type: ignore[return-value]
