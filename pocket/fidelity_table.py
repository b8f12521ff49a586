"""What fp8 does to pictures, on held-out prompts and edits of the pocket checkpoint: likeness to bf16, and scores.

python -m pocket.fidelity_table DIR [--n 50] [--seed 0] [--device auto] [--json]
"""

import argparse
import json
import random

from PIL import Image
from rich.console import Console
from tqdm import tqdm

from pocket.scoreboard import judge, picture
from pocket.tasks import draw_example
from underpaint.bench.codec import Sample
from underpaint.bench.fidelity import MODES, fidelity
from underpaint.report import show


def main() -> None:
    parser = argparse.ArgumentParser(description="PSNR, SSIM and scores against bf16 on pocket pictures.")
    parser.add_argument("checkpoint", help="directory of the checkpoint")
    parser.add_argument("--n", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    examples = [draw_example(rng, "held_out", index % 3) for index in range(arguments.n)]
    samples = [
        Sample(example.prompt, tuple(map(picture, example.references)), arguments.seed + index)
        for index, example in enumerate(examples)
    ]

    def right(index: int, painted: Image.Image) -> bool:
        return not judge(painted, examples[index].target).problems

    with tqdm(total=len(samples) * (1 + len(MODES)), desc="painting", leave=False) as bar:
        report = fidelity(arguments.checkpoint, samples, right, arguments.device, progress=bar.update)
    if arguments.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        show(report, Console())


if __name__ == "__main__":
    main()
