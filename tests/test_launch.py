"""No kernel is compiled, tuned or loaded in a capture or after the freeze. Without a GPU a named target stands in."""

import pytest
import torch
import triton
import triton.language as tl

from dsv4lab import hardware
from dsv4lab.kernels.launch import ColdKernel, frozen, is_warm, launch, target, warm

pytest_plugins = ["compiler_on"]
DEVICE = "cpu" if hardware.probe() is None else "cuda"


@triton.jit
def store(x, n, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), n)


@triton.autotune([triton.Config({}, num_warps=1), triton.Config({}, num_warps=2)], key=["n"])
@triton.jit
def tuned_store(x, n, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), n)


def store_call(n=3, BLOCK=8):
    return (1,), dict(x=torch.zeros(BLOCK, device=DEVICE), n=n, BLOCK=BLOCK)


def test_a_launch_takes_its_arguments_by_name():
    grid, arguments = store_call()
    launch(store, grid, arguments | {"num_warps": 1})
    assert (arguments["x"] == 3).all()


def test_what_is_interpreted_is_always_warm():
    if DEVICE == "cuda":
        pytest.skip("kernels are compiled here")
    with frozen():
        warm(store, *store_call(BLOCK=32))
        assert is_warm(store, *store_call(BLOCK=64))
        launch(store, *store_call(BLOCK=128))


def test_a_cpu_is_planned_for_as_one_sm():
    assert target(torch.device("cpu")) == ("sm_90", 1)


def test_asking_compiles_nothing(compiled):
    compiled("""
        assert not is_warm(add, *call())
        (cache, *_), = add.device_caches.values()
        assert not cache
        add.warmup(grid=(1,), **call()[1])
        assert not is_warm(add, *call())  # compiled, and still to be loaded
        compile_and_load(add, *call())
        assert is_warm(add, *call()) and len(cache) == 1
    """)


def test_integers_make_variants_unless_they_are_kept_from_it(compiled):
    compiled("""
        compile_and_load(add, *call())
        assert all(is_warm(add, *call(n=n)) for n in (1, 16, 262208))
        assert not any(is_warm(add, *call(m=m)) for m in (1, 16))
        assert not is_warm(add, *call(BLOCK=16)) and not is_warm(add, *call(num_warps=2))
    """)


def test_c8_after_the_freeze_a_cold_kernel_is_named_with_its_shapes(compiled):
    compiled("""
        compile_and_load(add, *call())
        with frozen():
            with frozen():
                pass
            assert is_warm(add, *call())
            message = refusal(launch, add, *call(BLOCK=32))
            assert message.startswith("kernels are frozen and add is not warm"), message
            assert "x=float32[8], n=5, m=5, BLOCK=32, num_warps=1" in message, message
            assert "too late to warm up add" in refusal(warm, add, *call(BLOCK=32))
    """)


def test_c5_a_kernel_that_would_be_tuned_is_refused(compiled):
    compiled("""
        grid, arguments = (1,), dict(x=torch.empty(8), n=5)
        with frozen():
            assert "tuned is not warm" in refusal(launch, tuned, grid, arguments)
        assert "kernel tuned has to be tuned by a launch first" in refusal(warm, tuned, grid, arguments)
        tuned.cache[5, "torch.float32"] = tuned.configs[1]
        assert not is_warm(tuned, grid, arguments)
        compile_and_load(tuned.fn, grid, arguments | tuned.configs[1].all_kwargs())
        assert is_warm(tuned, grid, arguments) and not is_warm(tuned, grid, arguments | {"n": 6})
    """)


def test_asking_does_not_disturb_other_threads_and_hooks(compiled):
    compiled("""
        seen = []
        triton.knobs.runtime.jit_cache_hook = lambda **call: seen.append(call["fn"].name)
        def meanwhile(**call):
            thread = threading.Thread(target=compile_and_load, args=(add, *other))
            thread.start(), thread.join()
        from dsv4lab.kernels.launch import _compiling_nothing
        other = call(BLOCK=64)
        with _compiling_nothing():
            meanwhile()
        assert is_warm(add, *other) and seen == ["add"]
        assert not is_warm(add, *call(BLOCK=128)) and seen == ["add"]
    """)


def captured(body):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


@pytest.mark.gpu
def test_c5_a_cold_launch_is_refused_in_a_capture_that_stays_usable():
    cold, x = store_call(n=7, BLOCK=256), torch.zeros(8, device="cuda")
    with pytest.raises(ColdKernel, match=r"capturing a CUDA graph and store is not warm.*x=float32\[256\], n=7"):
        captured(lambda: launch(store, *cold))
    graph = captured(lambda: x.add_(1))
    graph.replay()
    assert (x == 1).all()
    warm(store, *cold)
    graph = captured(lambda: launch(store, *cold))
    assert not cold[1]["x"].any()
    graph.replay()
    assert (cold[1]["x"] == 7).all()


@pytest.mark.gpu
def test_c5_an_autotuned_kernel_is_captured_once_tuned_and_refused_before():
    call = store_call(n=11, BLOCK=512)
    with pytest.raises(ColdKernel, match="tuned_store is not warm"):
        captured(lambda: launch(tuned_store, *call))
    launch(tuned_store, *call)
    graph = captured(lambda: launch(tuned_store, *call))
    call[1]["x"].zero_()
    graph.replay()
    assert (call[1]["x"] == 11).all()


@pytest.mark.gpu
def test_warming_up_launches_nothing():
    call = store_call(n=5, BLOCK=1024)
    warm(store, *call)
    assert is_warm(store, *call) and not call[1]["x"].any()
    with frozen():
        launch(store, *call)
    assert (call[1]["x"] == 5).all()
