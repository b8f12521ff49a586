"""What a K/V codec costs in quality and saves in bytes, on held-out prompts and edits of the pocket checkpoint.

python -m pocket.codec_table [--n 50] [--seed 0] [--device auto] [--json]
"""

import argparse
import json
import random

import torch
from PIL import Image
from rich.console import Console
from tqdm import tqdm

from pocket.demo import QWEN_IMAGE
from pocket.scenes import Scene, render, scene_row
from pocket.tasks import draw_example
from underpaint.bench.codec import CODEC_NAMES, Sample, codec
from underpaint.images import to_picture
from underpaint.report import show


def draw_samples(num: int, seed: int) -> list[Sample]:
    """Text-to-image, edits with one reference and with two in turn, all held out from training."""
    rng = random.Random(seed)
    samples = []
    for index in range(num):
        example = draw_example(rng, "held_out", index % 3)
        samples.append(Sample(example.prompt, tuple(map(_picture, example.references)), seed + index))
    return samples


def _picture(scene: Scene) -> Image.Image:
    return to_picture(render(torch.tensor([scene_row(scene)]))[0])


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes and PSNR of the K/V codecs on pocket pictures.")
    parser.add_argument("--n", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    samples = draw_samples(arguments.n, arguments.seed)
    with tqdm(total=len(samples) * len(CODEC_NAMES), desc="painting", leave=False) as bar:
        report = codec(QWEN_IMAGE, samples, arguments.device, progress=bar.update)
    if arguments.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        show(report, Console())


if __name__ == "__main__":
    main()
