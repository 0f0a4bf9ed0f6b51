"""The service's log: a file in state_dir that stays when Ray goes, a line for each event, as text or as JSON.

2026-11-30 07:08:33,120 INFO longprefill.orchestrator.controller.core job job-b47...: prefilling
{"time": "2026-11-30T07:08:33.120+00:00", "level": "info", "logger": "...", "message": "...", "job": "job-b47..."}
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path

logger = logging.getLogger(__name__)

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
MAX_BYTES = 16 << 20
NUM_OLD = 4
JOB = re.compile(r"\bjob-[0-9a-f]{24}\b")
RANK = re.compile(r"\brank (\d+)\b")


class JsonFormatter(logging.Formatter):
    """An object a line. What a message says of a job, a group or worker and a rank is a field beside it too."""

    def __init__(self, hosts: Sequence[str]) -> None:
        """`hosts` are the names of all groups and workers."""
        super().__init__()
        longest_first = sorted(hosts, key=len, reverse=True)
        self._host = re.compile(r"(?<![\w-])(?:" + "|".join(map(re.escape, longest_first)) + r")(?![\w-])")
        self._has_hosts = bool(hosts)

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        if found := JOB.search(message):
            entry["job"] = found[0]
        if self._has_hosts and (found := self._host.search(message)):
            entry["group"] = found[0]
        if found := RANK.search(message):
            entry["rank"] = int(found[1])
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def log_to_file(path: Path, log_format: str, hosts: Sequence[str]) -> None:
    """Sends this process's log, from INFO on, to a file that is moved aside at `MAX_BYTES`, and warnings to standard
    error too. Once a process; a directory that cannot be written leaves standard error.
    """
    formatter = JsonFormatter(hosts) if log_format == "json" else logging.Formatter(TEXT_FORMAT)
    stderr = logging.StreamHandler()
    stderr.setLevel(logging.WARNING)
    handlers: list[logging.Handler] = [stderr]
    trouble: OSError | None = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handlers.append(RotatingFileHandler(path, maxBytes=MAX_BYTES, backupCount=NUM_OLD, encoding="utf-8"))
    except OSError as error:
        stderr.setLevel(logging.INFO)
        trouble = error
    for handler in handlers:
        handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    if trouble is not None:
        logger.warning("%s cannot be written, the log goes to standard error: %s", path, trouble.strerror)
