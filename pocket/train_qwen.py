"""Trains and exports the pocket Qwen-Image 2.1: `python -m pocket.train_qwen --stage vae|dit|export --out DIR`.

`DIR/vae` is the trained VAE; `DIR/vae_state` and `DIR/dit_state` hold what is needed to go on; `--stage export` writes
the checkpoint into `--checkpoint`.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage21

from pocket.dit_stage import DitStage, StageOptions
from pocket.export import NUM_INFERENCE_STEPS, export
from pocket.training import Clock
from pocket.vae_stage import VaeStage, export_vae, report

# Examples of each task, prefixes (pictures for the VAE) a step, and held-out examples to judge at the end.
DEFAULTS: dict[str, dict[str, Any]] = {
    "vae": {"steps": 12571, "pool": [65536], "batch": [64], "report": 512},
    "dit": {"steps": 8263, "pool": [200000, 100000, 70000], "batch": [160, 112, 80], "report": 128},
    "export": {"steps": 0, "pool": [0, 0, 0], "batch": [0, 0, 0], "report": 0},
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stage", choices=tuple(DEFAULTS), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of states and of the VAE")
    parser.add_argument("--checkpoint", type=Path, default=Path("pocket/qwen-image-2.1"), help="what export writes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pool-seed", type=int, default=0, help="draws the examples; change it when resuming")
    parser.add_argument("--steps", type=int, help="length of the schedule")
    parser.add_argument("--stop", type=int, help="end this run at that step of the schedule")
    parser.add_argument("--max-seconds", type=float, default=1e9, help="shorten the schedule to fit into this time")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--pool", type=int, nargs="+", help="examples of each task; for the VAE scenes")
    parser.add_argument("--batch", type=int, nargs="+", help="prefixes of each task a step; for the VAE pictures")
    parser.add_argument("--report", type=int, help="held-out examples (of each task) to judge at the end")
    parser.add_argument("--resume", action="store_true", help="go on from the state in --out")
    args = parser.parse_args()
    given = {name: value for name, value in vars(args).items() if value is not None}
    return argparse.Namespace(**{"stop": None, **DEFAULTS[args.stage], **given})


def run_vae(args: argparse.Namespace) -> None:
    """Train the VAE, export it with its latent statistics, and judge it."""
    device = torch.device(args.device)
    torch.backends.cudnn.benchmark = True  # shapes never change
    clock = Clock(args.max_seconds)
    stage = VaeStage(device, args.seed, args.pool[0], args.batch[0], args.rate)
    clock.say(f"vae: seed {args.seed}, {args.pool[0]} scenes rendered")
    state = args.out / "vae_state"
    if args.resume:
        stage.trainer.load(state)
    stage.train(args.steps, args.max_seconds - clock.seconds, state)
    export_vae(stage.trainer, stage.vae, stage.pictures[:8192], args.out / "vae")
    print("latent deviations", [round(x, 2) for x in stage.vae.config.latents_std])
    clock.say(report(stage.vae, device, args.report, args.seed + 1))


def load_vae(out: Path, device: torch.device) -> AutoencoderKLQwenImage21:
    """The exported VAE in the dtype of the device: bfloat16 on a GPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return AutoencoderKLQwenImage21.from_pretrained(out / "vae", torch_dtype=dtype).to(device).eval()


def _dit_stage(args: argparse.Namespace) -> DitStage:
    device = torch.device(args.device)
    options = StageOptions(args.seed, tuple(args.pool), tuple(args.batch), args.rate)
    return DitStage(load_vae(args.out, device), device, options)


def run_dit(args: argparse.Namespace) -> None:
    """Train encoder and transformer on the latents of the trained VAE, and judge them."""
    clock = Clock(args.max_seconds)
    stage = _dit_stage(args)
    state = args.out / "dit_state"
    if args.resume:
        stage.trainer.load(state)
    pools = stage.draw_pools(args.pool_seed)
    clock.say(f"dit: seed {args.seed}, pools of {args.pool} drawn with seed {args.pool_seed}")
    stage.train(pools, args.steps, args.stop or args.steps, args.max_seconds - clock.seconds, state)
    for scale in (1.0, 3.0):
        clock.say(stage.report(args.report, args.seed + 1, NUM_INFERENCE_STEPS, scale))


def run_export(args: argparse.Namespace) -> None:
    """Write the checkpoint from the averaged weights."""
    stage = _dit_stage(args)
    stage.trainer.load(args.out / "dit_state")
    export(stage.trainer, stage.model, stage.tokenizer, args.out / "vae", args.checkpoint)
    size = sum(path.stat().st_size for path in args.checkpoint.rglob("*") if path.is_file())
    print(f"{args.checkpoint}: step {stage.trainer.step}, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    arguments = _arguments()
    {"vae": run_vae, "dit": run_dit, "export": run_export}[arguments.stage](arguments)
