"""What a server's log says: how far its start has come, and what went wrong first."""

import re
from collections.abc import Iterator

_PREFIX = re.compile(r"^\[\d{4}-\d\d-\d\d [\d:]+[^\]]*\] ?")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Kernel)\b|[a-z_]\w*(?:\.\w+)+:)")
_PLAIN = re.compile(
    r"CUDA error|out of memory|Segmentation fault|core dumped|terminate called|^dsv4lab: |: error: |"
    r"cudaError\w+|NCCL error|ncclInternalError|ImportError:|ModuleNotFoundError:",
)
_STAGES = (
    (re.compile(r"Init torch distributed begin"), "starting the ranks"),
    (re.compile(r"Load weight begin"), "loading weights"),
    (re.compile(r"Loading safetensors[^\r\n]*?\b(\d+)/(\d+)"), "loading weights, shard {} of {}"),
    (re.compile(r"Load weight end"), "weights loaded, making the cache"),
    (re.compile(r"nvcc|ninja|JIT[- ]?compil|[Cc]ompiling (?:kernel|module)"), "compiling kernels"),
    (re.compile(r"Capture [^\r\n]*begin"), "capturing graphs"),
    (re.compile(r"Capturing batches \(bs=(\d+)[^\r\n]*?\b(\d+)/(\d+)"), "capturing graph {1} of {2} (batch {0})"),
    (re.compile(r"Capture [^\r\n]*end"), "graphs captured"),
    (re.compile(r"Uvicorn running|fired up"), "answering"),
)
COMPILED = "Triton compiled"
"""Before the name of each kernel that Triton compiles in a server: the plugin says so there."""
_COMPILATION = re.compile(rf"nvcc|ninja|JIT[- ]?compil|[Cc]ompiling|[Aa]utotun|{COMPILED}")
_HINTS = (
    (
        "--enable-torch-compile",
        re.compile("capture|Capture|Subproc|inductor", re.IGNORECASE),
        "--enable-torch-compile is on: what compiles or synchronises inside a graph capture ends it",
    ),
)  # fmt: skip
_TAIL = 1 << 16


def progress(text: str) -> str:
    """What the server was last seen doing."""
    tail, last, said = text[-_TAIL:], -1, "starting"
    for pattern, template in _STAGES:
        for match in pattern.finditer(tail):
            if match.start() > last:
                last, said = match.start(), template.format(*match.groups())
    return said


def compilations(text: str) -> int:
    """Lines that tell of a compilation or a tuning."""
    return sum(bool(_COMPILATION.search(line)) for line in text.splitlines())


def first_error(text: str, argv: list[str] | None = None) -> str:
    """The first thing that went wrong, in one line, not the last of what followed from it.

    Of a traceback its exception, of a chain of them the cause, and what follows where an error announces it by a colon;
    with no error at all, the last line. A flag in `argv` that is known to bring such an error is named.
    """
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    errors = _errors(lines)
    found = next(errors, _PREFIX.sub("", lines[-1]).strip() if lines else "it said nothing")
    while found.endswith(":") and (cause := next(errors, None)):
        found = f"{found} {cause}"
    hints = [hint for flag, pattern, hint in _HINTS if flag in (argv or ()) and pattern.search(text)]
    return "; ".join([found[:400], *hints])


def _errors(lines: list[str]) -> Iterator[str]:
    inside = False
    for whole in lines:
        line = _PREFIX.sub("", whole)
        if "Traceback (most recent call last)" in line:
            inside = True
        elif inside and line != whole:
            continue  # of another rank, which said something meanwhile
        elif inside and not line.startswith((" ", "\t", "|", "+")):
            inside = False
            yield line.strip()
        elif not inside and (_PLAIN.search(line) or _EXCEPTION.match(line)):
            yield line.strip()
