"""Tokens of any content, made from the description of the format, without the product's code."""

from __future__ import annotations

import base64
import json
import sys
import zlib
from importlib.metadata import version

from memsource.sim.plans.token import DICTIONARY

LANES = version("lanes-runtime")
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
QUIET = {"lanes": LANES, "python": PYTHON, "personality": "kafka", "seed": 0}


def armoured(data: bytes, check: int | None = None) -> str:
    """Bytes as a token, with the right or another checksum."""
    check = zlib.crc32(data) if check is None else check
    return "lanes1-" + base64.urlsafe_b64encode(check.to_bytes(4, "little") + data).rstrip(b"=").decode()


def deflated(text: bytes, level: int = 9) -> bytes:
    """Text, deflated as in a token."""
    deflater = zlib.compressobj(level, zlib.DEFLATED, -15, zdict=DICTIONARY)
    return deflater.compress(text) + deflater.flush()


def forged(text: bytes | str) -> str:
    """A valid token except for its text."""
    return armoured(deflated(text if isinstance(text, bytes) else text.encode()))


def of_fields(**changed: object) -> str:
    """A token of the quiet plan with changed or additional fields; None leaves a field out."""
    fields = {name: value for name, value in (QUIET | changed).items() if value is not None}
    return forged(json.dumps(fields, separators=(",", ":")))


def text_of(token: str) -> str:
    """The text in a token."""
    body = token.removeprefix("lanes1-")
    data = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))[4:]
    return zlib.decompressobj(-15, zdict=DICTIONARY).decompress(data).decode()
