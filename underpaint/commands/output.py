"""Reports on the terminal."""

import json
import sys
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from underpaint.report import Report


def print_report(tables: "Report", as_json: bool) -> None:
    """As tables, or as JSON. Ends with status 1 if something in it was checked and is wrong."""
    from underpaint.report import show

    if as_json:
        print(json.dumps(tables.as_json(), indent=2, ensure_ascii=False))
    else:
        show(tables, Console())
    if tables.wrong:
        sys.exit(1)
