"""Reports on the terminal."""

import json

from rich.console import Console

from underpaint import report


def print_report(tables: report.Report, as_json: bool) -> None:
    """As tables, or as JSON."""
    if as_json:
        print(json.dumps(tables.as_json(), indent=2, ensure_ascii=False))
        return
    report.show(tables, Console())
