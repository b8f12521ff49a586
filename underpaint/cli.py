"""The command line: ``underpaint generate``, ``edit``, ``chat``, ``serve``, ``inspect``, ``quantize``, ``bench``."""

import sys

import typer

from underpaint.commands import bench, chat, checkpoint, paint, serve
from underpaint.errors import BadConfig, BadRequest, UnderpaintError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
bench_app = typer.Typer(no_args_is_help=True, help="Measurements; each prints its table, and JSON with --json.")
COMMANDS = (
    paint.generate, paint.edit, chat.chat, serve.serve, checkpoint.inspect, checkpoint.doctor, checkpoint.quantize,
)  # fmt: skip
BENCHMARKS = (
    bench.attention, bench.prefix, bench.step, bench.requests, bench.image, bench.understand, bench.handover,
    bench.kernels, bench.checkpoint,
)  # fmt: skip
for command in COMMANDS:
    app.command()(command)
for benchmark in BENCHMARKS:
    bench_app.command()(benchmark)
bench_app.command("serve")(serve.bench_serve)
app.add_typer(bench_app, name="bench")


@app.callback()
def about() -> None:
    """Paint and edit with Qwen-Image 2.1 or SenseNova-U1, and talk with the latter, from a prefix K/V cache."""


def main() -> None:
    """Entry point: a user's mistake is one sentence on stderr and status 2, another failure of ours status 1."""
    try:
        app(standalone_mode=True)
    except UnderpaintError as error:
        print(f"underpaint: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, BadRequest | BadConfig) else 1)
    except KeyboardInterrupt:
        print("underpaint: interrupted, nothing was written", file=sys.stderr)
        sys.exit(130)
