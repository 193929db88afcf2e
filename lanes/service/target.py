"""The consumer that a text such as ``app:consumer`` names."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from typing import Final

from lanes.arguments import kind_of
from lanes.consumer import Consumer
from lanes.dead_letter import printable

_REMEDY: Final = "write module:name of a lanes.Consumer, or of a function without arguments that returns one"


class TargetError(Exception):
    """Error for a target that names no consumer. The text is one line for the user."""


def parse_target(text: str) -> tuple[str, str]:
    """Return the module and the name in a text such as ``shop.app:consumer``.

    Args:
        text: The text.

    Returns:
        The module and the dotted name in the module.

    Raises:
        TargetError: The text has another form.
    """
    module, colon, name = text.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise TargetError(f"{text!a} is not of the form module:name: {_REMEDY}, such as app:consumer")
    return module, name


async def consumer_of(text: str) -> Consumer:
    """Import a target, and call it if it is a function. The call blocks during the import.

    Args:
        text: A text such as ``app:consumer``.

    Returns:
        The consumer.

    Raises:
        TargetError: The module or the name does not exist, the file has a syntax error, or the object is not a
            consumer.
    """
    module, name = parse_target(text)
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: object = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise TargetError(
            f"{text!a}: no module {error.name!a} in {os.getcwd()} or in the environment; start the command in the "
            "folder of the module, or correct the name"
        ) from None
    except SyntaxError as error:
        at = f"{error.filename}, line {error.lineno}"
        raise TargetError(f"{text!a}: syntax error in {printable(at)}: {printable(error.msg)}; correct it") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise TargetError(f"{text!a}: {module} has no {part!a}; {_REMEDY}")
        found = getattr(found, part)
    if isinstance(found, Consumer):
        return found
    if not callable(found) or isinstance(found, type):
        raise TargetError(f"{text!a} is {kind_of(found)}: {_REMEDY}")
    try:
        inspect.signature(found).bind()
    except TypeError:
        raise TargetError(f"{text!a} needs arguments: {_REMEDY}") from None
    made: object = found()
    if inspect.isawaitable(made):
        made = await made
    if not isinstance(made, Consumer):
        raise TargetError(f"{text!a} returned {kind_of(made)}: {_REMEDY}")
    return made
