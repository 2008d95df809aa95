"""What several commands' options have in common."""

from pathlib import Path
from typing import Annotated

from tyro.conf import UseAppendAction, arg

Folder = Annotated[Path, arg(metavar="DIR")]
OptionalFolder = Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")]
OptionalFile = Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")]
OptionalNumber = Annotated[int | None, arg(metavar="N", help_behavior_hint="")]
Names = Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME")]
