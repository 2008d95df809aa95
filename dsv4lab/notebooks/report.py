"""The pages of a run: `index.html`, which needs no network and no other file but the notebooks it links to, and
`results.json`, the same as data."""

from base64 import b64encode
from collections.abc import Iterable
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from dsv4lab.files import write_atomically
from dsv4lab.notebooks.results import GOOD, Outcome, Report

TEMPLATE = "report.html.j2"


def line(outcome: Outcome) -> str:
    """The outcome in one line, for a terminal."""
    said = outcome.detail or outcome.answer
    return f"{outcome.verdict:<11}  {outcome.notebook:<24}  {outcome.minutes:5.1f} min" + (f"  {said}" if said else "")


def write(report: Report, out: Path, figures: Iterable[Path]) -> None:
    """Writes both pages into the folder `out`, each whole or not at all, the SVG `figures` embedded."""
    write_atomically(out / "results.json", report.model_dump_json(indent=2) + "\n")
    write_atomically(out / "index.html", _html(report, figures))


def _html(report: Report, figures: Iterable[Path]) -> str:
    pages = Environment(
        loader=PackageLoader("dsv4lab.notebooks", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    images = [
        (path.stem.replace("_", " "), "data:image/svg+xml;base64," + b64encode(path.read_bytes()).decode())
        for path in figures
    ]
    return pages.get_template(TEMPLATE).render(report=report, good=GOOD, images=images)
