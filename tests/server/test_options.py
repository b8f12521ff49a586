"""``underpaint serve``: what the command line, the environment and a file say, and who wins."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from underpaint import cli
from underpaint.commands.serve import serve as serve_command
from underpaint.server import ServerConfig

SHORT_NAMES = {
    "name": "model_id",
    "timeout": "timeout_seconds",
    "warmup_timeout": "warmup_seconds",
    "drain": "drain_seconds",
    "allowed_media_domain": "allowed_media_domains",
}
"""Flags that are not called as the fields that they set."""


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict[str, Any]]]:
    """``underpaint serve`` with these arguments and this file: the exit code, and what would have been served."""
    told: dict[str, Any] = {}

    def take(model: str, **values: Any) -> int:
        told.update(values, model=model)
        return 0

    monkeypatch.setattr(sys.modules["underpaint.server.serve"], "serve", take)  # the package has a function of its name

    def call(*arguments: str, file: str | None = None) -> tuple[int, dict[str, Any]]:
        told.clear()
        if file is not None:
            (tmp_path / "serve.toml").write_text(file)
            arguments = (*arguments, "--config", str(tmp_path / "serve.toml"))
        monkeypatch.setattr(sys, "argv", ["underpaint", "serve", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), dict(told)

    return call


Serve = Callable[..., tuple[int, dict[str, Any]]]
FILE = """
model = "some/model"
port = 9000
max-waiting = 3
timeout = 20
round-sizes = true
allowed-media-domain = ["example.com", "*.example.org"]
api-key = "of the file"
kv-codec = "fp8"
lora = ["a.safetensors", "b.safetensors=0.5"]
"""


def test_a_file_is_as_good_as_flags(serve: Serve) -> None:
    code, told = serve(file=FILE)
    assert code == 0
    config: ServerConfig = told["config"]
    assert (told["model"], told["port"], told["host"], told["kv_codec"]) == ("some/model", 9000, "127.0.0.1", "fp8")
    assert told["lora"] == ["a.safetensors", "b.safetensors=0.5"]
    assert (config.max_waiting, config.timeout_seconds, config.round_sizes) == (3, 20.0, True)
    assert config.allowed_media_domains == ("example.com", "*.example.org")
    assert config.api_key == "of the file"
    assert config.model_id == "model"


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, told = serve("another", "--port", "1", "--allowed-media-domain", "a.example.com", file=FILE)
    assert (told["model"], told["port"]) == ("another", 1)
    assert told["config"].allowed_media_domains == ("a.example.com",)
    monkeypatch.setenv("UNDERPAINT_API_KEY", "of the environment")
    assert serve(file=FILE)[1]["config"].api_key == "of the environment"
    assert serve("--api-key", "of the line", file=FILE)[1]["config"].api_key == "of the line"


def test_an_orchestrators_variables_mean_nothing(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes sets this one in every container that runs beside a service called underpaint."""
    monkeypatch.setenv("UNDERPAINT_PORT", "tcp://10.0.0.1:8000")
    assert serve("model")[1]["port"] == 8000


@pytest.mark.parametrize(("file", "sentence"), [
    ("prot = 1", "unknown options: prot; known are "), ("max_waiting = 1", "unknown options: max_waiting"),
    ("config = 'other.toml'", "unknown options: config;"), ("port = true", "port must be a number or a text"),
    ("round-sizes = 1", "round-sizes must be true or false"),
    ("round-sizes = 'no'", "round-sizes must be true or false"),
    ("allowed-media-domain = 'example.com'", "allowed-media-domain must be a list"),
    ("port = [1]", "port must be a number or a text"), ("[port]\na = 1", "port must be a number or a text"),
    ("port = ", "is not TOML"), ("max-waiting = -1", "max_waiting cannot be negative"),
    ("allowed-media-domain = ['*']", "is not a name such as"),
])  # fmt: skip
def test_a_mistake_in_a_file_is_one_sentence(
    serve: Serve, capsys: pytest.CaptureFixture[str], file: str, sentence: str
) -> None:
    assert serve("model", file=file) == (2, {})
    printed = capsys.readouterr().err
    assert printed.startswith("underpaint: ")
    assert sentence in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize("mode", ["single", "colocate", "separate"])
@pytest.mark.parametrize(("lora", "code", "sentence"), [
    ("none.safetensors", 1, "none.safetensors is missing"), ("none.safetensors=nan", 2, "must be a finite number"),
])  # fmt: skip
def test_a_lora_that_cannot_be_is_one_sentence_before_anything_starts(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    mode: str, lora: str, code: int, sentence: str,
) -> None:  # fmt: skip
    line = ["underpaint", "serve", str(checkpoint), "--device", "cpu", "--mode", mode, "--lora", lora]
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    printed = capsys.readouterr().err
    assert printed.startswith("underpaint: ")
    assert sentence in printed
    assert printed.count("\n") == 1


def test_a_number_that_is_none_names_the_option(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("model", file="port = 'http'") == (2, {})
    assert "--port" in capsys.readouterr().err


def test_a_file_that_is_not_there(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("model", "--config", "/no/such/file.toml")[0] == 2
    assert "/no/such/file.toml cannot be read" in capsys.readouterr().err


def test_a_model_must_be_named_somewhere(serve: Serve) -> None:
    assert serve(file="port = 1") == (2, {})


def test_the_flags_have_the_defaults_of_the_server() -> None:
    defaults = {field.name: field.default for field in fields(ServerConfig)}
    known = {"allowed_media_domains": None, "model_id": None}
    checked = 0
    for name, parameter in inspect.signature(serve_command).parameters.items():
        own = SHORT_NAMES.get(name, name)
        if own in defaults:
            assert parameter.default == known.get(own, defaults[own]), name
            checked += 1
    assert checked >= 10
