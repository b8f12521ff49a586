"""The README's commands and snippets for the server, as printed, against the pocket server."""

import base64
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from server.tools import Running, make_site, png

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
ADDRESS = "localhost:8000"


@pytest.fixture(scope="module")
def pocket() -> Iterator[Running]:
    server = Running(make_site(ROOT / "pocket" / "qwen-image-2.1", model_id="qwen-image-2.1"))
    yield server
    server.stop()


def here(text: str, server: Running) -> str:
    assert ADDRESS in text
    return text.replace(ADDRESS, server.url.removeprefix("http://"))


def curls() -> list[str]:
    joined = "\n".join(text for _, text in BLOCKS).replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.startswith("curl ")]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_commands(pocket: Running, tmp_path: Path) -> None:
    (tmp_path / "circle.png").write_bytes(png(Image.new("RGBA", (128, 128), "red")))
    assert len(curls()) >= 2
    for command in curls():
        done = subprocess.run(
            ["bash", "-c", here(command, pocket)], capture_output=True, text=True, cwd=tmp_path, timeout=200
        )
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        picture = Image.open(io.BytesIO(base64.b64decode(answer["data"][0]["b64_json"])))
        assert f"{picture.width}x{picture.height}" == answer["size"] == "128x128"


def test_the_snippet(pocket: Running, capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = (text for language, text in BLOCKS if language == "python" and "openai" in text)
    names: dict[str, str] = {}
    exec(here(snippet, pocket), names)
    assert Image.open(io.BytesIO(base64.b64decode(names["picture"]))).size == (128, 128)
    told = capsys.readouterr().out.split()
    assert (told[0], told[-1]) == ("response.created", "response.completed")
    assert told.count("response.image_generation_call.partial_image") == 1


def test_the_load_command(pocket: Running) -> None:
    """With fewer requests, so that it takes seconds."""
    (command,) = (line for _, text in BLOCKS for line in text.splitlines() if line.startswith("underpaint bench serve"))
    ours = here(command.partition("#")[0], pocket).replace("underpaint", f"{sys.executable} -m underpaint", 1)
    short = f"{ours} --requests 3 --steps 2 --seed 1 --reference-side 64"
    done = subprocess.run(["bash", "-c", short], capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "Throughput" in done.stdout
