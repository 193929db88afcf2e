"""Reads the configuration of a client from a file of Java properties, JSON or TOML.

Errors never show the value of a setting, because the value may be a password.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lanes.cli.misuse import Misuse
from lanes.errors import ConfigError
from lanes_kafka.config import ServerOption, misspelt


def read_config(path: Path | None, settings: Sequence[str] = ()) -> dict[str, Any]:
    """Read the settings of a file. Blocks.

    The suffix of the file decides its format: ``.json``, ``.toml``, or else ``name=value`` lines. The function joins
    the names of nested TOML tables by dots, so ``group.id = "g"`` needs no quotes.

    Args:
        path: The file; None = no file.
        settings: Texts ``name=value``, which override settings of the file.

    Returns:
        The settings by name.

    Raises:
        ConfigError: The file is unreadable, or a line or text is not a setting.
    """
    config = {} if path is None else _of_file(path)
    for number, text in enumerate(settings, 1):
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"-X number {number} is not name=value; write -X bootstrap.servers=host:9092")
        config[name.strip()] = value
    return config


def given_settings(config: Path | None, settings: Sequence[str], *, server: str, group: str = "") -> dict[str, Any]:
    """Return the client's settings of a command. Blocks.

    Args:
        config: The file of ``--config``; None = no file.
        settings: Texts ``name=value`` of ``-X``, which override the other arguments.
        server: Value of ``--server``, which overrides the file; "" = the option is absent.
        group: Value of ``--group``, which overrides the file; "" = the option is absent.

    Returns:
        The settings by name.

    Raises:
        ConfigError: The file is unreadable, or a line or text is not a setting.
        Misuse: The file and the arguments name no address of a broker.
    """
    named = {"bootstrap.servers": ServerOption(server), "group.id": group}
    read = {
        **read_config(config),
        **{name: value for name, value in named.items() if value},
        **read_config(None, settings),
    }
    if not any(read.get(name) for name in ("bootstrap.servers", "metadata.broker.list")):
        raise Misuse(
            "needs --server HOST:PORT of a Kafka broker, or bootstrap.servers in --config FILE or by -X"
            f"{misspelt('bootstrap.servers', read)}"
        )
    return read


def _of_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; name a file that can be read") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8") from None
    if path.suffix == ".json":
        return _json(path, text)
    if path.suffix == ".toml":
        return _toml(path, text)
    return dict(_properties(path, text))


def _json(path: Path, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        # Do not chain the error, because a decoder's error contains the whole document.
        where = f"line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else "a number too long"
        raise ConfigError(f"{path}: not JSON ({where}); correct the file") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply; write an object of names and values") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: contains a {type(found).__name__}; write an object of names and values")
    return found


def _toml(path: Path, text: str) -> dict[str, Any]:
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        where = str(error).rpartition("(")[2].rstrip(")")
        raise ConfigError(
            f'{path}: not TOML ({where}); correct it, and quote a name that extends another name, as "group.protocol"'
        ) from None
    return dict(_joined(found, ""))


def _joined(table: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _joined(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _properties(path: Path, text: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line[0] in "#!":
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{path}: line {number} is not name=value; correct it, or start it with # for a comment")
        yield name.strip(), value.strip()
