"""Files that are whole or not there, locks between processes, and text that names no folder of this machine."""

import fcntl
import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_FOLDERS = re.compile(r"(?<![\w.])[/~][^\s=,\"']*/")
_DRIVE = re.compile(r"(?<![A-Za-z])[A-Za-z]:\\(?:[^\s\\]*\\)*")
_POLL_S = 0.05
_ROOT = re.compile(r"(?<![\w./)\]])/(?=[\w.~-])")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes beside `path`, then renames: a reader sees the old file or the new one, never half of one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, wait_s: float = math.inf) -> Iterator[bool]:
    """Whether this process got the lock of this name, which one process of a machine has at a time, within `wait_s`.

    However a process ends, its locks end with it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + wait_s
    with path.open("ab") as file:
        while not (got := _lock(file)) and time.monotonic() < end:
            time.sleep(_POLL_S)
        yield got


def _lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def without_folders(text: str) -> str:
    """`text` with every absolute path in it cut to its last part."""
    return _DRIVE.sub("", _ROOT.sub("", _FOLDERS.sub("", text)))
