"""Checks of single arguments, and error texts about wrong arguments."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta
from pathlib import PurePath
from typing import Final, ParamSpec, TypeVar, cast

from lanes.errors import ConfigError, LanesError

SOURCE: Final = "a source, such as KafkaSource(…), JetStreamSource(…) or PostgresSource(…)"
DEAD_LETTER_TARGET: Final = (
    "a target of dead letters, such as KafkaDeadLetters(…), JetStreamDeadLetters(…) or PostgresDeadLetters(…)"
)
"""Like ``SOURCE``, the kind of object that an error asks for. The modules of the runtime name no backend."""

_PACKAGES: Final = {
    "lanes_jetstream": "Cohort CohortStream JetStreamDeadLetters JetStreamSource header subject_token",
    "lanes_kafka": "KafkaDeadLetters KafkaSource",
    "lanes_postgres": "Log PostgresDeadLetters PostgresSource Record",
    "memsource": "MemoryBroker MemoryDeadLetters MemorySource World",
}
"""Names that users look for in ``lanes``, by the package that has them."""

_OPTIONS: Final[dict[str, list[str]]] = {}
"""The options of each class with ``names_unknown_options``, by the name of its constructor."""

OF_CONSUMERS: Final[Mapping[str, str]] = {
    "concurrency": "pass it to the consumer: lanes.Consumer(source, handler, settings=lanes.Settings(concurrency=…))",
    "retry": "pass it to the consumer: lanes.Consumer(source, handler, settings=lanes.Settings(retry=…))",
    "settings": "pass it to the consumer: lanes.Consumer(source, handler, settings=…)",
}
"""Remedies for options of the consumer in the call of a source, by the names of the options."""

OF_MAIN: Final[Mapping[str, str]] = {
    "http": "write lanes.main(source, handler, http=…), or await lanes.serve(lanes.Consumer(…), http=…)"
}
"""Remedies for options of ``lanes.main`` and ``lanes.serve`` in the call of a consumer, by the names of the options."""

_Class = TypeVar("_Class")
_P = ParamSpec("_P")
_T = TypeVar("_T")


def names_unknown_options(
    caller: str,
    refusal: Callable[[str], LanesError] = ConfigError,
    *,
    hints: Mapping[str, str] | None = None,
    homes: Mapping[str, str] | None = None,
    unnamed: str = "",
) -> Callable[[type[_Class]], type[_Class]]:
    """Make the constructor of a class raise an error that names the right arguments after a wrong call.

    A call is wrong if it has an unknown option, a value without a name, or too few arguments. A program may make a
    ``NamedTuple`` for each message. For speed, the decorator of a ``NamedTuple`` examines only the calls that Python
    refuses.

    Args:
        caller: Name by which users call the constructor.
        refusal: Function that makes the error from its text.
        hints: Sentences about the values of required arguments, by argument name. The error about a missing argument
            shows these sentences.
        homes: Remedies for options that another class or function accepts, by the names of the options.
        unnamed: Remedy for a value without a name, if its name alone does not help.

    Returns:
        The decorator of the class.
    """

    def decorate(cls: type[_Class]) -> type[_Class]:
        if issubclass(cls, tuple):
            make = names_wrong_calls(caller, refusal, method=True, hints=hints, homes=homes)(cls.__new__)
            setattr(cls, "__new__", staticmethod(make))  # noqa: B010
            return cls
        initialize = vars(cls)["__init__"]
        _, *parameters = inspect.signature(initialize).parameters.values()
        _OPTIONS[caller] = [parameter.name for parameter in parameters]

        @functools.wraps(initialize)
        def checked(self: object, *values: object, **options: object) -> None:
            __tracebackhide__ = True  # pytest shows the wrong call, not this frame
            refused = _refused_call(caller, parameters, len(values), options, hints or {}, homes or {})
            if refused is None:
                try:
                    initialize(self, *values, **options)
                except LanesError as error:
                    refusal_of_call = without_own_frames(error)
                else:
                    return
            else:
                too_many = unnamed and _needs_names(caller, parameters, len(values)) is not None
                refusal_of_call = refusal(f"{refused}. {unnamed}" if too_many else refused)
            raise refusal_of_call

        setattr(cls, "__init__", checked)  # noqa: B010
        return cls

    return decorate


def without_own_frames(error: LanesError) -> LanesError:
    """Return an error that a check of ``lanes`` raised, without the frames of the checks.

    The error of a function of the user keeps its frames.
    """
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    package = "" if last is None else str(last.tb_frame.f_globals.get("__name__")).partition(".")[0]
    return error.with_traceback(None) if package in ("lanes", *_PACKAGES, "lanes_spark") else error


def names_wrong_calls(
    caller: str,
    refusal: Callable[[str], Exception],
    *,
    method: bool = False,
    hints: Mapping[str, str] | None = None,
    homes: Mapping[str, str] | None = None,
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Make a function or a method name the right arguments after a wrong call, as ``names_unknown_options`` does.

    Args:
        caller: Name by which users call the function.
        refusal: Function that makes the error from its text.
        method: Whether the function is a method, whose first parameter is the object.
        hints: Sentences about the values of required arguments, by argument name.
        homes: Remedies for options that another class or function accepts, by the names of the options.

    Returns:
        The decorator of the function.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        every = list(inspect.signature(function).parameters.values())[method:]
        parameters = [each for each in every if each.kind is not each.POSITIONAL_ONLY]
        unnamed = method + len(every) - len(parameters)

        @functools.wraps(function)
        def checked(*values: _P.args, **options: _P.kwargs) -> _T:
            __tracebackhide__ = True  # pytest shows the wrong call, not this frame
            try:
                return function(*values, **options)
            except TypeError:
                # Python raises TypeError for each wrong call. A right call whose body raised it keeps its error.
                given = max(len(values) - unnamed, 0)
                refused = _refused_call(caller, parameters, given, options, hints or {}, homes or {})
                if refused is None:
                    raise
            raise refusal(refused)

        return checked

    return decorate


def _refused_call(
    caller: str,
    parameters: Sequence[inspect.Parameter],
    given: int,
    options: Iterable[str],
    hints: Mapping[str, str],
    homes: Mapping[str, str],
) -> str | None:
    """Return the text of the error for a wrong call, or None if the arguments fit the parameters.

    ``given`` is the number of values without a name.
    """
    known = [parameter.name for parameter in parameters]
    for name in options:
        if name not in known:
            if name in homes:
                return f"{caller} has no option {name}=: {homes[name]}"
            if not _similar(name, known) and (near := _similar(name, homes)):
                return f"{caller} has no option {name}=: did you mean {near[0]}=? If so, {homes[near[0]]}"
            return str(unknown_name(caller, name, known))
    refused = _needs_names(caller, parameters, given) or _needs_more(caller, parameters, given, options, hints)
    return None if refused is None else str(refused)


def check_one_of(name: str, value: object, known: tuple[object, ...]) -> None:
    """Raise ``ConfigError`` unless ``known`` has the value."""
    if value not in known:
        names = [f'"{one}"' if isinstance(one, str) else str(one) for one in known]
        raise ConfigError(f"{name}={shown_value(value)} is unknown: use {', '.join(names[:-1])} or {names[-1]}")


def check_positive(name: str, value: object) -> None:
    """Raise ``ConfigError`` unless the value is a finite number of seconds above 0."""
    number = _number(value)
    if not -math.inf < number < math.inf:
        raise ConfigError(
            f"{name}={shown_value(value)}: must be a finite number of seconds, more than 0{but_not(value)}"
        )
    if number <= 0:
        raise ConfigError(f"{name}={shown_value(value)}: must be more than 0 seconds")


def check_whole(name: str, value: object, least: int) -> None:
    """Raise ``ConfigError`` unless the value is a whole number of ``least`` or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        wanted = "; pass an int" if isinstance(value, str | bytes) else ""
        raise ConfigError(
            f"{name}={shown_value(value)}: must be a whole number, {least} or more{but_not(value)}{wanted}"
        )


def check_flag(name: str, value: object) -> None:
    """Raise ``ConfigError`` unless the value is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={shown_value(value)}: must be True or False")


def check_text(name: str, value: object) -> None:
    """Raise ``ConfigError`` unless the value is a text with at least one character."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name}={shown_value(value)}: must be a str that is not empty")


def check_folder(name: str, value: object) -> None:
    """Raise ``ConfigError`` unless the value is a path, as text or as an ``os.PathLike``."""
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{name}={shown_value(value)}: must be the path of a folder, a str or a pathlib.Path")


_SHOWN: Final = 100
"""Characters of an argument that an error shows."""

_ELEMENTS: Final = 8
"""Elements of a list that an error shows."""

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.]{0,15}")
_PLACE: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::\d{1,5})?(?=[/?#]|\Z)")
"""Host and port of a URL; what follows them in a URL may be a secret."""

_PASSWORD: Final = re.compile(r"(?is)((?:password|passwd|secret|token)[\w.-]*[\"']?\s*(?:=|:(?!//))).*")
"""A password in a connection string or in the text of a configuration, with all that follows it."""


def shown_value(value: object) -> str:
    """Return a wrong argument as text for an error, without possible secrets.

    A user may swap arguments by mistake. The argument for a name may then be a configuration or a URL with a password.

    Args:
        value: The argument.

    Returns:
        The text shows numbers, times and paths as ``repr`` writes them. The text shows at most 100 characters of a
        string, without user info and passwords. The text shows the elements of a list by the same rules. The text shows
        only the type of any other value.
    """
    if isinstance(value, str):
        return _cut(repr(_without_secrets(value)))
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        each = ", ".join(map(shown_value, value[:_ELEMENTS]))
        more = ", …" if len(value) > _ELEMENTS else "," if isinstance(value, tuple) and len(value) == 1 else ""
        return f"[{each}{more}]" if isinstance(value, list) else f"({each}{more})"
    if value is None or isinstance(value, int | float | date | timedelta | range | PurePath):
        with contextlib.suppress(ValueError):  # an int of more than 4300 digits has no text
            return repr(value)
        return f"a number of {cast(int, value).bit_length()} bits"
    return kind_of(value)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _without_secrets(text: str) -> str:
    """Return a text without passwords. A URL keeps only its scheme, host and port."""
    text = _PASSWORD.sub(r"\1…", text)
    if "://" not in text and "@" not in text:
        return text
    scheme, has_scheme, rest = text.rpartition("://") if text.count("://") == 1 else ("", "", text)
    _, at, after = rest.rpartition("@")
    place = _PLACE.match(after)
    begin = f"{scheme if _SCHEME.fullmatch(scheme) else '…'}://" if has_scheme else ""
    where = place[0] if place else ""
    return f"{begin}{'…@' if at else ''}{where}{'' if where and where == after else '…'}"


def kind_of(value: object) -> str:
    """Describe the type of a wrong argument, without the value, because the value may contain a secret."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    name = type(value).__qualname__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def check_aware(name: str, value: datetime) -> None:
    """Raise ``ConfigError`` for a time without a zone, because each machine would read a different time."""
    if value.utcoffset() is None:
        raise ConfigError(f"{name}={value.isoformat()} has no time zone: write datetime(…, tzinfo=UTC)")


def check_seconds(name: str, value: object, least: float) -> None:
    """Raise ``ConfigError`` unless the value is a finite number of seconds, ``least`` or more."""
    if not least <= _number(value) < math.inf:
        raise ConfigError(
            f"{name}={shown_value(value)}: must be a finite number of seconds, {least:g} or more{but_not(value)}"
        )


def check_whole_seconds(name: str, value: object, least: int) -> None:
    """Raise ``ConfigError`` unless the value is a whole number of seconds, ``least`` or more."""
    number = _number(value)
    if not least <= number < math.inf or number != int(number):
        raise ConfigError(f"{name}={shown_value(value)}: must be whole seconds, {least} or more{but_not(value)}")


def _number(value: object) -> float:
    """Return a number as a float; NaN = the value is not a number, or is larger than the largest float."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            return float(value)
    return math.nan


def but_not(value: object) -> str:
    """Return the type of a value that is not a number, as the end of an error text."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return "" if is_number else f", not {kind_of(value)}"


def unknown_name(caller: str, name: str, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown option, with the known names that are similar.

    Args:
        caller: Name of the function or class that received the option.
        name: Name of the option.
        known: Names of the options that exist.

    Returns:
        The error.
    """
    names = sorted(known)
    if name == "ranges":
        return ConfigError(f"{caller} has no option {name}=: {_NO_RANGES}")
    home = _home(name, names)
    meant = [f"{one}=" for one in _similar(name, names)] or [
        each for one in _similar(name, _OPTIONS.get("Settings", ())) if (each := _home(one, names))
    ]
    guess = f"did you mean {' or '.join(meant)}?" if meant else f"the options are {', '.join(names)}"
    return ConfigError(f"{caller} has no option {name}=: {f'write {home}' if home else guess}")


def _similar(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that resemble an unknown name.

    If the unknown name is the plural of a known name, return only that name.
    """
    names = sorted(known)
    singulars = {name.removesuffix("s"), re.sub("ies$", "y", name)}
    # Swapped letters of a short name make a low ratio.
    swapped = [each for each in names if sorted(each) == sorted(name)]
    return sorted(singulars.intersection(names)) or swapped or difflib.get_close_matches(name, names, cutoff=0.7)


def _needs_names(caller: str, parameters: Sequence[inspect.Parameter], given: int) -> ConfigError | None:
    """Return the error for a call that passes too many values without a name; None = the number of values is right."""
    by_name = [each for each in parameters if each.kind is each.KEYWORD_ONLY]
    most = sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)
    if given <= most or not by_name:
        return None
    wanted = ", ".join(f"{each.name}=…" for each in by_name if each.default is each.empty) or f"{by_name[0].name}=…"
    return ConfigError(
        f"{caller} takes {most or 'no'} argument(s) without a name, and the call has {given}: write the names, such as "
        f"{wanted}"
    )


def _needs_more(
    caller: str, parameters: Sequence[inspect.Parameter], given: int, options: Iterable[str], hints: Mapping[str, str]
) -> ConfigError | None:
    """Return the error for a call without a required argument; None = the call has all required arguments."""
    named = {*options, *(each.name for each in parameters[:given])}
    required = [each for each in parameters if each.default is each.empty]
    missing = [each.name for each in required if each.name not in named]
    if not missing:
        return None
    call = ", ".join(f"{each.name}=…" if each.kind is each.KEYWORD_ONLY else each.name for each in required)
    return ConfigError(
        f"{caller} lacks {', '.join(f'{name}=' for name in missing)}: write {caller}({call})"
        + "".join(f". {hints[name]}" for name in missing if name in hints)
    )


_NO_RANGES: Final = (
    "the broker places keys by a hash of its own, so each of its partitions has keys of nearly all ranges; read a log "
    "in PostgreSQL, with lanes_postgres.PostgresSource(…, ranges=…)"
)


def _home(name: str, names: Sequence[str]) -> str:
    """Return the place of an option of ``Settings`` or ``Retry`` in a call with the options ``names``.

    "" = the option has no place in the call.
    """
    home = ""
    if name in _OPTIONS.get("Retry", ()) and ("retry" in names or "settings" in names):
        home = f"retry=lanes.Retry({name}=…)"
    elif name in _OPTIONS.get("Settings", ()) and "settings" in names:
        home = f"{name}=…"
    if home and "settings" in names:
        home = f"settings=lanes.Settings({home})"
    return home


def package_of(name: str) -> str | None:
    """Return the package that defines a name which users look for in ``lanes``; None = the package is unknown."""
    return next((package for package, names in _PACKAGES.items() if name in names.split()), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that suggests the known name most similar to a wrong name, as the end of an error text.

    Args:
        name: The wrong name.
        known: The names that exist.

    Returns:
        A blank and the question in parentheses; "" = no known name is similar, or the name exists.
    """
    names = {one.casefold(): one for one in known}
    near = difflib.get_close_matches(name.casefold(), sorted(names), n=1, cutoff=0.75)
    # A name that exists is wrong for another reason.
    return "" if not near or names[near[0]] == name else f" (did you mean {names[near[0]]!r}?)"
