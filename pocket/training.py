"""What both training stages share: schedule, averaged weights, one captured step, and a state that can be resumed."""

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

STEP = "step"  # the name under which a state keeps its step beside the tensors
WARMUP_CALLS = 3  # of a step before it is captured: lazy initialisation must not fall into the graph


def cosine_rate(step: int, num_steps: int, peak: float, warmup_steps: int) -> float:
    """Linear warm-up to `peak`, then a cosine to 2 % of it at `num_steps`."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = min((step - warmup_steps) / max(num_steps - warmup_steps, 1), 1.0)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


class Trainer:
    """fp32 weights of a module, their AdamW moments and their running average.

    The averaged weights are what is exported; `decay` is reached gradually, so that a short run is not an average
    over its first steps.
    """

    def __init__(self, module: nn.Module, decay: float, betas: tuple[float, float], weight_decay: float) -> None:
        self.module = module
        self.decay = decay
        self.step = 0
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        device = next(iter(self.parameters.values())).device
        self.average = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.rate = torch.zeros((), device=device)
        self.keep = torch.zeros((), device=device)
        matrices = [p for p in self.parameters.values() if p.ndim > 1]
        vectors = [p for p in self.parameters.values() if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=self.rate,
            betas=betas,
            fused=device.type == "cuda",
            capturable=device.type == "cuda",
        )

    def set_rate(self, rate: float) -> None:
        """The learning rate of the next update, and how much of the average the update keeps."""
        self.rate.fill_(rate)
        self.keep.fill_(min(self.decay, (1 + self.step) / (10 + self.step)))

    def update(self, loss: Tensor) -> None:
        """One optimiser step on gradients of norm at most 1, and one step of the average."""
        loss.backward()
        parameters = list(self.parameters.values())
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            averages = list(self.average.values())
            difference = torch._foreach_sub([p.detach() for p in parameters], averages)
            torch._foreach_mul_(difference, 1 - self.keep)
            torch._foreach_add_(averages, difference)

    def save(self, folder: Path) -> None:
        """Write weights, average and moments, one file each so that none is large. `load` reads them."""
        folder.mkdir(parents=True, exist_ok=True)
        names = {id(p): name for name, p in self.parameters.items()}
        state = self.optimizer.state
        first = {names[id(p)]: s["exp_avg"] for p, s in state.items()}
        second = {names[id(p)]: s["exp_avg_sq"] for p, s in state.items()}
        weights = {name: p.detach() for name, p in self.parameters.items()}
        tensors = {"weights": weights, "average": self.average, "moments1": first, "moments2": second}
        for file, values in tensors.items():
            # bfloat16 is what a step computes with and what is exported; only sums of small updates need more.
            rounded = {name: value.bfloat16() for name, value in values.items()}
            _write(folder / f"{file}.safetensors", {**rounded, STEP: torch.tensor(self.step)})

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote."""
        files = ("weights", "average", "moments1", "moments2")
        weights, average, first, second = (load_file(folder / f"{file}.safetensors") for file in files)
        self.step = int(weights[STEP])
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])
                self.average[name].copy_(average[name])
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(self.step), device=parameter.device),
                    "exp_avg": first[name].to(parameter),
                    "exp_avg_sq": second[name].to(parameter),
                }


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Replace a file at once, so that a run that is cut short leaves the one before."""
    partial = path.with_suffix(".partial")
    save_file({name: t.contiguous().cpu() for name, t in tensors.items()}, partial)
    partial.rename(path)


class CapturedStep:
    """A step on static inputs: on a GPU captured once as a CUDA graph and replayed, elsewhere called.

    `run` takes the inputs and returns the loss; it must not look at values on the host.
    """

    def __init__(self, run: Callable[[list[Tensor]], Tensor], optimizer: torch.optim.Optimizer) -> None:
        self._run = run
        self._optimizer = optimizer
        self._inputs: list[Tensor] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loss = torch.zeros(())
        self._calls = 0

    def __call__(self, inputs: Iterable[Tensor]) -> Tensor:
        """The loss of this step; on a GPU a static tensor that the next call overwrites."""
        fresh = list(inputs)
        if fresh[0].device.type != "cuda":
            self._optimizer.zero_grad(set_to_none=True)
            return self._run(fresh)
        if not self._inputs:
            self._inputs = [x.clone() for x in fresh]
        for static, x in zip(self._inputs, fresh, strict=True):
            static.copy_(x)
        if self._graph is not None:
            self._graph.replay()
            return self._loss
        return self._warm_up() if self._calls < WARMUP_CALLS else self._capture()

    def _warm_up(self) -> Tensor:
        self._calls += 1
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._optimizer.zero_grad(set_to_none=True)
            loss = self._run(self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        return loss

    def _capture(self) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss = self._run(self._inputs)
        self._graph.replay()
        return self._loss


class Clock:
    """Progress lines with wall time, and a number of steps cut to what the time allows."""

    MEASURED = (50, 150)  # calls of `plan` between which the speed is measured: the capture is over
    RESERVE = 0.98  # of the remaining time is planned for steps, the rest for saving and reports

    def __init__(self, max_seconds: float) -> None:
        self._start = time.perf_counter()
        self._max_seconds = max_seconds
        self._calls = 0
        self._measured_from = 0.0

    @property
    def seconds(self) -> float:
        """Since the clock was made."""
        return time.perf_counter() - self._start

    def plan(self, step: int, num_steps: int, loss: Tensor) -> int:
        """`num_steps`, or fewer once the speed is known and they do not fit. Call it after every step."""
        self._calls += 1
        if self._calls not in self.MEASURED:
            return num_steps
        loss.tolist()  # waits for the device
        if self._calls == self.MEASURED[0]:
            self._measured_from = self.seconds
            return num_steps
        pace = (self.seconds - self._measured_from) / (self.MEASURED[1] - self.MEASURED[0])
        num_steps = min(num_steps, step + int((self._max_seconds - self.seconds) * self.RESERVE / pace))
        self.say(f"{pace * 1e3:.1f} ms a step, {num_steps} steps planned")
        return num_steps

    def say(self, message: str) -> None:
        """Print a line with the time, at once: a run that is cut short has told what it did."""
        print(f"[{self.seconds:6.1f} s] {message}", flush=True)
