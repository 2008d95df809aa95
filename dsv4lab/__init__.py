"""DeepSeek-V4-Flash decode on small GPUs, as a lab that measures itself.

Kernels, the cache layouts they read, the records of what they cost, and the notebooks that explain both. Importing the
package imports nothing heavy: torch and triton come with `dsv4lab.kv_cache`, `dsv4lab.numerics` and `dsv4lab.kernels`.
"""

__version__ = "0.1.0"
