"""What a run logs, for TensorBoard; an extra, since `log.jsonl` has the same values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from cedar.errors import ConfigError


class Board:
    """Scalars under `RUN/tensorboard`, written as they come.

    Raises:
        ConfigError: The package tensorboard is missing.
    """

    def __init__(self, run: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("--tensorboard needs the package: pip install 'cedar-lm[tensorboard]'") from error
        self._writer = SummaryWriter(str(Path(run) / "tensorboard"))

    def add(self, values: Mapping[str, Any]) -> None:
        """Each number of a log line as a scalar at the line's step; words are left to the log."""
        step = int(values["step"])
        for name, value in values.items():
            if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool):
                self._writer.add_scalar(name, float(value), step)

    def __enter__(self) -> Board:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
