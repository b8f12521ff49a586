"""Trains the pocket SenseNova-U1: words and pictures together, one loss for every task.

A step is deterministic in its number: what it picks and draws is seeded by it, and the state is kept in fp32, so a run
that was stopped and resumed is the run that was not.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pocket.build_neo import (
    NUM_CELLS,
    NUM_INFERENCE_STEPS,
    POCKET,
    TRAINING_T_EPS,
    Sizes,
    build_neo_tokenizer,
    build_network,
    config_values,
    export,
    neo_config,
)
from pocket.checker import check
from pocket.neo_model import NeoBatch, NeoModel, batched_cells
from pocket.neo_pool import SYSTEM_TURN, TASKS, NeoExample, NeoPool, NeoTask, draw_neo_example, draw_pools
from pocket.scenes import CANVAS, CELL_SIZE, JITTER, RADII
from pocket.scenes import GRID as SCENE_SIDE
from pocket.training import CapturedStep, Clock, Trainer, cosine_rate
from underpaint.layout import Grid
from underpaint.models.neo_unify.config import CELL_VALUES
from underpaint.models.neo_unify.flow import DEFAULT_TIMESTEP_SHIFT, flow_step, flow_times, velocity
from underpaint.models.neo_unify.prompt import IMAGE_CONTEXT
from underpaint.models.neo_unify.vision import to_pixels

READ_NOISE = 0.02  # deviation, of 1, of pictures that are read back: at inference they are paintings, not renderings
TEXT_WEIGHT = 1.0  # of a loss of text beside one of pictures
# Of a pixel where the sequence tells of a thing, beside one of the background. Which shape it has is a few dozen pixels
# of 16,384. As the places are known from what the model reads, its best answer stays the mean.
THING_WEIGHT = 8.0
# Of the targets, and at most how far: the state is noise over a picture that is part of the way to one with other
# shapes and colours than the text tells, while the target is the true one. Otherwise what a state of training shows is
# always true, and the model stops reading the text once it shows a shape; but a state of inference was made from
# predictions that were not yet sure, and which shape it sharpens to is then left to chance.
MISTAKEN_SHARE, MISTAKE = 0.5, 0.7
WARMUP_STEPS = 300
REPORT_EVERY, SAVE_EVERY = 500, 2500


@dataclass(frozen=True)
class NeoOptions:
    """``pool`` and ``batch``: examples for each of ``tasks``, lines a step for each."""

    seed: int
    pool: tuple[int, ...]
    batch: tuple[int, ...]
    peak_rate: float
    sizes: Sizes = POCKET
    tasks: tuple[NeoTask, ...] = TASKS


def loss_names(tasks: Sequence[NeoTask]) -> list[str]:
    """One name a loss, in the order in which `NeoLoss` returns them."""
    return [f"{t.name}/{part}" for t in tasks for part, has in (("text", t.talks), ("paint", t.paints)) if has]


def make_batch(task: NeoTask, lines: NeoPool, noisy: Tensor, times: Tensor, read_noise: float = 0.0) -> NeoBatch:
    """Some lines, and noisy targets (B, targets, cells, 3072) with their times."""
    read = take_pictures(lines.pictures, task.reads).float() / 255
    if read_noise and task.paints and set(task.paints) & set(task.reads):
        read = read + read_noise * torch.randn_like(read)
    copies = noisy.shape[1] // max(len(task.paints), 1)
    stops = lines.stops.long().repeat_interleave(copies, dim=1)
    return NeoBatch(task, lines.ids.long(), lines.system, read, stops, noisy, times)


def take_pictures(pictures: Tensor, which: tuple[int, ...]) -> Tensor:
    """Of (B, pictures, ...) those in `which`, in order. Without an index on the device, which a graph cannot make."""
    return torch.stack([pictures[:, i] for i in which], dim=1) if which else pictures[:, :0]


def painted_cells(pictures: Tensor) -> Tensor:
    """(B, pictures, cells, 3072) in [-1, 1] of (B, pictures, 3, CANVAS, CANVAS) uint8."""
    return batched_cells(pictures.float() / 127.5 - 1)


def thing_reach() -> Tensor:
    """(scene cells, cells, 3072): 1 for the pixels that a thing in that cell of a scene can reach, else 0."""
    pixel = torch.arange(CANVAS) + 0.5
    reach = RADII[-1] + JITTER
    along = [((pixel - (i + 0.5) * CELL_SIZE).abs() < reach).float() for i in range(SCENE_SIDE)]
    squares = torch.stack([torch.outer(y, x) for y in along for x in along])
    return batched_cells(squares[:, None].expand(-1, 3, -1, -1))


def no_targets(lines: NeoPool) -> tuple[Tensor, Tensor]:
    """Noisy states and times of lines of which nothing is painted."""
    count, device = len(lines.ids), lines.ids.device
    return torch.zeros(count, 0, NUM_CELLS, CELL_VALUES, device=device), torch.zeros(count, 0, device=device)


def text_loss(logits: Tensor, ids: Tensor, spoken: Tensor) -> Tensor:
    """Mean cross-entropy of the tokens that the model writes; each is predicted by the row before it. Every line that
    has some counts the same: long descriptions must not drown short answers."""
    each = F.cross_entropy(logits[:, :-1].float().transpose(1, 2), ids[:, 1:].long(), reduction="none")
    counted = spoken[:, 1:].float()
    count = counted.sum(1)
    return ((each * counted).sum(1) / count.clamp_min(1)).sum() / (count > 0).sum().clamp_min(1)


class NeoLoss(nn.Module):
    """Next-token loss, and flow matching: z = t picture + (1 - t) scale noise, the model predicts the picture, the
    velocity (picture - z) / (1 - t) is compared. Times are spread as inference spreads its steps. The picture in z may
    be mistaken, see ``MISTAKE``."""

    reach: Tensor

    def __init__(self, model: NeoModel, tasks: Sequence[NeoTask], dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.tasks = tuple(tasks)
        self.dtype = dtype
        self.register_buffer("reach", thing_reach().to(model.constant("mean").device), persistent=False)

    def forward(self, lines: list[NeoPool]) -> Tensor:
        """`lines`: picked from the pool of each task. Returns the losses of `loss_names`, fp32."""
        batches, truths = [], []
        for task, line in zip(self.tasks, lines, strict=True):
            noisy, times, truth = self._draw_targets(task, line) if task.paints else (*no_targets(line), None)
            batches.append(make_batch(task, line, noisy.to(self.dtype), times, READ_NOISE))
            truths.append(truth)
        losses = []
        for batch, line, truth, (logits, pixels) in zip(batches, lines, truths, self.model(batches), strict=True):
            if logits is not None:
                losses.append(text_loss(logits, line.ids, line.spoken))
            if truth is not None:
                remaining = (1 - batch.times).clamp_min(TRAINING_T_EPS)[..., None, None]
                weights = self._pixel_weights(batch.task, line.told)
                losses.append((weights * ((pixels.float() - truth) / remaining).square()).mean() / weights.mean())
        return torch.stack(losses)

    def _pixel_weights(self, task: NeoTask, told: Tensor) -> Tensor:
        """(B, targets, cells, 3072) from (B, painted pictures, scene cells) bool."""
        near = (told.to(self.reach.dtype) @ self.reach.flatten(1)).clamp_max(1).unflatten(-1, self.reach.shape[1:])
        return (1 + (THING_WEIGHT - 1) * near).repeat_interleave(task.copies, dim=1)

    def _draw_targets(self, task: NeoTask, line: NeoPool) -> tuple[Tensor, Tensor, Tensor]:
        """Noisy states (B, targets, cells, 3072), times (B, targets) and clean pictures; the copies of a picture
        follow one another, each with a time from its own part of the range."""
        clean = painted_cells(take_pictures(line.pictures, task.paints))
        truth, mistaken = (x.repeat_interleave(task.copies, dim=1) for x in (clean, painted_cells(line.mistaken)))
        part = torch.arange(task.copies, device=truth.device).repeat(len(task.paints))
        uniform = (part + torch.rand(truth.shape[:2], device=truth.device)) / task.copies
        sigma = DEFAULT_TIMESTEP_SHIFT * uniform / (1 + (DEFAULT_TIMESTEP_SHIFT - 1) * uniform)
        noise = self.model.noise_scale * torch.randn(truth.shape, device=truth.device)
        is_mistaken, far = torch.rand(2, *truth.shape[:2], device=truth.device)
        shown = torch.lerp(truth, mistaken, ((is_mistaken < MISTAKEN_SHARE) * MISTAKE * far)[..., None, None])
        return torch.lerp(shown, noise, sigma[..., None, None]), 1 - sigma, truth


class NeoStage:
    """Network, trainer, and the pass over all tasks."""

    def __init__(self, device: torch.device, options: NeoOptions) -> None:
        self.device = device
        self.options = options
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.tokenizer = build_neo_tokenizer()
        self.values = config_values(options.sizes, len(self.tokenizer), self.tokenizer.eos_token_id)
        network = build_network(neo_config(self.values), options.seed)
        context = self.tokenizer.convert_tokens_to_ids(IMAGE_CONTEXT)
        system = self.tokenizer(SYSTEM_TURN, add_special_tokens=False).input_ids
        grids: list[Grid] = [task.grid for task in options.tasks]
        self.model = NeoModel(network, system, context, grids).to(device)
        self.trainer = Trainer(self.model, decay=0.999, betas=(0.9, 0.98), weight_decay=0.01)
        self.loss = NeoLoss(self.model, options.tasks, self.dtype)
        names = loss_names(options.tasks)
        weights = [TEXT_WEIGHT if name.endswith("text") else 1.0 for name in names]
        self.weights = torch.tensor(weights, device=device) / sum(weights)
        self.generator = torch.Generator(device)

    def _cast(self, weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
        return {prefix + name: weight.to(self.dtype) for name, weight in weights.items()}

    def _run(self, inputs: list[Tensor]) -> Tensor:
        width = len(inputs) // len(self.options.tasks)
        lines = [NeoPool(*inputs[start : start + width]) for start in range(0, len(inputs), width)]
        losses = torch.func.functional_call(self.loss, self._cast(self.trainer.parameters, "model."), (lines,))
        self.trainer.update((losses * self.weights).sum())
        return losses.detach()

    def draw_pools(self, seed: int, workers: int = 0) -> list[NeoPool]:
        """The training examples of each task."""
        return draw_pools(seed, self.options.tasks, self.options.pool, self.tokenizer, self.device, workers)

    def train(
        self, pools: list[NeoPool], num_steps: int, stop_step: int, clock: Clock, max_seconds: float, finish: bool,
        state: Path | None,
    ) -> None:  # fmt: skip
        """Go on to `stop_step` of a schedule over `num_steps`, or until the clock shows `max_seconds`, and save.

        `finish`: cut the schedule to what fits, so that it is complete at the end.
        """
        captured = CapturedStep(self._run, self.trainer.optimizer)
        names = loss_names(self.options.tasks)
        recent = torch.zeros(len(names), device=self.device)
        while self.trainer.step < min(stop_step, num_steps) and clock.seconds < max_seconds:
            step = self.trainer.step
            # The step alone decides what is drawn; 2 ** 32 keeps steps of different seeds apart.
            torch.manual_seed((self.options.seed << 32) + step)
            self.generator.manual_seed((self.options.seed << 32) + step)
            self.trainer.set_rate(cosine_rate(step, num_steps, self.options.peak_rate, WARMUP_STEPS))
            picked = [p.pick(n, self.generator) for p, n in zip(pools, self.options.batch, strict=True)]
            losses = captured([x for lines in picked for x in lines.tensors])
            recent += losses
            self.trainer.step += 1
            planned = clock.plan(step, num_steps, losses)
            num_steps = planned if finish else num_steps
            if self.trainer.step % REPORT_EVERY == 0:
                means = zip(names, (recent / REPORT_EVERY).tolist(), strict=True)
                clock.say(f"step {self.trainer.step} " + " ".join(f"{name} {mean:.4f}" for name, mean in means))
                recent.zero_()
            if state is not None and self.trainer.step % SAVE_EVERY == 0:
                self.save(state)
                clock.say(self.report(64, scale=1.0))
        if state is not None:
            self.save(state)
        clock.say(f"stopped at step {self.trainer.step} of {num_steps}")

    def save(self, folder: Path) -> None:
        """Write weights, average and moments in fp32, and the step. `load` reads them."""
        folder.mkdir(parents=True, exist_ok=True)
        optimizer = self.trainer.optimizer.state
        tensors = {"step": torch.tensor(self.trainer.step)}
        for name, parameter in self.trainer.parameters.items():
            tensors[f"weights.{name}"] = parameter.detach()
            tensors[f"average.{name}"] = self.trainer.average[name]
            for key in ("exp_avg", "exp_avg_sq"):
                if parameter in optimizer:
                    tensors[f"{key}.{name}"] = optimizer[parameter][key]
        partial = folder / "state.partial"
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, partial)
        partial.rename(folder / "state.safetensors")  # a run that is cut short leaves the state before

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote."""
        tensors = load_file(folder / "state.safetensors")
        step = int(tensors["step"])
        self.trainer.step = step
        with torch.no_grad():
            for name, parameter in self.trainer.parameters.items():
                parameter.copy_(tensors[f"weights.{name}"])
                self.trainer.average[name].copy_(tensors[f"average.{name}"])
                if step:
                    self.trainer.optimizer.state[parameter] = {
                        "step": torch.tensor(float(step), device=parameter.device),
                        "exp_avg": tensors[f"exp_avg.{name}"].to(parameter),
                        "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].to(parameter),
                    }

    def start_from(self, checkpoint: Path) -> None:
        """Begin with the weights of an export; moments and schedule begin anew."""
        tensors = {name: w for file in sorted(checkpoint.glob("*.safetensors")) for name, w in load_file(file).items()}
        with torch.no_grad():
            for name, parameter in self.trainer.parameters.items():
                parameter.copy_(tensors[name.removeprefix("network.")])
                self.trainer.average[name].copy_(parameter)

    def export(self, root: Path) -> int:
        """Write the averaged weights as a checkpoint. Returns its size in bytes."""
        weights = {name.removeprefix("network."): weight for name, weight in self.trainer.average.items()}
        return export(weights, self.values, self.tokenizer, root)

    @torch.no_grad()
    def report(self, count: int, scale: float) -> str:
        """Scores of the averaged weights on `count` held-out examples of each task. Answers are compared token by
        token, the true ones before each; of a dialogue each picture is judged by itself, after the true dialogue."""
        weights = self._cast(self.trainer.average, "")
        right: Counter[str] = Counter()
        total: Counter[str] = Counter()
        for task in self.options.tasks:
            rng = random.Random(f"report/{self.options.seed}/{task.name}")
            examples = [draw_neo_example(rng, "held_out", task) for _ in range(count)]
            lines = NeoPool.of(self.tokenizer, task, examples, self.device)
            if task.talks:
                verdicts = self._answers(weights, task, lines)
                for example, verdict in zip(examples, verdicts, strict=True):
                    names = {f"{task.name}/text", f"{task.name}/{example.kind}"}
                    total.update(names)
                    right.update(names if verdict else ())
            if task.paints:
                # The same scenes; only what is read of the texts is left out.
                rng = random.Random(f"report/{self.options.seed}/{task.name}")
                dropped = [draw_neo_example(rng, "held_out", task, dropped=True) for _ in range(count)]
                empty = NeoPool.of(self.tokenizer, task, dropped, self.device)
                pictures = self._paint(weights, task, lines, replace(empty, pictures=lines.pictures), scale)
                total[f"{task.name}/paint"] += count
                right[f"{task.name}/paint"] += sum(self._judge(task, examples, pictures))
        scores = " ".join(f"{name} {right[name] / total[name]:.3f}" for name in sorted(total))
        return f"step {self.trainer.step}, guidance {scale}: {scores}"

    def _answers(self, weights: dict[str, Tensor], task: NeoTask, lines: NeoPool) -> list[bool]:
        batch = make_batch(task, lines, *no_targets(lines))
        ((logits, _),) = torch.func.functional_call(self.model, weights, ([batch],))
        wrong = (logits[:, :-1].argmax(-1) != lines.ids[:, 1:]) & lines.spoken[:, 1:]
        return (~wrong.any(1)).tolist()

    def _paint(self, weights: dict[str, Tensor], task: NeoTask, lines: NeoPool, empty: NeoPool, scale: float) -> Tensor:
        """(B, painted pictures, cells, 3072) in about [-1, 1]."""
        noise = torch.Generator(self.device).manual_seed(self.options.seed)
        shape = (len(lines.ids), len(task.paints), NUM_CELLS, CELL_VALUES)
        state = self.model.noise_scale * torch.randn(shape, generator=noise, device=self.device).to(self.dtype)
        times = flow_times(NUM_INFERENCE_STEPS, DEFAULT_TIMESTEP_SHIFT).to(self.device)
        for step in range(NUM_INFERENCE_STEPS):
            at = times[step].expand(shape[:2])
            batches = [make_batch(task, x, state, at) for x in ([lines] if scale == 1 else [lines, empty])]
            directions = []
            for batch in batches:
                ((_, pixels),) = torch.func.functional_call(self.model, weights, ([batch],))
                directions.append(velocity(pixels, state, at[..., None, None]))
            direction = directions[0]
            if scale != 1:
                direction = directions[1] + scale * (direction - directions[1])
            state = flow_step(state, direction, times[step], times[step + 1])
        return state

    def _judge(self, task: NeoTask, examples: Sequence[NeoExample], painted: Tensor) -> list[bool]:
        verdicts = []
        for example, cells in zip(examples, painted.float().cpu(), strict=True):
            ok = True
            for index, one in zip(task.paints, cells, strict=True):
                ok &= check(as_picture(one), example.scenes[index]).ok
            verdicts.append(ok)
        return verdicts


def as_picture(cells: Tensor) -> np.ndarray:
    """(cells, 3072) in about [-1, 1] -> (CANVAS, CANVAS, 4) uint8, as the engine shows it."""
    pixels = to_pixels(cells, (CANVAS // 32, CANVAS // 32))
    shown = ((pixels * 0.5 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    return F.pad(shown, (0, 0, 0, 0, 0, 1), value=255).permute(1, 2, 0).contiguous().numpy()
