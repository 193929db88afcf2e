"""Settings refuse wrong values in their constructor, with setting, value and remedy."""

from __future__ import annotations

import dataclasses
import inspect
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

import lanes
from lanes import ConfigError, Retry, Settings

NO_WHOLE_NUMBERS: list[Any] = ["5", 5.0, None, True, [5], math.nan]
KINDS = {"'5'": ", not a str; pass an int", "None": ", not None", "True": ", not a bool", "[5]": ", not a list"}
"""Ends of the errors about values that are no numbers, by their text."""

NO_SECONDS: list[Any] = ["5", None, True, [5], math.nan, math.inf, -math.inf, -0.001]
NO_SECONDS.append(pytest.param(10**400, id="beyond float"))  # too large to be added to a time


def refusal(kind: type[Retry] | type[Settings], **settings: Any) -> str:
    """The text of the refusal of these settings."""
    with pytest.raises(ConfigError) as refused:
        kind(**settings)
    return str(refused.value)


def test_the_defaults_are_those_of_the_documentation() -> None:
    settings = Settings()
    assert (settings.concurrency, settings.max_in_flight_bytes) == (100, 64 * 1024 * 1024)
    assert settings.in_flight_bound(None) == 2_000
    assert settings.retry == Retry(attempts=5, backoff=0.2, max_backoff=30.0)
    assert (settings.drain_timeout, settings.grace) == (30.0, 2.0)
    assert (settings.max_ahead, settings.commit_interval, settings.commit_count) == (10_000, 1.0, 2_500)
    assert (settings.order, settings.keyless, settings.lanes) == ("key", "any", None)
    assert (settings.batch, settings.linger, settings.timeout, settings.sync_handlers) == (None, 0.0, None, "threads")
    assert (settings.poison, settings.unhealthy_after) == (None, 300.0)


@pytest.mark.parametrize("kind", [Retry, Settings])
def test_settings_are_frozen_and_keyword_only(kind: type[Retry] | type[Settings]) -> None:
    with pytest.raises(ConfigError, match=r"takes no argument\(s\) without a name, and the call has 1"):
        kind(5)  # type: ignore[call-arg]
    name = dataclasses.fields(kind)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(kind(), name, 7)


@pytest.mark.parametrize("kind", [Retry, Settings])
def test_every_setting_is_documented(kind: type[Retry] | type[Settings]) -> None:
    assert kind.__doc__ is not None
    assert [field.name for field in dataclasses.fields(kind) if f"\n        {field.name}: " not in kind.__doc__] == []


# --- one setting at a time


PER_PARTITION = ("concurrency_per_partition", "max_in_flight_per_partition")


@pytest.mark.parametrize(
    "name", ["concurrency", "max_in_flight", "max_in_flight_bytes", *PER_PARTITION, "max_ahead", "lanes", "batch"]
)
@pytest.mark.parametrize("value", [*NO_WHOLE_NUMBERS, 0, -1])
def test_a_count_is_a_whole_number_from_1(name: str, value: Any) -> None:
    if name in ("max_in_flight", *PER_PARTITION, "lanes", "batch") and value is None:
        nothing: dict[str, Any] = {name: None}
        assert getattr(Settings(**nothing), name) is None
        return
    said = f"{name}={value!r}: must be a whole number, 1 or more{KINDS.get(repr(value), '')}"
    assert refusal(Settings, **{name: value}) == said


def test_a_bound_per_partition_is_not_above_the_bound_of_the_consumer() -> None:
    Settings(concurrency=4, concurrency_per_partition=4, max_in_flight=9, max_in_flight_per_partition=9)
    said = refusal(Settings, concurrency=4, concurrency_per_partition=5)
    assert said.startswith("concurrency_per_partition=5 is above concurrency=4: a partition could never run so many ")
    said = refusal(Settings, concurrency=4, max_in_flight=9, max_in_flight_per_partition=10)
    assert said.startswith("max_in_flight_per_partition=10 is above max_in_flight=9: a partition could never have ")
    said = refusal(Settings, max_in_flight_per_partition=2_001)
    assert said.startswith("max_in_flight_per_partition=2001 is above max_in_flight=2000: ")
    said = refusal(Settings, concurrency_per_partition=5, max_in_flight_per_partition=4)
    assert said.startswith("max_in_flight_per_partition=4 is below concurrency_per_partition=5: a handler needs a ")


@pytest.mark.parametrize("value", [*NO_WHOLE_NUMBERS, 0, -1])
def test_attempts_are_a_whole_number_from_1(value: Any) -> None:
    said = f"Retry.attempts={value!r}: must be a whole number, 1 or more{KINDS.get(repr(value), '')}"
    assert refusal(Retry, attempts=value) == said


def test_a_drain_longer_than_the_broker_allows_is_refused() -> None:
    Settings(drain_timeout=223.0, grace=2.0).check_drain(240.0)
    Settings(drain_timeout=3600.0).check_drain(None)
    said = (
        "drain_timeout=224 and grace=2, with 5 s for the last settlement and 10 s for the release, exceed the 240 s "
        "that the broker allows for a drain. Lower drain_timeout or grace, or raise "
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}that limit$"):
        Settings(drain_timeout=224.0, grace=2.0).check_drain(240.0)
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}session.limit$"):
        Settings(drain_timeout=224.0, grace=2.0).check_drain(240.0, "session.limit")


@pytest.mark.parametrize("name", ["drain_timeout", "grace", "linger", "commit_interval", "timeout", "unhealthy_after"])
@pytest.mark.parametrize("value", NO_SECONDS)
def test_a_time_is_a_finite_number_of_seconds_from_0(name: str, value: Any) -> None:
    if name == "timeout" and value is None:
        assert Settings(timeout=None).timeout is None
        return
    least = "more than 0" if name in ("timeout", "unhealthy_after") else "0 or more"
    said = f"{name}={value!r}: must be a finite number of seconds, {least}{type_of(value)}"
    if least == "more than 0" and value == -0.001:
        said = f"{name}={value!r}: must be more than 0 seconds"
    assert refusal(Settings, **{name: value}) == said


def type_of(value: object) -> str:
    """The end of the error for a value that is no number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    kind = "None" if value is None else f"a {type(value).__name__}"
    return "" if is_number else f", not {kind}"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"concurency": 5}, "Settings has no option concurency=: did you mean concurrency=?"),
        ({"time_out": 5}, "Settings has no option time_out=: did you mean timeout=?"),
        ({"retries": 5}, "Settings has no option retries=: did you mean retry=?"),
        ({"timeouts": 5}, "Settings has no option timeouts=: did you mean timeout=?"),
        ({"attempts": 5}, "Settings has no option attempts=: write retry=lanes.Retry(attempts=…)"),
    ],
)
def test_an_unknown_setting_is_named_with_a_known_one(options: Any, said: str) -> None:
    assert refusal(Settings, **options) == said
    assert refusal(Retry, tries=3) == "Retry has no option tries=: the options are attempts, backoff, max_backoff"
    assert inspect.signature(Settings).parameters["concurrency"].default == 100


def test_a_retry_in_the_place_of_a_nak_is_refused_with_the_right_class() -> None:
    make: Any = Retry
    with pytest.raises(ConfigError) as refused:
        make("later")
    assert str(refused.value) == (
        "Retry takes no argument(s) without a name, and the call has 1: write the names, such as attempts=…. A handler "
        "asks for another attempt by raise lanes.Nak(reason)"
    )
    said = "Retry has no option delay=: a handler asks for another attempt by raise lanes.Nak(delay=…)"
    assert refusal(Retry, delay=5) == said


@pytest.mark.parametrize("name", ["timeout", "unhealthy_after"])
@pytest.mark.parametrize("value", [0, 0.0, -1, -0.5])
def test_a_time_of_zero_is_refused_for_a_setting_that_must_be_positive(name: str, value: float) -> None:
    assert refusal(Settings, **{name: value}) == f"{name}={value!r}: must be more than 0 seconds"


@pytest.mark.parametrize("name", ["backoff", "max_backoff"])
@pytest.mark.parametrize("value", NO_SECONDS)
def test_a_backoff_is_a_finite_number_of_seconds_from_0(name: str, value: Any) -> None:
    said = f"Retry.{name}={value!r}: must be a finite number of seconds, 0 or more{type_of(value)}"
    assert refusal(Retry, **{name: value}) == said


@pytest.mark.parametrize("value", [None, 5, "Retry()", {"attempts": 3}, Retry])
def test_only_a_retry_is_accepted_as_retry(value: Any) -> None:
    said = refusal(Settings, retry=value)
    shown = {dict: "a dict", type: "the class Retry"}.get(type(value), repr(value))
    assert said == f"retry={shown} is not a lanes.Retry: write retry=lanes.Retry(attempts=…)"


CHOICES: dict[str, tuple[list[Any], str]] = {
    "poison": (["skip", "block", "block_and_dlq", "exit", None], '"skip", "block", "block_and_dlq", "exit" or None'),
    "order": (["key", "partition", "serial", "none"], '"key", "partition", "serial" or "none"'),
    "keyless": (["any", "one_lane"], '"any" or "one_lane"'),
    "sync_handlers": (["threads", "inline", "processes"], '"threads", "inline" or "processes"'),
    "on_cancel": (["drain", "stop"], '"drain" or "stop"'),
}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("value", ["Skip", "KEY", "", 0, False, ["skip"], None])
def test_an_unknown_choice_is_refused(name: str, value: Any) -> None:
    known, named = CHOICES[name]
    if value in known:
        return
    assert refusal(Settings, **{name: value}) == f"{name}={value!r} is unknown: use {named}"


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_is_accepted_and_documented(name: str) -> None:
    assert Settings.__doc__ is not None
    for value in CHOICES[name][0]:
        # One choice needs another setting.
        needed: dict[str, Any] = {"processes": 1} if value == "processes" else {}
        assert getattr(Settings(**{name: value}, **needed), name) == value
        assert value is None or f'"{value}"' in Settings.__doc__


def test_the_lowest_value_of_every_setting_is_accepted() -> None:
    retry = Retry(attempts=1, backoff=0, max_backoff=0)
    settings = Settings(
        concurrency=1,
        max_in_flight=1,
        max_in_flight_bytes=1,
        max_ahead=1,
        lanes=1,
        batch=1,
        linger=0,
        timeout=0.001,
        retry=retry,
        commit_interval=0,
        unhealthy_after=0.001,
        drain_timeout=0,
        grace=0.0,
    )
    assert (settings.in_flight_bound(1), settings.retry.attempts, settings.commit_count) == (1, 1, 1)


# --- settings that contradict each other


def test_max_backoff_below_backoff_is_refused() -> None:
    said = refusal(Retry, backoff=2.0, max_backoff=1.0)
    assert said == "Retry.max_backoff=1.0 is below Retry.backoff=2.0: raise max_backoff or lower backoff"
    assert Retry(backoff=2.0, max_backoff=2.0).max_backoff == 2.0


def test_max_in_flight_below_concurrency_is_refused() -> None:
    said = refusal(Settings, concurrency=10, max_in_flight=9)
    assert "max_in_flight=9 is below concurrency=10" in said
    assert "raise max_in_flight or lower concurrency" in said
    assert Settings(concurrency=10, max_in_flight=10).max_in_flight == 10


def test_lanes_need_the_order_by_key() -> None:
    for order in ("partition", "serial", "none"):
        said = refusal(Settings, lanes=4, order=order)
        assert said == f'lanes=4 with order="{order}": only order="key" has lanes by key; leave out lanes or order'
    assert Settings(lanes=4).lanes == 4


def test_too_many_lanes_are_refused() -> None:
    said = refusal(Settings, lanes=2**32 + 1)
    assert said == f"lanes={2**32 + 1}: must be at most {2**32}; leave it out for a lane per key"
    assert Settings(lanes=2**32).lanes == 2**32


def test_linger_without_batch_is_refused() -> None:
    assert refusal(Settings, linger=0.5) == "linger=0.5 without batch: set batch=…, or leave linger out"
    assert Settings(linger=0.5, batch=2).linger == 0.5


def test_a_batch_above_max_in_flight_is_refused() -> None:
    said = refusal(Settings, batch=11, max_in_flight=10, concurrency=1)
    assert said == (
        "batch=11 is above max_in_flight=10: a batch could never be full; raise max_in_flight or lower batch"
    )
    assert Settings(batch=10, max_in_flight=10, concurrency=1).batch == 10


@pytest.mark.parametrize(("batch", "allowed", "bound"), [(2_001, None, 2_000), (2_001, 3_000, 2_000), (501, 500, 500)])
def test_a_batch_above_the_bound_in_force_is_refused(batch: int, allowed: int | None, bound: int) -> None:
    with pytest.raises(ConfigError) as refused:
        Settings(batch=batch).in_flight_bound(allowed)
    assert f"batch={batch} is above max_in_flight={bound}" in str(refused.value)
    assert Settings(batch=bound).in_flight_bound(allowed) == bound


def test_serial_order_with_a_skipping_policy_is_refused() -> None:
    said = refusal(Settings, order="serial", poison="skip")
    assert said == (
        'order="serial" with poison="skip": serial order must not replace a message by a dead letter; '
        'use poison="block_and_dlq", "block" or "exit", or order="partition"'
    )


@pytest.mark.parametrize("poison", ["exit", "block", "block_and_dlq", None])
def test_serial_order_permits_every_policy_that_stops_the_line(poison: Any) -> None:
    assert Settings(order="serial", poison=poison).poison == poison


@pytest.mark.parametrize(("max_ahead", "count"), [(1, 1), (7, 1), (100, 25), (10_000, 2_500), (10**9, 5_000)])
def test_a_commit_waits_for_a_quarter_of_max_ahead_at_most(max_ahead: int, count: int) -> None:
    assert Settings(max_ahead=max_ahead).commit_count == count


@pytest.mark.parametrize(
    ("poison", "has_dead_letters", "policy"),
    [
        (None, True, "skip"),
        (None, False, "exit"),
        ("skip", True, "skip"),
        ("block", True, "block"),
        ("block", False, "block"),
        ("block_and_dlq", True, "block_and_dlq"),
        ("exit", True, "exit"),
        ("exit", False, "exit"),
    ],
)
def test_the_default_poison_policy_depends_on_the_dead_letters(
    poison: Any, has_dead_letters: bool, policy: str
) -> None:
    assert Settings(poison=poison).poison_policy(has_dead_letters=has_dead_letters) == policy


def test_serial_order_defaults_to_the_policy_exit() -> None:
    assert Settings(order="serial").poison_policy(has_dead_letters=True) == "exit"
    assert Settings(order="serial", poison="block").poison_policy(has_dead_letters=True) == "block"


@pytest.mark.parametrize("poison", ["skip", "block_and_dlq"])
def test_a_policy_that_needs_dead_letters_is_refused_without_them(poison: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        Settings(poison=poison).poison_policy(has_dead_letters=False)
    assert str(refused.value).startswith(f'poison="{poison}" needs dead letters, or messages are lost: ')
    assert str(refused.value).endswith('pass dead_letters=… or use poison="exit"')


# --- limits of the broker


@pytest.mark.parametrize(
    ("settings", "allowed", "bound"),
    [
        (Settings(), None, 2_000),
        (Settings(), 10_000, 2_000),
        (Settings(), 2_000, 2_000),
        (Settings(), 500, 500),
        (Settings(), 100, 100),
        (Settings(concurrency=5_000), None, 5_000),
        (Settings(concurrency=5_000), 7_000, 5_000),
        (Settings(max_in_flight=300), None, 300),
        (Settings(max_in_flight=300), 300, 300),
    ],
)
def test_the_bound_on_messages_in_flight_is_the_lower_one_of_settings_and_broker(
    settings: Settings, allowed: int | None, bound: int
) -> None:
    assert settings.in_flight_bound(allowed) == bound


def test_max_in_flight_above_the_brokers_limit_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^max_in_flight=300 is above the 299 .* allows: lower max_in_flight, or raise"
    ):
        Settings(max_in_flight=300).in_flight_bound(299)


def test_concurrency_above_the_limit_of_the_broker_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^concurrency=100 is above the 99 .* allows: lower concurrency, or raise"):
        Settings().in_flight_bound(99)


# --- outcomes that a handler chooses


@pytest.mark.parametrize("delay", [-1.0, math.nan, math.inf, -math.inf])
def test_a_delay_is_a_finite_number_of_seconds_from_0(delay: float) -> None:
    with pytest.raises(ValueError, match=r"^Nak\(delay=.*\): the delay must be a finite number of seconds, 0 or more$"):
        lanes.Nak(delay=delay)


def test_a_delay_in_the_place_of_the_reason_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^Nak\(30\): the reason must be a str; write Nak\(delay=…\)"):
        lanes.Nak(30)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dealy": 5}, "Nak has no option dealy=: did you mean delay=?"),
        ({"after": 5}, "Nak has no option after=: write Nak(reason, delay=…)"),
    ],
)
def test_an_unknown_option_of_a_nak_is_refused_with_the_right_call(options: Any, said: str) -> None:
    with pytest.raises(TypeError) as refused:
        lanes.Nak("busy", **options)
    assert str(refused.value) == said


def test_a_delay_without_its_name_is_refused() -> None:
    nak: Callable[..., lanes.Nak] = lanes.Nak
    with pytest.raises(
        TypeError, match=r"^Nak\('busy', 30\): the delay needs its name; write Nak\('busy', delay=30\)$"
    ):
        nak("busy", 30)
    with pytest.raises(TypeError, match=r"^Nak\('a', 1, 2\): the delay needs its name"):
        nak("a", 1, 2)
    assert str(inspect.signature(lanes.Nak)) == "(reason: 'str' = '', *, delay: 'float | None' = None) -> 'None'"
    assert pickle.loads(pickle.dumps(lanes.Nak("busy"))).reason == "busy"


def test_nak_and_term_carry_the_wish_of_the_handler() -> None:
    assert (str(lanes.Nak()), str(lanes.Nak(delay=1.5))) == (
        "no reason given",
        "no reason given, retry in 1.5 s",
    )
    assert (lanes.Nak().delay, lanes.Nak(delay=0).delay) == (None, 0)
    busy = lanes.Nak("busy", delay=3)
    assert (str(busy), busy.reason, busy.delay, lanes.Nak().reason) == ("busy", "busy", 3, "")
    term = lanes.Term("no such account")
    assert (str(term), term.reason) == ("no such account", "no such account")
    # A handler may also raise the class.
    assert (str(lanes.Term()), lanes.Term().reason) == ("no reason given", "")
