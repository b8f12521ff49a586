"""Logs: one JSON object a line, with request ids, without prompts."""

from typing import TextIO

import structlog
from structlog.typing import FilteringBoundLogger


def make_log(stream: TextIO) -> FilteringBoundLogger:
    """A logger that writes to ``stream``. It is handed to whoever logs; nothing global is changed."""
    return structlog.wrap_logger(
        structlog.PrintLogger(stream),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(ensure_ascii=False),
        ],
        wrapper_class=structlog.make_filtering_bound_logger("info"),
        cache_logger_on_first_use=True,
    )
