"""The records of a cohort's bucket are decoded as they were encoded, and invalid records are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.core.cohort import records
from lanes.core.cohort.ledger import SHOWN, Done, shown
from lanes.core.cohort.records import CohortConfig, DrainRequest, Heartbeat, Lease, PlanRecord, State, decode, encode
from tests.cohort.former import records as former

CONFIG = CohortConfig(
    cohort="billing",
    partitions=64,
    choice="transform",
    detail="{{partition(64,1)}}.{{wildcard(1)}}",
    tokens=(1, 3),
    incarnation="2026-01-01T00:00:00Z",
    retention="limits",
    start="beginning",
    stream="ORDERS",
    namespace="lanes",
    lease=10,
)
RECORDS: list[records.Record] = [
    CONFIG,
    PlanRecord(7, ("a", None, "b"), ("a", "b", "c"), ("c",), 3, too_few_members=False),
    PlanRecord(0, (), (), (), None, too_few_members=True),
    PlanRecord(7, ("a",), ("a",), (), None, False, under_provisioned=True, default_consumer_target=4, rules=1),
    Heartbeat("n0", 2, None, 1_700_000_000_000),
    Heartbeat("n0", 2, None, 1_700_000_000_000, 10),
    Heartbeat("n0", 2, 3, 1_700_000_000_000, 10, consumer_target=5, default_consumer_target=6, rules=1),
    Lease("a", "n1"),
    Lease("a", "n1", 12, released=True),
    Lease("a", "n1", records.HIGHEST),
    State(1_700_000_000_001, Done(90, (3, 70))),
    DrainRequest(5),
]


@pytest.mark.parametrize("record", RECORDS)
def test_an_encoded_record_is_decoded_unchanged(record: records.Record) -> None:
    assert decode(type(record), "a.key", encode(record)) == record


def test_a_record_is_json_with_a_version() -> None:
    assert json.loads(encode(Lease("a", "n", 3))) == {
        "version": 1,
        "member": "a",
        "nonce": "n",
        "epoch": 3,
        "released": False,
    }


def test_an_unknown_field_is_ignored() -> None:
    value = json.dumps({**json.loads(encode(DrainRequest(5))), "by": "an operator"}).encode()
    assert decode(DrainRequest, "drain.a", value) == DrainRequest(5)


def without(record: records.Record, **changes: Any) -> bytes:
    content = {**json.loads(encode(record)), **changes}
    return json.dumps({name: value for name, value in content.items() if value is not ...}).encode()


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (Lease, b"", "not JSON"),
        (Lease, b"\xff\xfe", "not JSON"),
        (Lease, b"{", "not JSON"),
        (Lease, b"[" * 100_000, "not JSON"),
        (Lease, b"1" * 5_000, "not JSON"),
        (Lease, b"[]", "not an object"),
        (Lease, b"null", "not an object"),
        (Lease, b"{}", "version None"),
        (Lease, without(Lease("a", "n"), version=2), "version 2, but this program supports version 1"),
        (Lease, without(Lease("a", "n"), nonce=...), "nonce: expected text"),
        (Lease, without(Lease("a", "n"), member=7), "member: expected text"),
        (Lease, without(Lease("a", "n"), epoch=-1), "epoch: expected a whole number"),
        (Lease, without(Lease("a", "n"), epoch=1e300), "epoch: expected a whole number"),
        (Lease, without(Lease("a", "n"), epoch=True), "epoch: expected a whole number"),
        (Lease, without(Lease("a", "n"), epoch=records.HIGHEST + 1), "epoch: expected a whole number"),
        (Lease, without(Lease("a", "n"), released=0), "released: expected true or false"),
        (Heartbeat, without(Heartbeat("n", 1, 2, 3), weight=2**60), "weight: expected a whole number"),
        (State, without(State(1, Done(5, (2,))), done=[5, 9]), "done: a ledger's outstanding"),
        (State, without(State(1, Done(5, (2,))), done=...), "done: a ledger is a list"),
        (Heartbeat, without(Heartbeat("n", 1, 2, 3), target="2"), "target: expected a whole number"),
        (Heartbeat, without(Heartbeat("n", 1, 2, 3), rules=None), "rules: expected a whole number"),
        (Heartbeat, without(Heartbeat("n", 1, 2, 3), consumer_target=0.5), "consumer_target: expected a whole number"),
        (PlanRecord, without(RECORDS[1], under_provisioned=...), "under_provisioned: expected true or false"),
        (PlanRecord, without(RECORDS[1], over_target=1), "over_target: expected true or false"),
        (PlanRecord, without(RECORDS[1], owners="ab"), "owners: expected a list"),
        (PlanRecord, without(RECORDS[1], owners=["a", 1]), "owners: expected text"),
        (CohortConfig, without(CONFIG, tokens=[1, "2"]), "tokens: expected a whole number"),
    ],
)
def test_an_invalid_value_is_refused_with_key_and_remedy(kind: Any, value: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=r"the key 'l\.7' of the cohort's bucket holds") as refused:
        decode(kind, "l.7", value)
    assert said in str(refused.value)
    assert "let no other program write to the bucket" in str(refused.value)
    assert len(str(refused.value)) < 500
    assert f" holds {shown(value)}: " in str(refused.value)


VALUES: st.SearchStrategy[object] = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
CONTENTS = st.fixed_dictionaries({"version": st.just(1), "partitions": VALUES, "owners": VALUES, "done": VALUES})


@pytest.mark.long
@given(st.binary(max_size=60) | CONTENTS.map(lambda content: json.dumps(content).encode()))
def test_any_content_is_decoded_or_refused(value: bytes) -> None:
    for kind in (CohortConfig, PlanRecord, Heartbeat, Lease, State, DrainRequest):
        with pytest.raises(ValueError, match="the key 'k'"):
            decode(kind, "k", value)


def test_each_kind_of_record_has_its_own_key_in_the_bucket() -> None:
    assert [records.lease_key(7), records.state_key(7)] == ["l.7", "s.7"]
    assert [records.member_key("a.b-c_d=1"), records.drain_key("a")] == ["m.a.b-c_d=1", "drain.a"]


@pytest.mark.parametrize("name", ["", ".", "a.", ".a", "a..b", "a b", "a*", ">", "ä", "a\n", "x" * 129])
def test_a_name_that_cannot_be_part_of_a_key_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"the member name cannot be part of a key; use letters, digits"):
        records.member_key(name)
    with pytest.raises(ValueError, match=r"the member name cannot be part of a key; use letters, digits"):
        records.drain_key(name)


def test_a_name_may_have_128_characters() -> None:
    assert records.member_key("x" * 128) == "m." + "x" * 128


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_is_compact(record: records.Record) -> None:
    assert b" " not in encode(record)


@pytest.mark.parametrize("length", [*range(SHOWN - 4, SHOWN + 4), 10_000])
def test_a_record_value_in_an_error_is_cut_at_its_limit(length: int) -> None:
    for value in ("x" * length, b"x" * length, [7] * length):
        whole = repr(value)
        assert shown(value) == (whole if len(whole) <= SHOWN else whole[:SHOWN] + "…")


def test_a_member_with_the_same_settings_may_join() -> None:
    assert records.difference(CONFIG, CONFIG) is None


def test_a_member_with_another_start_may_join() -> None:
    """Only the first member uses the start. Otherwise, a deployment that computes its start could never join again."""
    assert records.difference(CONFIG, replace(CONFIG, start="2026-01-01T00:00:00+00:00")) is None


def test_a_member_without_a_name_may_join_a_cohort_of_any_name() -> None:
    assert records.difference(CONFIG, replace(CONFIG, cohort=None)) is None
    assert records.difference(CONFIG, replace(CONFIG, cohort=None, lease=20)) is not None


@pytest.mark.parametrize("name", [name for name in json.loads(encode(CONFIG)) if name not in ("version", "start")])
def test_a_differing_setting_is_named_with_both_values_and_the_remedy(name: str) -> None:
    changed: Any = {"partitions": 65, "tokens": (9,), "lease": 20}.get(name, "other")
    values = {**json.loads(encode(CONFIG)), name: changed}
    values.pop("version")
    wanted = CohortConfig(**{**values, "tokens": tuple(values["tokens"])})
    said = records.difference(CONFIG, wanted)
    assert said is not None
    assert f"{name} is {getattr(CONFIG, name)!r}, this member has {changed!r}" in said
    assert "another namespace" in said
    place = " (stream 'ORDERS', namespace 'lanes')" if name not in ("stream", "namespace") else ""
    assert f"{place}: {name} is" in said
    assert ("the bucket belongs to another cohort" in said) == (name in ("stream", "namespace"))
    assert ("delete the key 'config'" in said) == (name == "lease")
    assert ("delete the cohort's bucket" in said) == (name == "incarnation")
    assert ("divide it as before" in said) == (name in ("partitions", "choice", "detail", "tokens"))


@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        (
            "a" * 90 + "; key x",
            "a" * 90 + "; key y",
            "is …'{}; key x', this member has …'{}; key y'".format(*["a" * 14] * 2),
        ),
        ("a" * 90, "a" * 90 + "b", "is …'{}', this member has …'{}b'".format(*["a" * 20] * 2)),
        ("x" * 90, "y" * 90, "is '{}…, this member has '{}…".format("x" * 59, "y" * 59)),
        ("short", "shorn", "is 'short', this member has 'shorn'"),
        ("a" * (SHOWN - 2) + "b", "a" * (SHOWN - 2) + "c", "is '{0}b…, this member has '{0}c…".format("a" * 58)),
        ("a" * 59 + "b", "a" * 59 + "c", "is …'{0}b', this member has …'{0}c'".format("a" * 20)),
    ],
)
def test_the_difference_of_two_long_texts_is_shown(there: str, here: str, said: str) -> None:
    found, wanted = replace(CONFIG, detail=there), replace(CONFIG, detail=here)
    assert f"detail {said}. " in str(records.difference(found, wanted))


def test_a_name_differs_from_no_name_of_the_cohort() -> None:
    said = records.difference(replace(CONFIG, cohort=None), CONFIG)
    assert said is not None and "cohort is None, this member has 'billing'" in said


def test_a_member_without_a_stream_is_told_the_difference_without_a_place() -> None:
    said = records.difference(CONFIG, replace(CONFIG, stream=None, lease=20))
    assert said is not None and said.startswith("the cohort 'billing' has other settings: lease is 10")


def test_a_field_missing_from_an_earlier_version_is_no_difference() -> None:
    value = without(CONFIG, stream=..., namespace=..., lease=...)
    found = decode(CohortConfig, "config", value)
    assert (found.stream, found.namespace, found.lease) == (None, None, None)
    assert records.difference(found, CONFIG) is None
    assert decode(Heartbeat, "m.a", without(Heartbeat("n", 1, None, 3, 10), lease=...)).lease is None
    plan = PlanRecord(7, ("a",), ("a",), (), None, False, under_provisioned=True, default_consumer_target=4)
    read = decode(PlanRecord, "plan", without(plan, over_target=...))
    assert (read.under_provisioned, read.default_consumer_target) == (False, 4)


def test_the_former_code_reads_and_writes_the_records_of_plans_and_heartbeats() -> None:
    """The renamed fields keep their names in JSON. The new fields are absent in records of the former code."""
    plan = PlanRecord(7, ("a", "b"), ("a", "b"), (), 3, too_few_members=True, under_provisioned=True, rules=1)
    beat = Heartbeat("n", 2, 3, 5, 10, consumer_target=4, default_consumer_target=6, rules=1)
    read = former.decode(former.PlanRecord, "plan", encode(plan))
    assert read == former.PlanRecord(7, ("a", "b"), ("a", "b"), (), 3, under_provisioned=True)
    heard = former.decode(former.Heartbeat, "m.a", encode(beat))
    assert heard == former.Heartbeat("n", 2, 3, 5, 10)
    assert decode(PlanRecord, "plan", former.encode(read)) == replace(plan, under_provisioned=False, rules=0)
    assert decode(Heartbeat, "m.a", former.encode(heard)) == Heartbeat("n", 2, 3, 5, 10, rules=0)
