"""Where the time of understanding goes: kernels of a decoding step and of reading, and what the host does meanwhile.

Kernels that are chained begin while the one before them runs, and wait; so their times overlap, and add up to more than
the span from the first to the last.
"""

import cProfile
import pstats
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from underpaint.bench import understand
from underpaint.models.neo_unify import Role
from underpaint.models.random import random_neo
from underpaint.report import Cell, Report, Table, machine

NUM_SHOWN = 16
DEVICE = torch.autograd.DeviceType.CUDA


def profile(device: str, seed: int = 0) -> Report:
    """Steps of the smallest and the largest batch, and one read, of the load that ``bench understand`` measures."""
    load = understand.GPU_LOAD if device.startswith("cuda") else understand.CPU_LOAD
    rng = random.Random(seed)
    tables = []
    with torch.inference_mode():
        model = random_neo(load.config, device, load.dtype, seed, frozenset({Role.UNDERSTAND}))
        room = 2 * load.batches[-1] * (load.context + model.page_rows)
        engine = understand.make_engine(load, model, room + 4 * understand.read_rows(load))
        for batch in (load.batches[0], load.batches[-1]):
            step = understand.make_step(load, engine, batch)
            tables += _tables(f"a step of {batch}", step, 10)
        read = understand.make_read(load, engine, rng)
        tables += _tables("a read", read, 1)
    return Report((machine(device),), tuple(tables))


def _tables(name: str, call: Callable[[], object], num_calls: int) -> list[Table]:
    for _ in range(2):
        call()
    return [_kernels(name, call, num_calls), _functions(name, call, num_calls)]


def _kernels(name: str, call: Callable[[], object], num_calls: int) -> Table:
    """On a CPU, operators in the place of kernels."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for _ in range(num_calls):
            call()
    events = recorded.events() or []
    on_device = [event for event in events if event.device_type == DEVICE] or list(events)
    times: dict[str, list[float]] = defaultdict(list)
    for event in on_device:
        times[event.name.split("(")[0][-70:]].append(event.time_range.elapsed_us())
    span = max(event.time_range.end for event in on_device) - min(event.time_range.start for event in on_device)
    rows: list[tuple[Cell, ...]] = [("from first to last", num_calls, span / num_calls / 1e3, "")]
    for kernel, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:NUM_SHOWN]:
        rows.append((kernel, len(each) // num_calls, sum(each) / num_calls / 1e3, f"{sum(each) / len(each):.1f}"))
    return Table(f"Kernels of {name}", ("kernel", "calls", "ms", "us each"), rows)


def _functions(name: str, call: Callable[[], object], num_calls: int) -> Table:
    """What the host spends its time in, waiting for the device included."""
    recorder = cProfile.Profile()
    recorder.enable()
    for _ in range(num_calls):
        call()
    recorder.disable()
    rows: list[tuple[Cell, ...]] = []
    found = pstats.Stats(recorder).get_stats_profile().func_profiles.items()
    for function, facts in sorted(found, key=lambda item: -item[1].tottime)[:NUM_SHOWN]:
        place = f"{Path(facts.file_name).name}:{facts.line_number}" if facts.line_number else ""
        rows.append((f"{function} {place}", str(facts.ncalls), facts.tottime * 1e3 / num_calls))
    return Table(f"The host in {name}", ("function", "calls", "ms"), rows)
