"""The server: OpenAI's HTTP API and a web page over one ``Service``. ``serve`` runs it, ``create_app`` builds it."""

from underpaint.server.app import create_app, create_site
from underpaint.server.config import ServerConfig
from underpaint.server.serve import serve

__all__ = ["ServerConfig", "create_app", "create_site", "serve"]
