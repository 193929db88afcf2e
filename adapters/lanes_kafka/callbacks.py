"""The user's callbacks in the settings of a client: checked, and wrapped so that an error names the callback."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from lanes.arguments import kind_of
from lanes.errors import ConfigError

ON_COMMIT: Final = "on_commit"

_TAKES: Final[Mapping[str, tuple[str, ...]]] = {
    "error_cb": ("error",),
    "stats_cb": ("text",),
    "throttle_cb": ("event",),
    "oauth_cb": ("config",),
    ON_COMMIT: ("error", "partitions"),
}
"""The arguments that the client passes to each callback."""

_LOG_TAKES: Final = ("level", "template", "facility", "client", "text")
_TOKEN: Final = "a tuple of a token, a str, and the time of its expiry, a number"


class CallbackError(Exception):
    """A callback of the user's configuration raised an error.

    Args:
        name: Setting of the callback.
        raised: The error.
    """

    def __init__(self, name: str, raised: BaseException) -> None:
        super().__init__(f"{name} raised {type(raised).__name__}")
        self.name = name
        self.raised = raised


class Callback:
    """A callback of the user, whose errors become a ``CallbackError``.

    The client drops an error of ``oauth_cb``, and reports a login without a token. ``raised`` keeps the error.

    Args:
        name: Setting of the callback.
        function: The callback.

    Attributes:
        raised: The error of the last call; None = the last call returned, or no call yet.
    """

    def __init__(self, name: str, function: Callable[..., object]) -> None:
        self.raised: BaseException | None = None
        self._name = name
        self._function = function

    def __call__(self, *arguments: object) -> object:
        """Call the function of the user, and return its result."""
        try:
            result = self._function(*arguments)
            if self._name == "oauth_cb":
                _check_token(result)
        except BaseException as error:
            # Uncaught, SystemExit would end the client's thread silently.
            self.raised = error
            raise CallbackError(self._name, error) from error
        self.raised = None
        return result


class CalledLogger:
    """A ``logger`` of the user that is no ``logging.Logger``. Errors of its ``log`` become a ``CallbackError``."""

    def __init__(self, logger: Any) -> None:
        self.log = Callback("logger", logger.log)


def named_callbacks(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Check the callbacks in the settings of a client, and return a copy in which errors of callbacks name them.

    Raises ``ConfigError`` for a callback that the client could not call. Pure and idempotent.
    """
    copy = dict(settings)
    for name, takes in _TAKES.items():
        callback = copy.get(name)
        if callback is not None and not isinstance(callback, Callback):
            _check(name, callback, takes)
            copy[name] = Callback(name, callback)
    logger = copy.get("logger")
    if logger is not None and not isinstance(logger, logging.Logger | CalledLogger):
        if not callable(getattr(logger, "log", None)):
            raise ConfigError(f"logger is {kind_of(logger)}, which has no method log; pass a logging.Logger")
        _check("logger.log", logger.log, _LOG_TAKES)
        copy["logger"] = CalledLogger(logger)
    return copy


def _check(name: str, callback: object, takes: tuple[str, ...]) -> None:
    wanted = f"a plain function ({', '.join(takes)})"
    if not callable(callback):
        raise ConfigError(f"{name} is {kind_of(callback)}, which is not callable; pass {wanted}")
    bodies = (callback, getattr(callback, "__call__", None))  # noqa: B004
    if any(map(inspect.iscoroutinefunction, bodies)):
        raise ConfigError(f"{name} is async, but the client awaits nothing; pass {wanted}")
    try:
        signature = inspect.signature(callback)
    except (TypeError, ValueError):
        # Some functions in C have no signature.
        return
    try:
        signature.bind(*takes)
    except TypeError:
        own = ", ".join(signature.parameters) or "nothing"
        raise ConfigError(f"{name} takes {own}, but the client passes ({', '.join(takes)}); pass {wanted}") from None


def _check_token(result: object) -> None:
    if not isinstance(result, tuple) or len(result) < 2:
        raise TypeError(f"the result is {kind_of(result)}, not {_TOKEN}")
    token, expiry = result[:2]
    if not isinstance(token, str) or not isinstance(expiry, int | float):
        raise TypeError(f"the result has {kind_of(token)} and {kind_of(expiry)}; return {_TOKEN}")
