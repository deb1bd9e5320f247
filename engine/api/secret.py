"""The server's secret, and what is derived from it: the salts that keep tenants' blocks apart.

A client names a salt (`cache_salt`); the namespace that its blocks live in is an HMAC of it under a secret that no
client has. So a client that knows or guesses another's salt, or sends a derived value as its own, joins nothing.
The secret stays in the API process; what the core gets (`check_value`) tells it from another one, and no more.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import time
from pathlib import Path

from engine.errors import ConfigError

SECRET_BYTES = 32
#: More is no secret but some other file.
MOST_BYTES = 4096
#: How long another server's secret may take to be written whole, on a file system without hard links.
WRITTEN_S = 2.0


def load_secret(path: Path) -> bytes:
    """The secret in `path`, made when there is no such file; two servers that make it at once end with the same.

    Raises ConfigError where it can't be read or made, where others can read it, or where it is none.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            _make(path)
        secret = _read(path)
        deadline = time.monotonic() + WRITTEN_S
        while len(secret) < SECRET_BYTES and time.monotonic() < deadline:
            time.sleep(0.02)
            secret = _read(path)
    except OSError as e:
        raise ConfigError(f"--secret-file {path}: {e.strerror or e}; name a file that this user can read and write",
                          param="secret_file") from e
    if not SECRET_BYTES <= len(secret) <= MOST_BYTES:
        held = f"more than {MOST_BYTES}" if len(secret) > MOST_BYTES else str(len(secret))
        raise ConfigError(f"--secret-file {path} holds {held} bytes, and a secret has {SECRET_BYTES} to {MOST_BYTES}; "
                          f"remove it to have one made (blocks under old salts are not found again then)",
                          param="secret_file")
    return secret


def salt(secret: bytes, tenant: bytes, client_salt: str) -> bytes:
    """32 bytes: HMAC-SHA256 of (tenant, client's salt), each with its length before it."""
    out = hmac.new(secret, b"trunkline salt 1", hashlib.sha256)
    for part in (tenant, client_salt.encode("utf-8", "surrogatepass")):
        out.update(len(part).to_bytes(8, "little"))
        out.update(part)
    return out.digest()


def check_value(secret: bytes) -> bytes:
    """8 bytes that are the same for the same secret, and tell nothing else of it."""
    return hmac.digest(secret, b"trunkline check 1", "sha256")[:8]


def _make(path: Path) -> None:
    """Whole or not at all: written under another name, and linked to its own if nobody was faster."""
    made = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        _write(made)
        try:
            os.link(made, path)
        except FileExistsError:
            return
        except OSError:  # no hard links here
            try:
                _write(path)
            except FileExistsError:
                return
    finally:
        made.unlink(missing_ok=True)


def _write(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(secrets.token_bytes(SECRET_BYTES))
        file.flush()
        os.fsync(fd)


def _read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer is no place to wait
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"--secret-file {path} is no file", param="secret_file")
        if found.st_mode & 0o077:
            raise ConfigError(f"--secret-file {path} can be read or written by others (mode "
                              f"{stat.S_IMODE(found.st_mode):o}): `chmod 600 {path}`, and make a new one if anybody "
                              f"may have read it", param="secret_file")
        return file.read(MOST_BYTES + 1)
