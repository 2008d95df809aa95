"""Stands between a launcher and its server, so that nothing of the server outlives either, however they end.

    python -m dsv4lab.serving.guard LAUNCHER_PID STATE_FILE LOG_FILE COMMAND ...

Runs COMMAND in a session of its own and copies what it says to LOG_FILE, the API key blacked out. When COMMAND ends,
when SIGTERM comes, or when the launcher is gone, even by SIGKILL, everything COMMAND started is ended, nothing else:
orphans become this process's children, and it ends its descendants. STATE_FILE tells the next start what there was.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from dsv4lab.files import write_atomically

API_KEY = "DSV4LAB_API_KEY"
SECRET = "secret.yaml"
"""The file beside the log through which the server learns the API key; it goes when the server does."""

TERM_S, KILL_S = 3.0, 5.0
"""How long what was asked to end, and then what was killed, may take to be gone."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_BLACK = b"***"
_MARK = "DSV4LAB_SERVER"


class Process:
    """One line of /proc: pid, parent, process group, and when it started, in clock ticks since boot."""

    def __init__(self, pid: int):
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        self.pid, self.state, self.parent, self.group = pid, fields[0], int(fields[1]), int(fields[2])
        self.started = int(fields[19])

    @property
    def alive(self) -> bool:
        return self.state not in "ZX"

    def has_mark(self, mark: str) -> bool:
        """Whether it, or who started it, was started under a guard with this mark."""
        try:
            return f"{_MARK}={mark}".encode() in Path(f"/proc/{self.pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False


def processes() -> Iterator[Process]:
    """Every process there is."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield Process(int(entry.name))
            except OSError:
                continue  # gone meanwhile


def descendants(root: int) -> list[Process]:
    """The living processes below `root`."""
    children: dict[int, list[Process]] = {}
    for process in processes():
        children.setdefault(process.parent, []).append(process)
    found, pending = [], [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += [process for process in below if process.alive]
        pending += [process.pid for process in below]
    return found


def boot_id() -> str:
    """What tells one boot of the machine from another."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def one_line(text: str) -> str:
    return " ".join(text.split())


def send(number: int, found: list[Process]) -> None:
    for process in found:
        try:
            os.kill(process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # gone, or become another user's: the others still have to end


class Guard:
    """The server's process, its log and its end."""

    def __init__(self, launcher: int, state: Path, log: Path, command: list[str]):
        self.launcher, self.state, self.log, self.code = launcher, state, log, None
        self.asked_to_end = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self.asked_to_end.set())
        self.mark = uuid.uuid4().hex
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.server = subprocess.Popen(
            command,
            env=os.environ | {_MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
        )
        self._write_state()
        self.pump = threading.Thread(target=copy, args=(self.server.stdout, log), daemon=True)
        self.pump.start()

    def _write_state(self) -> None:
        found: dict[str, Any] = {"boot": boot_id(), "mark": self.mark, "log": str(self.log), "launcher": self.launcher}
        for name, pid in (("guard", os.getpid()), ("group", self.server.pid)):
            found[name] = {"pid": pid, "started": Process(pid).started}
        write_atomically(self.state, json.dumps(found))

    def run(self) -> int:
        """Waits until there is nothing left to guard; returns the server's exit status."""
        while self.code is None and not self.asked_to_end.wait(0.1) and os.getppid() == self.launcher:
            self._reap()
        self._end()
        self.pump.join(1)
        if not descendants(os.getpid()):  # what hangs in the driver is for the next start to know of
            self.state.unlink(missing_ok=True)
        self.log.with_name(SECRET).unlink(missing_ok=True)
        return 1 if self.code is None or self.code < 0 else self.code

    def _end(self) -> None:
        for number, seconds in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
            deadline = time.monotonic() + seconds
            send(number, descendants(os.getpid()))
            while descendants(os.getpid()) and time.monotonic() < deadline:
                self._reap()
                if number == signal.SIGKILL:
                    send(number, descendants(os.getpid()))
                time.sleep(0.05)
            self._reap()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.server.pid:
                self.code = os.waitstatus_to_exitcode(status)


def copy(source: IO[bytes], log: Path) -> None:
    """`source` to `log`, line by line as far as there are lines, the API key blacked out."""
    secret = os.environ.get(API_KEY, "").encode()
    kept = b""
    with log.open("wb", buffering=0) as target:

        def put(text: bytes) -> None:
            try:
                target.write(text.replace(secret, _BLACK) if secret else text)
            except OSError:
                pass  # no room: a server whose output nobody takes would hang

        while read := os.read(source.fileno(), 1 << 16):
            kept += read
            end = max(kept.rfind(b"\n"), kept.rfind(b"\r")) + 1
            put(kept[:end])
            kept = kept[end:]
        put(kept)


def main() -> None:
    launcher, state, log, *command = sys.argv[1:]
    try:
        guard = Guard(int(launcher), Path(state), Path(log), command)
    except OSError as error:
        Path(log).write_text(f"dsv4lab: {command[0]} cannot be started: {error.strerror}\n", encoding="utf-8")
        sys.exit(127)
    sys.exit(guard.run())


if __name__ == "__main__":
    main()
