"""``underpaint inspect``, ``quantize`` and ``doctor``."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from underpaint.commands.arguments import AsJson, Device, Lora, Model
from underpaint.commands.output import print_report


def inspect(
    model: Model,
    card: Annotated[str | None, typer.Option(help="Say what a GPU with so much memory holds, as in 24GiB.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check a checkpoint and say what it needs, without loading it."""
    from underpaint.config import EngineConfig
    from underpaint.description import describe, on_card
    from underpaint.models import registry
    from underpaint.models.loading import locate
    from underpaint.report import parse_bytes

    checkpoint = registry.inspect(locate(model))
    if card is None:
        print_report(describe(checkpoint, EngineConfig()), as_json)
    else:
        print_report(on_card(checkpoint, parse_bytes(card), EngineConfig()), as_json)


def doctor(
    model: Annotated[str | None, typer.Argument(help="A checkpoint to check too.", metavar="[MODEL]")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """What this machine has, what would be used of it, and why not the rest. Status 1 if something keeps it from
    working."""
    from underpaint.doctor import examine
    from underpaint.models.loading import locate

    found, problems = examine(device, locate(model) if model else None)
    print_report(found, as_json)
    if problems:
        sys.exit(1)


def quantize(
    model: Model,
    out: Annotated[Path, typer.Argument(help="The directory to write; it must not exist.", metavar="OUT")],
    lora: Lora = None,
) -> None:
    """Write a checkpoint with the linears of its blocks in e4m3, which then loads like any other."""
    from underpaint import report
    from underpaint.models import registry
    from underpaint.models.loading import locate
    from underpaint.models.quantised import write_quantised

    write_quantised(locate(model), out, lora or ())
    before, after = (registry.num_bytes(registry.inspect(root)) for root in (locate(model), out))
    print(f"{out}  {report.cell(report.Bytes(before))} -> {report.cell(report.Bytes(after))}")
