"""The style of every figure, and saving that makes no diff where nothing changed."""

from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from dsv4lab.files import write_atomically

STYLE = Path(__file__).with_name("dsv4lab.mplstyle")
FORMATS = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}
"""File formats and the metadata entries that would differ from day to day or from version to version."""


def styled() -> AbstractContextManager:
    """Matplotlib's defaults with the lab's style on top, whatever the session has set."""
    return plt.style.context(["default", STYLE])


def root() -> Path:
    """The figures folder of this checkout; FileNotFoundError if the package was installed without one."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / "pyproject.toml").is_file():
        raise FileNotFoundError("dsv4lab runs without its checkout: say where figures go (directory=)")
    return checkout / "figures"


def save(figure: Figure, name: str, directory: Path | str | None = None) -> list[Path]:
    """Write `<name>.svg` and `<name>.png`, each whole and only if its bytes changed; returns both paths."""
    directory = root() if directory is None else Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    return [_write_changed(directory / f"{name}.{kind}", _rendered(figure, kind)) for kind in FORMATS]


def svg(figure: Figure) -> str:
    """The figure as an element that a web page can hold."""
    text = _rendered(figure, "svg").decode()
    return text[text.index("<svg") :]


def _rendered(figure: Figure, kind: str) -> bytes:
    buffer = BytesIO()
    with styled():
        figure.savefig(buffer, format=kind, metadata=FORMATS[kind])
    return buffer.getvalue()


def _write_changed(path: Path, content: bytes) -> Path:
    if not path.is_file() or path.read_bytes() != content:
        write_atomically(path, content)
    return path
