"""Trains and exports the pocket SenseNova-U1: `python -m pocket.train_neo --out DIR --max-seconds 520`.

`DIR/state` holds what is needed to go on with `--resume`; every run ends with an export of the averaged weights into
`--checkpoint`. How it went on one NVIDIA H200 is in README.md.
"""

import argparse
from pathlib import Path

import torch

from pocket.neo_pool import TASKS
from pocket.neo_stage import NeoOptions, NeoStage
from pocket.training import Clock

STEPS = 10000
# In the order of TASKS: answer, look, t2i, edit1, edit2, dialogue.
POOL = (60000, 30000, 120000, 80000, 60000, 80000)
BATCH = (192, 24, 160, 96, 64, 96)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the state")
    parser.add_argument("--checkpoint", type=Path, default=Path("pocket/sensenova-u1"), help="what is exported")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help="length of the schedule")
    parser.add_argument("--stop", type=int, help="end this run at that step of the schedule")
    parser.add_argument("--max-seconds", type=float, default=1e9, help="end this run after that time")
    parser.add_argument("--finish", action="store_true", help="cut the schedule so that it ends with this run")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--pool", type=int, nargs=len(TASKS), default=POOL, help="examples of each task")
    parser.add_argument("--batch", type=int, nargs=len(TASKS), default=BATCH, help="lines of each task a step")
    parser.add_argument("--workers", type=int, default=0, help="processes that draw examples; 0 for this one alone")
    parser.add_argument("--report", type=int, default=128, help="held-out examples of each task to judge at the end")
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument("--resume", action="store_true", help="go on from the state in --out")
    begin.add_argument("--start", type=Path, help="begin with the weights of this checkpoint instead of fresh ones")
    return parser.parse_args()


def main() -> None:
    """The command line."""
    args = _arguments()
    clock = Clock(args.max_seconds)
    torch.backends.cudnn.benchmark = True  # shapes never change
    options = NeoOptions(args.seed, tuple(args.pool), tuple(args.batch), args.rate)
    stage = NeoStage(torch.device(args.device), options)
    state = args.out / "state"
    if args.resume:
        stage.load(state)
    if args.start is not None:
        stage.start_from(args.start)
    pools = stage.draw_pools(args.seed, args.workers)
    clock.say(f"seed {args.seed}, pools of {args.pool}, from step {stage.trainer.step}")
    stop = args.steps if args.stop is None else args.stop
    stage.train(pools, args.steps, stop, clock, args.max_seconds, args.finish, state)
    size = stage.export(args.checkpoint)
    clock.say(f"{args.checkpoint}: step {stage.trainer.step}, {size / 1e6:.2f} MB")
    for scale in (1.0, 4.0):
        if args.report:
            clock.say(stage.report(args.report, scale))
    if stage.device.type == "cuda":
        clock.say(f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most")


if __name__ == "__main__":
    main()
