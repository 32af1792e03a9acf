"""Log lines for people, or a JSON object a line for machines; both carry the request's id."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO


class JsonLines(logging.Formatter):
    """One JSON object a line: `time` (UTC), `level`, `logger`, `message`, and whatever the caller gave as `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        whole = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            whole["exception"] = self.formatException(record.exc_info)
        return json.dumps(whole, ensure_ascii=False)


def set_up_logs(*, as_json: bool, stream: TextIO = sys.stderr) -> None:
    """Send what is logged from INFO on to `stream`."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
