"""A server of ours as a child process, for as long as a `with` lasts.

Knows processes, a free port and a log file. Does not know what the server serves.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from engine.errors import StartError

#: SIGTERM lets the server finish and flush (which it does for 20 s at most); after this long it is killed.
_STOP_S = 30.0
_TAIL_LINES = 15


class BackgroundServer:
    """`trunkline serve ARGUMENTS` on a free loopback port; stopped, whatever happens, when the `with` ends.

    It gets a session of its own, so that Ctrl-C reaches it only through us, after what is to be said was
    said. The environment's TRUNKLINE_* are left out (but for the cache folder): a key or a config file in
    them would make it another server than the caller asked for.
    """

    def __init__(self, arguments: Sequence[str], *, command: Sequence[str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._started_by = command or [sys.executable, "-P", "-m", "engine.cli.main", "serve"]
        self._arguments = list(arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self.log = Path()

    def __enter__(self) -> BackgroundServer:
        handle, name = tempfile.mkstemp(prefix="trunkline-", suffix=".log")
        self.log = Path(name)
        os.close(handle)
        self._spawn()
        return self

    def restart(self, arguments: Sequence[str] | None = None) -> None:
        """Stop it, and start it again on the same port, with the same arguments or with others."""
        self.stop()
        self._arguments = self._arguments if arguments is None else list(arguments)
        self._spawn()

    def _spawn(self) -> None:
        command = [*self._started_by, *self._arguments, "--host", "127.0.0.1", "--port", str(self.port)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=own_environment(os.environ), preexec_fn=_end_with_parent)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.stop()
        if kind is KeyboardInterrupt:
            self.forget_log()

    def check_alive(self) -> None:
        """Raises StartError, with the end of the log, if the process has ended."""
        assert self._process is not None, "BackgroundServer is used outside `with`"
        code = self._process.poll()
        if code is not None:
            raise StartError(f"the server ended with exit code {code}. The end of {self.log}:\n{self.tail()}")

    def tail(self) -> str:
        """The last lines of the server's log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:]) or "    (the log is empty)"

    def stop(self) -> None:
        """SIGTERM, then, if that was not enough, SIGKILL for it and all that it started."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def forget_log(self) -> None:
        """The log is of no more use: all went well."""
        self.log.unlink(missing_ok=True)


#: prctl's PR_SET_PDEATHSIG (linux/prctl.h).
_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _end_with_parent() -> None:
    """In the child: SIGTERM when the parent is gone. One that was killed outright could not stop its server."""
    if _LIBC is not None:
        _LIBC.prctl(_PDEATHSIG, signal.SIGTERM)


def own_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without TRUNKLINE_* (but for the cache folder), this package first on its path."""
    kept = {k: v for k, v in environment.items() if not k.startswith("TRUNKLINE_") or k == "TRUNKLINE_CACHE"}
    path = [str(Path(__file__).resolve().parents[2]), environment.get("PYTHONPATH", "")]
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
