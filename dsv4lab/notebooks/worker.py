"""Executes one notebook in a process of its own: `python -m dsv4lab.notebooks.worker REQUEST.json`.

Leaves beside the request `ended.json` (how execution ended), the executed notebook, its HTML and the kernel's log. The
kernel is a child of this process, of the interpreter that runs here, whatever kernelspecs the machine has.
"""

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ipykernel.kernelspec
import nbconvert
import nbformat
import papermill
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.execute import remove_error_markers
from pydantic import BaseModel, ConfigDict
from traitlets import default

from dsv4lab.files import write_atomically
from dsv4lab.notebooks.results import Skipped, Verdict


class Request(BaseModel):
    """What to execute: `timeout` in seconds a cell; `folder` takes what is left, under the notebook's own stem."""

    notebook: Path
    folder: Path
    parameters: dict[str, Any]
    timeout: int


class Ended(BaseModel):
    """How execution ended. "passed" says only that every cell ran: the verdict is the notebook's to give."""

    model_config = ConfigDict(frozen=True)
    verdict: Verdict
    detail: str = ""


class ThisInterpreter(KernelSpecManager):
    """Every kernel name is the Python that runs here: no kernelspec need be installed, none is mistaken for ours."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return KernelSpec(resource_dir=ipykernel.kernelspec.RESOURCES, **ipykernel.kernelspec.get_kernel_dict())


class KernelManager(AsyncKernelManager):
    """Logs what the kernel says outside of its cells and, beside `log_path`, its process id, also its process group."""

    log_path = Path()

    @default("kernel_spec_manager")
    def _kernel_spec_manager_default(self) -> ThisInterpreter:
        return ThisInterpreter(parent=self)

    async def start_kernel(self, **options: Any) -> None:
        with self.log_path.open("w") as log:
            await super().start_kernel(stdout=log, stderr=log, **options)
        self.log_path.with_suffix(".pid").write_text(str(self.provisioner.pid))


def execute(request: Request) -> Ended:
    """Runs the cells, saving the executed copy as it goes. Never raises for what happens inside the notebook."""
    position = 0

    def started(cell: Any, cell_index: int) -> None:
        nonlocal position
        position += cell.cell_type == "code" and bool(cell.source.strip())

    try:
        notebook = papermill.execute_notebook(
            *(_literal(path) for path in (request.notebook, _executed(request))),
            parameters=request.parameters,
            kernel_name="python3",
            language="python",
            cwd=request.notebook.parent,
            progress_bar={"desc": request.notebook.stem, "leave": False, "disable": None},
            execution_timeout=request.timeout,
            kernel_manager_class=KernelManager,
            on_cell_start=started,
        )
    except papermill.PapermillExecutionError as error:
        verdict = "skipped" if error.ename == Skipped.__name__ else "failed"
        return Ended(verdict=verdict, detail=f"In [{error.exec_count}]: {error.ename}: {_first_line(error.evalue)}")
    except CellTimeoutError:
        return Ended(verdict="timed out", detail=f"In [{position}]: no end within {request.timeout} s")
    except DeadKernelError:
        return Ended(verdict="died", detail=f"In [{position}]: the kernel was killed")
    for cell in notebook.cells:  # papermill takes SystemExit for an end like any other
        for output in cell.get("outputs", ()):
            if output.output_type == "error":
                return Ended(verdict="failed", detail=f"In [{cell.execution_count}]: {output.ename} ended the notebook")
    return Ended(verdict="passed")


def to_html(request: Request) -> None:
    """Converts what was executed, however far it came; a skipped notebook is shown without papermill's red banner."""
    notebook = nbformat.read(_executed(request), as_version=4)
    if any(output.get("ename") == Skipped.__name__ for cell in notebook.cells for output in cell.get("outputs", ())):
        nbformat.write(remove_error_markers(notebook), _executed(request))
    beside = Path(nbconvert.__file__).parents[1] / "share" / "jupyter"  # its templates after `pip install --target`
    os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, [os.environ.get("JUPYTER_PATH"), str(beside)]))
    exporter = nbconvert.HTMLExporter()
    html, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": request.notebook.stem}})
    write_atomically(_executed(request).with_suffix(".html"), html)


def main() -> None:
    request = Request.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    KernelManager.log_path = _executed(request).with_suffix(".log")
    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # what it would say is in the verdict
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        ended = execute(request)
    except KeyboardInterrupt:  # the kernel is down by now; asyncio would only complain of its unfinished tasks
        os._exit(128 + signal.SIGINT)
    write_atomically(request.folder / "ended.json", ended.model_dump_json())
    to_html(request)


def _end_with_parent(parent: int) -> None:
    """Interrupts this process, and so ends its kernel, once the runner is gone without having said goodbye."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGINT)


def _executed(request: Request) -> Path:
    return request.folder / request.notebook.name


def _literal(path: Path) -> str:
    return str(path).replace("{", "{{").replace("}", "}}")  # papermill takes paths for format strings


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


if __name__ == "__main__":
    main()
