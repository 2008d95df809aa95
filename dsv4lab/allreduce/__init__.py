"""The all-reduce of a decode step, measured over the GPUs of one machine, or over processes on its CPU.

`setups` names what is compared, `worker` is one rank, `sweep` starts the ranks of one setup after the other and records
what they say. NVLink multicast (NVLS, multimem) stays off throughout: GPUs on PCIe have none.
"""
