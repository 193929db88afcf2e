"""A held lease knows its next step, its revision and its expiry, also after lost and late writes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lanes.core.cohort.held_lease import READ, REST, WRITE, HeldLease

TTL = 9.0
MARGIN = 2.0

STEPS = st.lists(
    st.tuples(st.sampled_from(["demand", "found", "renewed", "refused", "unknown"]), st.integers(1, 4)), max_size=12
)


@given(STEPS)
def test_a_held_lease_knows_its_revision_and_its_deadline_after_any_writes(steps: list[tuple[str, int]]) -> None:
    held = HeldLease("n", 3, 100.0, ttl=TTL, margin=MARGIN)
    revision, expires, renew_at, step = 3, 100.0 + TTL - MARGIN, 100.0 + TTL / 3, REST
    unsure: float | None = None
    for now, (name, number) in enumerate(steps, 101):
        if name == "found":
            if number != revision and unsure is not None:
                # The write without an answer was applied.
                expires, unsure = max(expires, unsure + TTL - MARGIN), None
            held.found(number)
            revision, step = number, WRITE
        elif name == "renewed":
            held.renewed(number, now)
            revision, step, unsure = number, REST, None
            expires, renew_at = max(expires, now + TTL - MARGIN), now + TTL / 3
        elif name == "unknown":
            held.unknown(now)
            step = READ
            unsure = now if unsure is None else unsure  # the first such write may be the one that is applied
        else:
            getattr(held, name)()
            step = READ
        assert (held.nonce, held.revision, held.expires, held.renew_at) == ("n", revision, expires, renew_at)
        assert held.step == step
        for time in (now, renew_at - 0.1, renew_at):
            assert held.due(time) is (step != REST or time >= renew_at)
