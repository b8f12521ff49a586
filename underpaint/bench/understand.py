"""How fast understanding reads and writes, beside what the machine's memory and its matrix products allow.

A dense SenseNova-U1 of the released size with random weights goes through the engine itself: pages, sampling and
bookkeeping included. The limit of a decoding step is the time to read, at the rate of a copy measured in the same run,
every weight that the step uses and the keys and values of all sequences; that of reading is the rate of the layers' own
products, measured alone with as many rows. On a CPU a small model stands in, to show that the benchmark runs.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from underpaint.attention import choose, settle
from underpaint.bench.measuring import Spread, copy_bandwidth, gemm_rate, wall_ms
from underpaint.bench.scenes import NEO, SMALL_NEO
from underpaint.config import EngineConfig, resolve
from underpaint.kv.codec import CODECS
from underpaint.kv.pool import PagePool
from underpaint.kv.tree import PrefixTree
from underpaint.models.fusing import can_fuse
from underpaint.models.neo_unify import NeoUnify, Passage, Picture, Role
from underpaint.models.neo_unify.config import CELL, CELL_VALUES, NeoConfig
from underpaint.models.neo_unify.network import NeoUnifyNetwork
from underpaint.models.random import random_neo, random_neo_network, wrap_neo
from underpaint.report import WRONG, Cell, Report, Table, machine
from underpaint.understanding.decoding import DecodeRow
from underpaint.understanding.engine import UnderstandingEngine
from underpaint.understanding.reply import Reply
from underpaint.understanding.sampler import SamplingOptions, TokenSampler


@dataclass(frozen=True)
class Load:
    """What is measured: ``batches`` sequences that each stand behind ``context`` rows; and a picture of ``side`` pixels
    with ``text_rows`` of text around it. ``num_steps`` and ``num_reads`` are timed."""

    config: NeoConfig
    dtype: torch.dtype
    codec: str
    attention: str
    batches: tuple[int, ...]
    context: int
    side: int
    text_rows: int
    num_steps: int
    num_reads: int


GPU_LOAD = Load(NEO, torch.bfloat16, "bf16", "auto", (1, 8, 32), 1024, 2048, 300, 100, 10)
CPU_LOAD = Load(SMALL_NEO, torch.float32, "fp32", "piecewise", (1, 8), 64, 128, 30, 8, 3)


def understand(device: str, seed: int = 0) -> Report:
    """Decode and prefill on ``device``."""
    on_gpu = device.startswith("cuda")
    load = GPU_LOAD if on_gpu else CPU_LOAD
    rng = random.Random(seed)
    with torch.inference_mode():
        bandwidth = copy_bandwidth(device)
        model = random_neo(load.config, device, load.dtype, seed, frozenset({Role.UNDERSTAND}))
        decoded = [_measure_decode(load, model, batch, rng) for batch in load.batches]
        read = _measure_prefill(load, model, rng)
        rate = gemm_rate(_layer_products(load, read_rows(load)), load.dtype, device)
    notes = (
        machine(device),
        f"copy {bandwidth / 1e12:.2f} TB/s (read + written), a layer's products {rate / 1e12:.0f} TFLOP/s, seed {seed}",
        "SenseNova-U1 8B, random weights" if on_gpu else "a small stand-in model: these times say nothing",
    )
    return Report(notes, (_decode_table(load, model, decoded, bandwidth), _prefill_table(load, read, rate)))


@dataclass(frozen=True)
class Decoded:
    """``turn``: a turn of the engine, from token to token. ``step``: what of it the device works for, with its input
    and the wait for its result."""

    batch: int
    turn: Spread
    step: Spread


def make_engine(load: Load, model: NeoUnify, num_rows: int) -> UnderstandingEngine:
    """With room for ``num_rows`` rows."""
    codec = CODECS[load.codec]
    budget = model.cache_shape.row_bytes(codec) * (num_rows + 2 * model.page_rows)
    pool = PagePool(model.cache_shape, codec, budget, model.device, model.page_rows)
    config = EngineConfig(model.device, attention_backend=load.attention, kv_codec=load.codec)
    backend = choose(settle(resolve(config), model.cache_shape.head_dim, model.shared_heads, model.page_rows))
    return UnderstandingEngine(model, PrefixTree(pool), backend, max_batch_rows=8192)


def _measure_decode(load: Load, model: NeoUnify, batch: int, rng: random.Random) -> Decoded:
    """All sequences are read, some tokens are written to warm up, and then turns are timed."""
    num_tokens = 2 * load.num_steps + 16
    rows = load.context + num_tokens + model.page_rows
    engine = make_engine(load, model, 2 * batch * rows)
    half = load.context - load.num_steps
    options = SamplingOptions(max_tokens=num_tokens)
    replies = [Reply(Passage((draw_ids(load, rng, half),)), TokenSampler.of(options, ())) for _ in range(batch)]
    for reply in replies:
        engine.submit(reply)
    while any(reply.num_unread > 1 or not reply.ids for reply in replies):
        engine.turn()
    for _ in range(8):
        engine.turn()
    turn = wall_ms(engine.turn, load.num_steps, model.device)
    assert all(len(reply.ids) >= load.num_steps + 8 for reply in replies)
    return Decoded(batch, turn, _measure_step(load, model, engine, batch))


def _measure_step(load: Load, model: NeoUnify, engine: UnderstandingEngine, batch: int) -> Spread:
    return wall_ms(make_step(load, engine, batch), load.num_steps, model.device)


def make_step(load: Load, engine: UnderstandingEngine, batch: int) -> Callable[[], list[int]]:
    """A decoding step alone, with pages of its own, from inputs on the host to tokens on the host."""
    decoder, pool = engine.decoder, engine.pool
    assert decoder is not None, "decode does not run by steps here"
    size, rows = pool.page_rows, []
    for _ in range(batch):
        pages = pool.allocate(load.context).pages
        counts = [min(size, load.context - i * size) for i in range(len(pages))]
        table = np.array([(page * size, count) for page, count in zip(pages, counts, strict=True)], np.int32)
        rows.append(DecodeRow(1, load.context - 1, table))
    return lambda: decoder.step(rows)[1].tolist()


def _measure_prefill(load: Load, model: NeoUnify, rng: random.Random) -> Spread:
    engine = make_engine(load, model, (load.num_reads + 3) * (read_rows(load) + 2 * model.page_rows))
    read = make_read(load, engine, rng)
    for _ in range(2):
        read()
    passes = engine.passes
    spread = wall_ms(read, load.num_reads, model.device)
    assert engine.passes - passes == load.num_reads, "a passage was read in more than one pass"
    return spread


def make_read(load: Load, engine: UnderstandingEngine, rng: random.Random) -> Callable[[], None]:
    """Reads a passage, a picture within text, in one turn; every time one that has nothing in common with others."""
    picture = draw_picture(load.side, rng)

    def read() -> None:
        text = draw_ids(load, rng, load.text_rows)
        other = replace(picture, content=rng.randbytes(32))
        reply = Reply(Passage((text[: len(text) // 2], other, text[len(text) // 2 :])))
        engine.submit(reply)
        while not reply.resting:
            engine.turn()
        engine.drop(reply)

    return read


def draw_ids(load: Load, rng: random.Random, num: int) -> tuple[int, ...]:
    return tuple(rng.randrange(load.config.language.vocab_size) for _ in range(num))


def draw_picture(side: int, rng: random.Random) -> Picture:
    grid = (side // CELL, side // CELL)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 32))
    return Picture(grid, torch.randn(grid[0] * grid[1], CELL_VALUES, generator=generator), rng.randbytes(32))


def read_rows(load: Load) -> int:
    return (load.side // CELL) ** 2 + load.text_rows


def _layer_products(load: Load, num_rows: int) -> list[tuple[int, int, int]]:
    """(rows, outputs, inputs) of the products of a layer, as they are fused."""
    c = load.config.language
    heads = c.num_attention_heads * c.head_dim
    qkv = heads + 2 * c.num_key_value_heads * c.head_dim
    sizes = [(qkv, c.hidden_size), (c.hidden_size, heads), (2 * c.intermediate_size, c.hidden_size)]
    return [(num_rows, *size) for size in [*sizes, (c.hidden_size, c.intermediate_size)]]


def weight_bytes(network: NeoUnifyNetwork) -> int:
    """What a decoding step must read whatever it decodes: all layers, and the head."""
    modules: Sequence[nn.Module] = (network.language_model.model["layers"], network.language_model.lm_head)
    return sum(p.numel() * p.element_size() for module in modules for p in module.parameters())


def step_bytes(load: Load, model: NeoUnify, batch: int) -> int:
    """What a decoding step must read: weights, and the rows in pages."""
    kept = batch * load.context * model.cache_shape.row_bytes(CODECS[load.codec])
    return weight_bytes(model.network) + kept


def _decode_table(load: Load, model: NeoUnify, measured: Sequence[Decoded], bandwidth: float) -> Table:
    rows: list[tuple[Cell, ...]] = []
    alone = measured[0].batch / measured[0].turn.median
    for m in measured:
        limit = step_bytes(load, model, m.batch) / bandwidth * 1e3
        rate = m.batch / m.turn.median
        rows.append(
            (m.batch, str(m.turn), str(m.step), rate * 1e3, limit, limit / m.turn.median, limit / m.step.median,
             rate / alone)
        )  # fmt: skip
    columns = ("batch", "turn, ms", "step, ms", "tokens/s", "limit, ms", "turn of limit", "step of limit", "of batch 1")
    return Table(f"Decode behind {load.context} rows", columns, rows)


def _prefill_table(load: Load, read: Spread, rate: float) -> Table:
    num_rows, language = read_rows(load), load.config.language
    products = sum(2 * m * n * k for m, n, k in _layer_products(load, num_rows)) * language.num_hidden_layers
    cells = num_rows - load.text_rows
    before = load.text_rows // 2
    # Pairs of a row and a key that it sees: a picture sees itself and what comes before it, text sees up to itself.
    area = cells * (before + cells) + sum(range(1, before + 1)) + sum(range(before + cells + 1, num_rows + 1))
    attention = 4 * area * language.num_attention_heads * language.head_dim * language.num_hidden_layers
    achieved = (products + attention) / read.median * 1e3
    row: tuple[Cell, ...] = (num_rows, str(read), (products + attention) / 1e12, achieved / 1e12, achieved / rate)
    title = f"Prefill of a picture of {load.side} x {load.side} and {load.text_rows} rows of text"
    return Table(title, ("rows", "ms", "TFLOP", "TFLOP/s", "of the products' rate"), [row])


CHECK_LAYERS = 4
CHECK_IDS = 6


def check(device: str, seed: int = 0) -> Report:
    """Fused kernels and graphs against the plain path on a few layers of full width, a picture, text, and decode in
    company: the error of the logits against fp32 must be under twice that of the plain path in bf16."""
    load = GPU_LOAD if device.startswith("cuda") else replace(CPU_LOAD, dtype=torch.bfloat16, codec="bf16")
    language = replace(
        load.config.language, num_hidden_layers=min(CHECK_LAYERS, load.config.language.num_hidden_layers)
    )
    config, role = replace(load.config, language=language), frozenset({Role.UNDERSTAND})
    load = replace(load, config=config)
    plain_load = replace(load, attention="piecewise")
    network = random_neo_network(config, device, load.dtype, seed, role)
    native = _logits(plain_load, wrap_neo(network, device, role), seed)
    exact_network = random_neo_network(config, device, load.dtype, seed, role).float()
    exact = _logits(replace(plain_load, codec="fp32"), wrap_neo(exact_network, device, role), seed)
    del exact_network
    if can_fuse(device, language.head_dim):
        network.fuse()
    model = wrap_neo(network, device, role)
    ours = _logits(load, model, seed)
    rows: list[tuple[Cell, ...]] = []
    for index, (a, b, c) in enumerate(zip(ours, native, exact, strict=True)):
        error, allowed = (((x - c).norm() / c.norm()).item() for x in (a, b))
        rows.append((index, len(a), error, allowed, "ok" if error < 2 * allowed else WRONG))
    how = "fused, in graphs" if model.network.fused else "plain: no fused kernels here"
    title = f"Logits of {language.num_hidden_layers} layers, {how}: error against fp32"
    columns = ("request", "tokens", "ours", "plain", "verdict")
    return Report((machine(device), f"seed {seed}"), (Table(title, columns, rows),))


def _logits(load: Load, model: NeoUnify, seed: int) -> list[torch.Tensor]:
    """(tokens, vocab_size) of each of three requests, read and continued together with ids that are given."""
    rng = random.Random(seed)
    picture = draw_picture(load.side // 2, rng)
    passages = [
        Passage((draw_ids(load, rng, 9), picture, draw_ids(load, rng, 40))),
        Passage((draw_ids(load, rng, load.context - 3),)),
        Passage((draw_ids(load, rng, 2),)),
    ]
    engine = make_engine(load, model, sum(passage.num_rows + 2 * model.page_rows for passage in passages))
    replies = []
    for passage in passages:
        sampler = TokenSampler.of(SamplingOptions(max_tokens=CHECK_IDS), ())
        replies.append(Reply(passage, sampler, forced=iter(draw_ids(load, rng, CHECK_IDS)), keep_logits=True))
        engine.submit(replies[-1])
    while not all(reply.resting for reply in replies):
        engine.turn()
    for reply in replies:
        if reply.error is not None:
            raise reply.error
    return [torch.stack(reply.logits).float() for reply in replies]
