"""``python -m underpaint``."""

from underpaint.cli import main

main()
