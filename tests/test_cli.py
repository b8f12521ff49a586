"""The command line as a user meets it: exit codes, sentences, files that appear whole or not at all."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from underpaint import cli
from underpaint.commands import pictures
from underpaint.commands.output import print_report
from underpaint.errors import BadParameter, BadSize
from underpaint.report import WRONG, Report, Table


def underpaint(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    command = [sys.executable, "-m", "underpaint", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=200)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """In this process, from an empty folder: the exit code."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["underpaint", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    return call


def test_generate_edits_and_writes_what_it_says(checkpoint: Path, tmp_path: Path) -> None:
    for name, colour in (("a.png", "red"), ("b.png", "blue")):
        Image.new("RGB", (64, 32), colour).save(tmp_path / name)
    done = underpaint(
        "generate", checkpoint, "--prompt", "Put the cat", "--image", "a.png", "--image", "b.png", "--steps", 2,
        "--reference-resolution", 64, "--seed", 5, "--n", 2, "--size", "96x64", "-o", "out.png", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for i, seed in ((1, 5), (2, 6)):
        with Image.open(tmp_path / f"out-{i}.png") as picture:
            assert (picture.mode, picture.size) == ("RGBA", (96, 64))
        assert f"out-{i}.png  96x64  seed {seed}" in done.stdout
    assert sorted(p.name for p in tmp_path.glob("*")) == ["a.png", "b.png", "out-1.png", "out-2.png"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompt", "a", "--size", "65x64"], "underpaint: width is 65; it must be a multiple of 32"),
        (["--prompt", "a", "--size", "big"], "must be WIDTHxHEIGHT"),
        (["--prompt", "a", "-o", "out.jpg"], "pictures have alpha"),
        (["--prompt", "a", "-o", "no/such/out.png"], "there is no directory"),
        (["--prompt", "a", "--image", "none.png"], "there is no file"),
        (["--prompt", "a", "--true-cfg-scale", "4"], "needs a negative_prompt"),
        (["--prompt", "a", "--kv-cache-bytes", "1"], "this request needs"),
        (["--prompt", "a", "--device", "cuda:77"], "is not on this machine"),
    ],
)
def test_mistakes_are_one_sentence_and_write_nothing(
    checkpoint: Path,
    tmp_path: Path,
    run: Callable[..., int],
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    assert run("generate", checkpoint, *arguments) == 2
    message = capfd.readouterr().err
    assert sentence in message
    assert len(message.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_no_checkpoint(tmp_path: Path) -> None:
    done = underpaint("inspect", "nowhere", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "underpaint: 'nowhere' is neither a checkpoint directory nor a Hugging Face id (owner/name)"
    )


def test_inspect_counts_what_is_there(
    checkpoint: Path, run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("inspect", checkpoint) == 0
    assert "Parts" in capsys.readouterr().out
    assert run("inspect", checkpoint, "--json") == 0
    parts, pages, limits = json.loads(capsys.readouterr().out)["tables"]
    counts = {row["part"]: row for row in parts["rows"]}
    size = sum(file.stat().st_size for file in checkpoint.rglob("*.safetensors"))
    assert 0 < size - counts["total"]["bytes"] < 64_000, "all bytes but the headers"
    assert pages["rows"][0] == {
        "codec": "fp32",
        "a row": 3 * 2 * 4 * 16 * 4,
        "a page": 128 * 3 * 2 * 4 * 16 * 4,
        "a 1024x1024 reference": 4096 * 3 * 2 * 4 * 16 * 4,
    }
    assert {row["what"] for row in limits["rows"]} >= {"width and height", "references", "prompt"}


def test_interrupted_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    picture = Image.new("RGBA", (8, 8))
    (tmp_path / "old.png").write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "save", fails)
        with pytest.raises(KeyboardInterrupt):
            pictures.save(picture, tmp_path / "old.png")
    assert [p.name for p in tmp_path.iterdir()] == ["old.png"]
    assert (tmp_path / "old.png").read_bytes() == b"old"
    pictures.save(picture, tmp_path / "old.png")
    with Image.open(tmp_path / "old.png") as read:
        assert read.size == (8, 8)


def test_webp_keeps_alpha(tmp_path: Path) -> None:
    pictures.save(Image.new("RGBA", (8, 8), (1, 2, 3, 77)), tmp_path / "a.webp")
    with Image.open(tmp_path / "a.webp") as read:
        assert read.convert("RGBA").getpixel((0, 0)) == (1, 2, 3, 77)


def test_sizes_and_paths() -> None:
    assert pictures.parse_size("96X64") == (96, 64)
    for text in ("96", "x", "96x", "-1x5", "1.5x2", "9x9x9"):
        with pytest.raises(BadSize):
            pictures.parse_size(text)
    assert pictures.output_paths(Path("a.png"), 2) == [Path("a-1.png"), Path("a-2.png")]
    with pytest.raises(BadParameter):
        pictures.output_paths(Path("a"), 1)


GOLDEN = Path(__file__).parent / "neo_unify" / "golden" / "dense"


def test_edit_is_generate_with_references(
    tmp_path: Path, run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also for the other family."""
    Image.new("RGB", (64, 64), "red").save(tmp_path / "a.png")
    same = ["--prompt", "make it blue", "--size", "64x64", "--steps", 2, "--seed", 3]
    assert run("edit", GOLDEN, "a.png", *same, "-o", "edited.png") == 0
    assert run("generate", GOLDEN, "--image", "a.png", *same, "-o", "generated.png") == 0
    assert (tmp_path / "edited.png").read_bytes() == (tmp_path / "generated.png").read_bytes()
    assert run("edit", GOLDEN, "a.png", *same, "--true-cfg-scale", 2) == 2
    assert "true_cfg_scale is not a parameter of SenseNova-U1" in capsys.readouterr().err


def test_chat_streams_text(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("chat", GOLDEN, "--say", "hello", "--say", "and now?", "--max-tokens", 6, "--max-pictures", 0) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first
    assert second


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--max-pictures", 0, "--size", "64x64"], "sizes has no effect with max_pictures 0"),
        (["--max-pictures", 0, "--steps", 2], "num_inference_steps has no effect with max_pictures 0"),
        (["--max-pictures", 0, "-o", "a.png"], "--out has no effect with --max-pictures 0"),
        (["--max-pictures", 11], "max_pictures is 11"),
        (["--max-tokens", 0], "max_tokens must be at least 1"),
        (["--temperature", -1], "temperature is -1.0"),
        (["--seed", -1], "seed must be from 0"),
        (["--size", "65x64"], "width is 65"),
        (["-o", "a.jpg"], "pictures have alpha"),
    ],
)
def test_chat_refuses_before_a_model_is_loaded(
    arguments: list[object], sentence: str, run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("chat", "no/such/model", "--say", "hello", *arguments) == 2
    assert sentence in capsys.readouterr().err


def test_chat_needs_a_model_that_talks(
    checkpoint: Path, run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("chat", checkpoint, "--say", "hello") == 2
    assert "Qwen-Image paints but does not talk" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["bench", "--help"], ["generate", "--sise", "1x1"], ["bench", "serve", "http://127.0.0.1:9"]],
)
def test_answers_about_itself_and_clients_need_no_pytorch(arguments: list[str], tmp_path: Path) -> None:
    script = f"""import sys
sys.argv = ['underpaint', *{arguments}]
from underpaint.cli import main
try:
    main()
finally:
    print('loaded:', *sorted({{'torch', 'transformers', 'fastapi'}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "loaded:", done.stdout + done.stderr
    assert (done.returncode == 0) == ("--help" in arguments)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_report_that_finds_something_wrong_is_a_failure(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    table = lambda verdict: Report((), (Table("checks", ("what", "verdict"), [("a", 1), ("b", verdict)]),))  # noqa: E731
    print_report(table("ok"), as_json)
    with pytest.raises(SystemExit, match="1"):
        print_report(table(f"{WRONG} 0.3"), as_json)
    assert "WRONG 0.3" in capsys.readouterr().out
