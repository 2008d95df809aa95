"""What a notebook's last cell says, and the batch that runs notebooks and believes nothing else.

In a notebook: `finish` in the last cell, `skip` where a chapter cannot go on. From outside: `dsv4lab run`
(`parameters` checks what is asked for, `run` starts one process a notebook, `worker` is that process, `report` the
pages it leaves). Success is the file that `finish` writes; a notebook's own metadata is never read for it.
"""

from dsv4lab.notebooks.results import Skipped, finish, skip

__all__ = ["Skipped", "finish", "skip"]
