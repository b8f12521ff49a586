"""Options of a command from a TOML file: the same names as on the command line, which wins."""

import tomllib
from pathlib import Path
from typing import Any

import typer
from click import Context, Parameter

from underpaint.errors import BadConfig

NOT_IN_FILES = ("config_file", "help")


def read_option_file(context: Context, path: Path | None) -> Path | None:
    """Let a file give the defaults of the command that is being read: ``max-waiting = 8`` stands for
    ``--max-waiting 8``, ``model = "..."`` for the argument, and an option that may be repeated takes a list.

    Raises BadConfig for a file that cannot be read, a name that is no option, and a value of another kind.
    """
    if path is None:
        return None
    options = {_name(option): option for option in context.command.params if option.name not in NOT_IN_FILES}
    values = _load(path)
    if unknown := sorted(values.keys() - options.keys()):
        raise BadConfig(f"{path}: unknown options: {', '.join(unknown)}; known are {', '.join(sorted(options))}")
    for name, value in values.items():
        _check(path, name, options[name], value)
    context.default_map = {str(options[name].name): value for name, value in values.items()}
    return path


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadConfig(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path} is not TOML: {error}") from error


def _name(option: Parameter) -> str:
    """What follows the two dashes."""
    return next((text[2:] for text in option.opts if text.startswith("--")), str(option.name))


def _check(path: Path, name: str, option: Parameter, value: object) -> None:
    """The command line has only texts, and would read some of these as what they are not."""
    items = value if isinstance(value, list) and (option.multiple or option.nargs != 1) else [value]
    if option.multiple and not isinstance(value, list):
        raise BadConfig(f"{path}: {name} must be a list")
    is_flag = bool(getattr(option, "is_flag", False))
    for item in items:
        if isinstance(item, bool) != is_flag or not isinstance(item, bool | int | float | str):
            raise BadConfig(f"{path}: {name} must be {'true or false' if is_flag else 'a number or a text'}")


ConfigFile = typer.Option(
    "--config", metavar="FILE", is_eager=True, callback=read_option_file, help="TOML file with these options by name."
)
