"""What tests of compiled kernels share: scripts that run where the compiler is on, for a GPU that need not be there."""

import os
import subprocess
import sys
import textwrap

import pytest

PRELUDE = '''
import threading
import torch, triton, triton.language as tl
from triton.runtime.driver import driver
from dsv4lab.kernels.launch import ColdKernel, frozen, is_warm, launch, warm
from dsv4lab.static import NamedTarget

class Loads(NamedTarget):
    """Loads what is compiled nowhere, and keeps what is launched."""

    seen = []

    class utils:
        load_binary = staticmethod(lambda *_: (object(), 1, 8, 0, 1024))
        get_device_properties = staticmethod(lambda _: {"max_shared_mem": 232_448})

    def launcher_cls(self, source, metadata):
        return lambda *launched: self.seen.append(launched)

driver.set_active(NamedTarget("sm_90"))

@triton.jit(do_not_specialize=["n"])
def add(x, n, m, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), n + m)

@triton.autotune([triton.Config({"BLOCK": 8}), triton.Config({"BLOCK": 16})], key=["n"])
@triton.jit
def tuned(x, n, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), n)

def call(**other):
    return (1,), dict(x=torch.empty(8), n=5, m=5, BLOCK=8, num_warps=1) | other

def compile_and_load(kernel, grid, arguments):
    kernel.warmup(grid=grid, **arguments).module = object()  # there is no GPU to load it on

def refusal(what, *arguments):
    try:
        what(*arguments)
    except (ColdKernel, ValueError) as error:
        return str(error)
'''


@pytest.fixture
def compiled(tmp_path):
    """Runs a script in a process of its own, where the compiler is on: in this one kernels may be interpreted."""

    def run(*code):
        script = tmp_path / "script.py"  # Triton reads a kernel's source from its file
        script.write_text(PRELUDE + "".join(map(textwrap.dedent, code)))
        environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run
