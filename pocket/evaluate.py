"""Judges a pocket checkpoint by combinations it has never seen, through the public API.

python -m pocket.evaluate DIR [--n 300] [--seed 0] [--check] [--guidance 4] [--device auto] [--dtype auto]
"""

import argparse
import sys

from pocket import evaluate_qwen
from pocket.evaluate_neo import Examination
from pocket.scoreboard import evaluate
from underpaint import Pipeline
from underpaint.models.neo_unify import NeoUnify
from underpaint.pipeline import load_service


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", help="directory of the checkpoint")
    parser.add_argument("--n", type=int, default=300, help="examples in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="exit with 1 below the goals")
    parser.add_argument(
        "--guidance", type=float, help="guidance scale of SenseNova-U1; the checkpoint's own by default"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    print(f"{args.checkpoint}, seed {args.seed}, guidance {args.guidance}, device {args.device}, dtype {args.dtype}")
    service = load_service(args.checkpoint, {"device": args.device, "dtype": args.dtype})
    if isinstance(service.model, NeoUnify):
        goals = Examination(service, args.seed, args.guidance).goals()
    elif args.guidance is not None:
        parser.error("--guidance is for SenseNova-U1; the pocket Qwen-Image is judged without guidance")
    else:
        goals = evaluate_qwen.goals(Pipeline(service), args.seed)
    reached = evaluate(goals, args.n, args.seed)
    if args.check and not reached:
        sys.exit(1)


if __name__ == "__main__":
    main()
