"""Starts an SGLang server, proves that what it was asked to run is live on every rank, and leaves nothing behind.

    with Server(Config(model="deepseek-ai/DeepSeek-V4-Flash", preset="rtx6000-8x", tp=8)) as server:
        ...  # server.url answers

The server lives in a process group of its own under a `guard`, which ends it when this process is gone, however.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dsv4lab import __version__, tuned
from dsv4lab.files import write_atomically
from dsv4lab.hardware import ONE_MACHINE
from dsv4lab.serving import arguments, guard, http, machine, presets, receipts, server_log, settings, synthetic
from dsv4lab.serving.presets import Preset
from dsv4lab.serving.settings import Setting

STARTED = "started.json"
"""The file of a run's folder that says what was started, for a benchmark that comes later."""

PLUGIN, PLUGINS_VARIABLE = "dsv4lab", "SGLANG_PLUGINS"
STOP_S = 10.0
_METADATA = "metadata"
_PROBE = {"input_ids": list(range(100, 228)), "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
"""More rows of prefill than our GEMM takes: what is asked of SGLang's own, its tables, is called too."""
_PROVE_S = 30.0
_POLL_S = 0.5


class ServeError(RuntimeError):
    """The server did not start, or not as it was asked to; the message says what went wrong first."""


@dataclass(frozen=True)
class Config:
    """What to serve, and how. Fields left None are the preset's; `flags` are SGLang's own and come last.

    model: a folder or a name on the Hugging Face hub; "" for a preset with a synthetic model.
    run: where log, receipts and the synthetic model go; a new temporary folder if None.
    """

    model: str = ""
    preset: str = "single"
    setting: Setting | None = None
    tp: int | None = None
    context_length: int | None = None
    layers: int | None = None
    host: str = "127.0.0.1"
    port: int = 30000
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    flags: tuple[str, ...] = ()
    run: Path | None = None
    timeout_s: float = 1800.0

    def __post_init__(self):
        preset = presets.find(self.preset)
        counts = dict(tp=self.tp, context_length=self.context_length, layers=self.layers, nnodes=self.nnodes)
        settings.at_least(1, port=self.port, timeout_s=self.timeout_s, **counts)
        if self.port > 65535:
            raise ValueError(f"port must be at most 65535, got {self.port}")
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(f"node_rank must be in 0..{self.nnodes - 1}, got {self.node_rank}")
        if not self.model and not preset.layers:
            raise ValueError(f"model must be given: preset {self.preset} has no synthetic one")
        if self.layers is not None and not preset.layers:
            raise ValueError(f"layers belongs to a synthetic model, and preset {self.preset} has none")
        if given := [flag for flag in self.flags if "api-key" in flag]:
            raise ValueError(
                f"{given[0].partition('=')[0]} would show on the command line: set {guard.API_KEY} instead"
            )
        if self.nnodes > 1 and not self.dist_init_addr:
            raise ValueError(f"dist_init_addr must be given for {self.nnodes} nodes")

    def with_tables(self, gpu: str) -> Self:
        """The same with tables=tuned, where the preset is in effect and takes such tables as there are for `gpu`."""
        wanted = self.setting is None and self.from_preset.take_tuned and tuned.sglang_tables(tuned.folder(), gpu)
        return replace(self, setting=replace(self.hooks, tables="tuned")) if wanted else self

    @property
    def from_preset(self) -> Preset:
        return presets.find(self.preset)

    @property
    def hooks(self) -> Setting:
        """The setting in effect."""
        return self.from_preset.setting if self.setting is None else self.setting

    def argv(self, model: str) -> list[str]:
        """SGLang's flags for `model`: ours, the preset's, the user's, of which the last word counts."""
        preset, layers = self.from_preset, self.layers or self.from_preset.layers
        length = self.context_length or preset.context_length
        optional = {
            "--context-length": length,
            "--nnodes": self.nnodes if self.nnodes > 1 else None,
            "--node-rank": self.node_rank if self.nnodes > 1 else None,
            "--dist-init-addr": self.dist_init_addr,
        }
        given = [text for flag, value in optional.items() if value is not None for text in (flag, str(value))]
        return [
            "--model-path", model, "--host", self.host, "--port", str(self.port),
            "--tp-size", str(self.tp or preset.gpus), *given, *preset.flags,
            *(synthetic.layer_flags(layers) if layers else []), *self.flags,
        ]  # fmt: skip

    def environment(self, run: Path) -> dict[str, str]:
        """What the server's environment has beyond this process's."""
        plugins = [name for name in os.environ.get(PLUGINS_VARIABLE, "").split(",") if name and name != PLUGIN]
        ours = {
            settings.VARIABLE: str(self.hooks),
            receipts.VARIABLE: str(run / "receipts"),
            PLUGINS_VARIABLE: ",".join([*plugins, PLUGIN]),
            "PYTHONPATH": arguments.python_path(run / _METADATA),
        }
        alone = {} if self.nnodes > 1 else {n: v for n, v in ONE_MACHINE.items() if n not in os.environ}
        return alone | self.from_preset.environment | ours

    @property
    def command_line(self) -> str:
        """What `run` is started with, as a shell would take it."""
        given = [f"{name}={value}" for name, value in self.environment(self.run).items()]
        return shlex.join(["env", *given, *Server.command, *self.argv(self.model)])


class Server:
    """A started server. `url`, `ranks`, `receipts`, `info` describe it once `start` has returned."""

    command = (sys.executable, "-m", "sglang.launch_server")

    def __init__(self, config: Config, say: Callable[[str], None] | None = None):
        self.config, self.say = config, say or (lambda text: None)
        self.run = Path(config.run).resolve() if config.run else Path(tempfile.mkdtemp(prefix="dsv4lab-serve-"))
        self.log = self.run / "server.log"
        host = config.host if config.host not in ("0.0.0.0", "::") else "127.0.0.1"
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{config.port}"
        self.receipts: list[receipts.Receipt] = []
        self.info: dict[str, Any] = {}
        self._guard: subprocess.Popen | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> Self:
        """Checks, starts, waits and proves. ValueError for what could be known before; ServeError for what was not."""
        config = self.config
        (self.run / "receipts").mkdir(parents=True, exist_ok=True)
        state = state_file(config.port)
        for said in end_leftovers(state):
            self.say(said)
        machine.check_port(config.host, config.port)
        model = config.model or str(synthetic.write(self.run / "model"))
        machine.check_model(model)
        argv = config.argv(model)
        self.ranks = arguments.check(argv)
        layers = config.layers or config.from_preset.layers
        weights = machine.weight_bytes(Path(model), layers) / config.nnodes
        machine.check_gpus(config.from_preset, config.preset, self.ranks, weights, machine.gpus())
        self.argv = argv
        make_plugin_known(self.run / _METADATA)
        started = {"preset": config.preset, "hooks": str(config.hooks), "argv": argv}
        write_atomically(self.run / STARTED, json.dumps(started, indent=1))
        for old in (self.run / "receipts").glob("*.json"):
            old.unlink()
        try:
            self.argv = argv + self._secret_flags()
            self._spawn(state)
            self._wait()
            self._prove()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Ends the server and all it started; within ten seconds, and whatever state it is in."""
        if self._guard is not None:
            if self._guard.poll() is None:
                self._guard.send_signal(signal.SIGTERM)
                try:
                    self._guard.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    self._guard.kill()
                    self._guard.wait()
            state = state_file(self.config.port)
            if (left := read_state(state)) and left["guard"]["pid"] == self._guard.pid:  # it was killed itself
                for said in end_leftovers(state):
                    self.say(said)
        self._secret_file.unlink(missing_ok=True)

    def wait(self) -> None:
        """Waits until the server ends by itself; ServeError if that was not in order."""
        if code := self._guard.wait():
            raise ServeError(self._failure(f"the server ended with status {code}"))

    @property
    def _secret_file(self) -> Path:
        return self.run / guard.SECRET

    def _secret_flags(self) -> list[str]:
        """The API key in a file that only this user reads, for SGLang's --config."""
        if not (key := os.environ.get(guard.API_KEY)):
            return []
        self._secret_file.unlink(missing_ok=True)
        with open(os.open(self._secret_file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            json.dump({"api-key": key}, file)  # JSON is YAML
        return ["--config", str(self._secret_file)]

    def _spawn(self, state: Path) -> None:
        self.log.unlink(missing_ok=True)
        command = [sys.executable, "-m", guard.__name__, str(os.getpid()), str(state), str(self.log), *self.command]
        self._guard = subprocess.Popen(
            [*command, *self.argv],
            env=os.environ | self.config.environment(self.run),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process, which then ends the server
        )

    def _wait(self) -> None:
        """Until the server is healthy, saying what it waits for."""
        deadline, said = time.monotonic() + self.config.timeout_s, ""
        while True:
            if self._guard.poll() is not None:
                raise ServeError(self._failure(f"the server ended with status {self._guard.returncode}"))
            if http.healthy(self.url):
                return
            if (now := server_log.progress(self._logged())) != said:
                said = now
                self.say(said)
            if time.monotonic() > deadline:
                raise ServeError(self._failure(f"not ready after {self.config.timeout_s:.0f} s, last seen {said}"))
            time.sleep(_POLL_S)

    def _prove(self) -> None:
        """One request, and a receipt of every asked hook from every rank."""
        if self.config.node_rank == 0:
            try:
                http.call(self.url, "/generate", _PROBE)
                self.info = http.server_info(self.url)
            except http.NoAnswer as error:
                raise ServeError(self._failure(str(error))) from None
        asked, deadline = self.config.hooks.active, time.monotonic() + _PROVE_S
        while True:
            self.receipts = receipts.read(self.run / "receipts")
            lost = receipts.missing(self.receipts, asked, self.ranks)
            if not lost:
                return
            if time.monotonic() > deadline or self.config.node_rank == 0:
                raise ServeError(self._failure("; ".join(lost)))
            time.sleep(_POLL_S)

    def _logged(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def _failure(self, what: str) -> str:
        return f"{what}: {server_log.first_error(self._logged(), self.argv)} (log: {self.log})"


def make_plugin_known(folder: Path) -> None:
    """Writes to `folder` what tells SGLang of the plugin of an installed package, where this one is not installed."""
    group, entry = "sglang.srt.plugins", f"{PLUGIN} = {PLUGIN}.serving.plugin:register"
    if not metadata.entry_points(group=group, name=PLUGIN):
        place = folder / f"{PLUGIN}-{__version__}.dist-info"
        place.mkdir(parents=True, exist_ok=True)
        text = f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: {__version__}\n"
        write_atomically(place / "METADATA", text)
        write_atomically(place / "entry_points.txt", f"[{group}]\n{entry}\n")


def state_file(port: int) -> Path:
    """Where a start leaves word of what it started, for the next one on this port."""
    folder = Path(tempfile.gettempdir()) / f"dsv4lab-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ValueError(f"{folder} belongs to somebody else")
    return folder / f"server_{port}.json"


def read_state(state: Path) -> dict | None:
    """What the guard of an earlier start wrote, since this machine booted; None if there is nothing."""
    try:
        left = json.loads(state.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return left if left["boot"] == guard.boot_id() else None


def overseer(left: dict) -> guard.Process | None:
    """The guard that wrote `left`, if it still runs."""
    found = next((process for process in guard.processes() if process.pid == left["guard"]["pid"]), None)
    return found if found and found.alive and found.started == left["guard"]["started"] else None


def end_leftovers(state: Path) -> Iterator[str]:
    """Ends what an earlier start left running without its guard; says so. ValueError if that start still guards it."""
    if left := read_state(state):
        if still := overseer(left):
            if still.parent == left["launcher"]:
                raise ValueError(f"a server that dsv4lab started still runs there: kill {still.pid} ends it")
            yield "an earlier server is being ended"
            _await_end({still.pid})
        now = {process.pid: process for process in guard.processes()}
        if lost := [process for process in now.values() if process.alive and _is_of(process, left, now)]:
            guard.send(signal.SIGKILL, lost)
            yield f"ended {len(lost)} processes that an earlier server left behind"
            if stuck := _await_end({process.pid for process in lost}):
                yield f"these do not end: {', '.join(map(str, sorted(stuck)))}"
                return
    state.unlink(missing_ok=True)


def _is_of(process: guard.Process, left: dict, now: dict[int, guard.Process]) -> bool:
    """Whether a process is of what `left` describes: by its mark, or by a group whose number was not used again."""
    group, since = left["group"]["pid"], left["group"]["started"]
    leader = now.get(group)
    same_group = process.group == group and process.started >= since and (leader is None or leader.started == since)
    return same_group or process.has_mark(left["mark"])


def _await_end(pids: set[int]) -> set[int]:
    """Those that have not ended within `STOP_S`."""
    deadline = time.monotonic() + STOP_S
    while left := pids & {process.pid for process in guard.processes() if process.alive}:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return left
