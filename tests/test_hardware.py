"""The peak table, its lookup, and the probe of a live device."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from dsv4lab.hardware import GPUS, SM120_SHARED_MEMORY, arch_key, lookup, present, probe


@pytest.mark.parametrize(
    ("name", "capability", "sms"),
    [
        ("H200", (9, 0), 132),
        ("NVIDIA H200", (9, 0), 132),
        ("nvidia h100 80gb hbm3", (9, 0), 132),
        ("RTX PRO 6000 Blackwell", (12, 0), 188),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 188),
        ("NVIDIA GeForce RTX 5090", (12, 0), 170),
        ("DGX Spark GB10", (12, 1), 48),
        ("RTX 4090", (8, 9), 128),
        ("L40S", (8, 9), 142),
        ("A100", (8, 0), 108),
    ],
)
def test_lookup_by_short_and_by_driver_name(name, capability, sms):
    gpu = lookup(name)
    assert (gpu.capability, gpu.sms) == (capability, sms)


@pytest.mark.parametrize("name", ["H100 PCIe", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "MI300X", ""])
def test_lookup_never_takes_a_sibling_for_the_part(name):
    with pytest.raises(ValueError, match=r"is no GPU of the table; known: H200, .*A100"):
        lookup(name)


def test_shared_memory_limits():
    assert SM120_SHARED_MEMORY == 101376
    limits = {arch_key(gpu.capability): gpu.shared_memory_per_block for gpu in GPUS}
    assert limits == {"sm_80": 166912, "sm_89": 101376, "sm_90": 232448, "sm_120": 101376, "sm_121": 101376}


def test_every_entry_is_whole_and_has_a_source():
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)
    for gpu in GPUS:
        assert gpu.source
        assert min(gpu.sms, gpu.l2_bytes, gpu.dram_bytes_per_s, gpu.bf16_flops) > 0
        assert gpu.fp8_flops is None or gpu.fp8_flops == pytest.approx(2 * gpu.bf16_flops, rel=0.02)


class _Cuda:
    def __init__(self, available):
        self.is_available = lambda: available
        self.current_device = lambda: 1
        self.device_count = lambda: 2

    def get_device_properties(self, index):
        assert index == 1
        return SimpleNamespace(
            name="NVIDIA H200",
            major=9,
            minor=0,
            multi_processor_count=132,
            shared_memory_per_block_optin=232448,
            L2_cache_size=62914560,
            total_memory=2**37,
        )


def test_probe_reports_the_current_device(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=_Cuda(available=True)))
    assert present()
    seen = probe()
    gpu = lookup(seen["name"])
    for field in ("capability", "sms", "shared_memory_per_block", "l2_bytes"):
        assert seen[field] == getattr(gpu, field)
    assert (seen["count"], seen["memory_bytes"]) == (2, 2**37)


@pytest.mark.parametrize("torch", [None, SimpleNamespace(cuda=_Cuda(available=False))], ids=["no torch", "no GPU"])
def test_probe_without_a_gpu(monkeypatch, torch):
    monkeypatch.setitem(sys.modules, "torch", torch)  # None makes the import fail
    assert probe() is None and present() is False


@pytest.mark.gpu
def test_importing_the_kernels_touches_no_gpu():
    code = "import torch, dsv4lab.kernels.sparse_mla; print(torch.cuda.is_initialized())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "blocks"),
    [(255, 67_712, 4, 1), (255, 48_000, 4, 2), (212, 50_176, 4, 2), (212, 50_240, 4, 1), (64, 0, 8, 4), (16, 0, 8, 6)],
)
def test_blocks_an_sm_holds_by_warps_registers_and_shared_memory(registers, shared, warps, blocks):
    assert lookup("RTX PRO 6000 Blackwell").resident_blocks(warps, registers, shared) == blocks
