"""Files that are whole or not there, and text that names no folder of this machine."""

import os
import re
from pathlib import Path

_FOLDERS = re.compile(r"(?<![\w.])[/~][^\s=,\"']*/")
_DRIVE = re.compile(r"(?<![A-Za-z])[A-Za-z]:\\(?:[^\s\\]*\\)*")
_ROOT = re.compile(r"(?<![\w./)\]])/(?=[\w.~-])")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes beside `path`, then renames: a reader sees the old file or the new one, never half of one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def without_folders(text: str) -> str:
    """`text` with every absolute path in it cut to its last part."""
    return _DRIVE.sub("", _ROOT.sub("", _FOLDERS.sub("", text)))
