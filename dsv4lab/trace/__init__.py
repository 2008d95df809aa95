"""Where the GPU time goes, and which line of Python it came from: traces in, frames out.

`read` takes a file (or a folder with one for each rank) and gives a `Trace`, one frame of GPU events with everything
known about each; `summary`, `timeline`, `steps`, `suspects` and `compare` make tables of it; `reduce` keeps it small,
and `record` takes one of a callable.
"""

from dsv4lab.trace.frames import Trace, TraceError
from dsv4lab.trace.reading import read, reduce
from dsv4lab.trace.recording import Recorded, record

__all__ = ["Recorded", "Trace", "TraceError", "read", "record", "reduce"]
