"""Manthan's log lines as JSON, an object a line. docs/observability.md lists the fields."""

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any

LOGGER = "vllm.manthan"
STARTED, EVICTED, RESTORED, PREFETCHED = "started", "evicted", "restored", "prefetched"
NOT_STORED, CODEC_MEASURED = "not_stored", "codec_measured"
_LOADED = (
    *("session_id", "request_id", "blocks", "blocks_restored", "blocks_beside", "tokens", "cold_bytes"),
    *("seconds", "causes"),
)
EVENTS: dict[str, tuple[str, ...]] = {
    STARTED: ("policy", "codec", "ratio", "cold_store", "budget_bytes", "budget_tokens", "idle_after_seconds"),
    EVICTED: (
        *("session_id", "blocks", "blocks_beside", "blocks_encoded", "blocks_exact", "tokens", "hot_bytes"),
        *("cold_bytes", "idle_seconds", "seconds", "reason"),
    ),
    RESTORED: _LOADED,
    PREFETCHED: _LOADED,
    NOT_STORED: ("cause", "blocks"),
    CODEC_MEASURED: ("codec", "is_faithful"),
}
"""What a line about each event has, besides what all lines have."""
COMMON = ("time", "level", "logger", "process", "pid", "message")


def fields(event: str, **values: Any) -> dict[str, Any]:
    """`extra` of a log call about an event; any JSON formatter of logging records shows these."""
    assert {*values} == {*EVENTS[event]}, event
    return {"event": event, **values}


class JsonFormatter(logging.Formatter):
    """A record as one line: COMMON, the fields of its event if it has one, and an exception if it has one."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": getattr(record, "vllm_process_name", record.processName),
            "pid": record.process,
            "message": record.getMessage(),
        }
        if event := getattr(record, "event", None):
            told |= {"event": event} | {name: getattr(record, name) for name in EVENTS[event]}
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


def use_format(name: str) -> None:
    """Have this process's lines look so: text, as vLLM set them up, or json. More than once is as well as once."""
    logger = logging.getLogger(LOGGER)
    ours = [handler for handler in logger.handlers if isinstance(handler.formatter, JsonFormatter)]
    if name == "text":
        for handler in ours:
            logger.removeHandler(handler)
        logger.propagate = True
    elif not ours:
        handler = logging.StreamHandler(_stream())
        handler.setFormatter(JsonFormatter())
        logger.addHandler(handler)
        logger.propagate = False


def _stream() -> Any:
    """Where vLLM's own lines go."""
    for handler in logging.getLogger("vllm").handlers:
        if isinstance(handler, logging.StreamHandler):
            return handler.stream
    return sys.stderr if os.environ.get("VLLM_LOGGING_STREAM") == "ext://sys.stderr" else sys.stdout
