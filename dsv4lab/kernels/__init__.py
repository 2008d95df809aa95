"""One operation a module: contract, cases, reference, work, Triton kernels, one public function.

Without a GPU the kernels are interpreted. Triton decides that when it is first imported, so it is settled here.
TRITON_INTERPRET=0 keeps the compiler, for `dsv4lab.static`.
"""

import os
import warnings

from dsv4lab import hardware

if not hardware.present():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Kernels overflow and compare NaN on purpose; NumPy, which interprets them, would say so each time.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
