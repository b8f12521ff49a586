"""``underpaint bench attention`` on a CPU: the seeds' draws, the adapters of peers, tiny shapes, files."""

import itertools
import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from underpaint.bench import attention as bench
from underpaint.bench import attention_peers as peers
from underpaint.bench.attention import TABLES, Row, attention, rows, tiny_rows, write
from underpaint.kernels.hybrid_attention_problems import Part, lightllm, make_problem, qwen, text_decode
from underpaint.kernels.hybrid_attention_triton import hybrid_attention_reference

# batch, longest sequence, image tokens: the published table's first three columns
SEEDS = [
    (8, 4096, 88), (8, 8192, 171), (8, 65536, 150), (16, 4096, 379), (16, 8192, 246), (16, 65536, 206),
    (32, 4096, 726), (32, 8192, 536), (32, 65536, 417), (64, 4096, 1170), (64, 8192, 1177), (64, 65536, 1291),
    (128, 4096, 2057), (128, 8192, 2196), (128, 65536, 2205),
]  # fmt: skip


def image_tokens(sequences: list[Part]) -> int:
    return sum(s.stop - s.start for layout, before in sequences for s in layout.images)


def test_all_fifteen_rows_of_the_seeds() -> None:
    """The draws are theirs: the number of image tokens in a batch is what their table says."""
    found = [(r.key["batch"], r.key["max_seq_len"], image_tokens(r.sequences)) for r in rows() if r.table == "seed"]
    assert found == SEEDS


def test_large_images_keep_the_lengths() -> None:
    plain, large = lightllm(16, 8192), lightllm(16, 8192).with_large_images()
    assert (large.rows, large.before) == (plain.rows, plain.before)
    images = [image.stop - image.start for layout, _ in large.sequences() for image in layout.images]
    assert max(images) == 4096
    assert min(images) >= 64
    assert [layout.num_rows for layout, _ in large.sequences()] == plain.rows


def given(sequences: list[Part]) -> peers.Pass:
    problem = make_problem(sequences, 4, 2, head_dim=16, dtype=torch.float32, device="cpu")
    return peers.Pass(problem, sequences, lambda: problem)


@pytest.mark.parametrize(
    ("sequences", "is_dense"),
    [
        ([qwen(1, True, (3, 4), 10)] * 2, True),
        (text_decode(3, 40), True),
        ([qwen(1, False, (3, 4), 10)], False),
        ([qwen(1, True, (3, 4), 10), qwen(2, True, (3, 4), 10)], False),
    ],
    ids=["step", "text", "prefill", "unlike"],
)
def test_dense_peers_take_only_what_needs_no_mask(sequences: list[Part], is_dense: bool) -> None:
    assert given(sequences).is_dense == is_dense
    assert (peers.cudnn(given(sequences)) is not None) == is_dense


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_sees_what_the_mask_says(seed: int) -> None:
    """Its block mask over all sequences' keys in one place, against each sequence alone, dense."""
    torch.manual_seed(seed)
    sequences = [(layout, 0) for layout, _ in lightllm(3, 300).with_large_images().sequences()]
    sequences += [qwen(1, True, (9, 8), 90)]
    mine = given(sequences)
    q, k = mine.problem.q.transpose(0, 1)[None], mine.keys.transpose(0, 1)[None]
    got = flex_attention(q, k, k, block_mask=peers._block_mask(mine), enable_gqa=True)[0].transpose(0, 1)
    parts = zip(
        got.split(mine.num_rows), mine.problem.q.split(mine.num_rows), mine.keys.split(mine.num_keys), strict=True
    )
    for (layout, before), (ours, rows_q, keys) in zip(sequences, parts, strict=True):
        visible = torch.arange(layout.num_rows) < layout.visible_stop()[before:, None]
        shared = keys.repeat_interleave(2, dim=1).transpose(0, 1)
        scores = rows_q.transpose(0, 1) @ shared.mT / 4
        want = scores.masked_fill(~visible, float("-inf")).softmax(-1) @ shared
        torch.testing.assert_close(ours, want.transpose(0, 1), rtol=1e-4, atol=1e-5)


def test_lightllm_is_given_its_own_layout(tmp_path: Path) -> None:
    """A file that returns what it was called with: every key has a slot of its own, images say where they end."""
    file = tmp_path / "context_attention_fwd_neo.py"
    file.write_text(
        "from lightllm.utils.device_utils import is_tesla\n"
        "def context_attention_fwd_neo(q, k, v, o, requests, starts, lengths, cached, longest, slots, ends):\n"
        "    assert not is_tesla()\n"
        "    o.fill_(0)\n"
        "    o[: len(ends), 0, 0] = ends.to(o.dtype)\n"
        "    for i in range(len(requests)):\n"
        "        o[i, 0, 1] = slots[i, : lengths[i]].unique().numel() - lengths[i] + cached[i] * 1000 + starts[i]\n"
    )
    sequences = [qwen(1, True, (2, 3), 8), qwen(0, False, (3, 3), 5)]
    call = peers.lightllm(file)(given(sequences))
    assert call is not None
    out = call()
    assert out[:, 0, 0].tolist() == [20] * 6 + [0] * 5 + [14] * 9
    assert out[:2, 0, 1].tolist() == [14 * 1000, 6]


def test_every_nth_row_of_the_reference(seed: int) -> None:
    torch.manual_seed(seed)
    problem = given([qwen(1, True, (4, 5), 10), *text_decode(2, 30)]).problem
    some = hybrid_attention_reference(
        problem.q, problem.k, problem.v, problem.stored, problem.groups, problem.row_stop, every=3
    )
    chosen = list(itertools.chain(range(0, 20, 3), (20, 21)))
    torch.testing.assert_close(some[chosen], problem.plain()[chosen])
    assert problem.error(problem.plain(), every=3) == (0.0, 0.0)


def test_tiny_shapes_and_files(tmp_path: Path) -> None:
    met: list[Row] = []
    report, results = attention("cpu", progress=lambda result: met.append(result.row))
    assert [row.key for row in met] == [row.key for row in tiny_rows()]
    assert any("This is a CPU" in note for note in report.notes)
    assert {table.title for table in report.tables} <= set(TABLES)
    assert len(attention("cpu", tables=["text decode"])[1]) == 1
    write(tmp_path / "results", report, results)
    found = json.loads((tmp_path / "results" / "attention.json").read_text())
    assert [(row["table"], row["plain_ms"] > 0) for row in found["rows"]] == [(r.row.table, True) for r in results]
    assert "| batch | max_seq_len | plain |" in (tmp_path / "results" / "attention.md").read_text()
    ElementTree.parse(tmp_path / "results" / "attention.svg")


@pytest.mark.parametrize("broken", [math.nan, 1e3])
def test_a_wrong_column_is_seen_whichever_it_is(broken: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first is right; and where the first cannot run, none other is told as ours."""

    def refuses(_: peers.Pass) -> None:
        raise RuntimeError("no such shape")

    by_name: dict[str, bench.Column] = {
        "underpaint": lambda given: given.problem.plain,
        "underpaint_triton": lambda given: lambda: given.problem.plain() * broken,
    }
    monkeypatch.setattr(bench, "columns", lambda *_: by_name)
    report, results = attention("cpu", tables=["text decode"])
    assert report.wrong
    assert results[0].notes["underpaint_triton"].startswith("WRONG")
    by_name["underpaint"] = refuses
    by_name["underpaint_triton"] = lambda given: given.problem.plain
    report, _ = attention("cpu", tables=["text decode"])
    assert not report.wrong
    assert report.as_json()["tables"][0]["rows"][0]["TFLOP/s"] == "-"
