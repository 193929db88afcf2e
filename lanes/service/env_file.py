"""The variables of an environment file."""

from __future__ import annotations

from pathlib import Path

from lanes.errors import ConfigError


def variables_of(path: Path) -> dict[str, str]:
    """Read ``NAME=VALUE`` lines. No error shows a value, because a value may be a secret.

    Args:
        path: The file. The function ignores empty lines and lines that begin with ``#``. A line may begin with
            ``export``, and quotes around a value are not part of the value.

    Returns:
        The variables.

    Raises:
        ConfigError: The file cannot be read, or a line has another form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ConfigError(f"--env-file {str(path)!a}: cannot read the file ({reason})") from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not name.isidentifier() or "\0" in value:
            raise ConfigError(f"--env-file {str(path)!a}, line {number}: write NAME=VALUE")
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        found[name] = value
    return found
