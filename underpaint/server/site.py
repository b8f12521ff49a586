"""What the routes of one server share."""

from dataclasses import dataclass

from opentelemetry.trace import Tracer
from structlog.typing import FilteringBoundLogger

from underpaint.server.config import ServerConfig
from underpaint.server.desk import Desk
from underpaint.server.fetch import Fetcher
from underpaint.server.metrics import Metrics
from underpaint.server.paint import Atelier


@dataclass(frozen=True)
class Site:
    config: ServerConfig
    atelier: Atelier
    desk: Desk
    metrics: Metrics
    fetcher: Fetcher
    log: FilteringBoundLogger
    tracer: Tracer
