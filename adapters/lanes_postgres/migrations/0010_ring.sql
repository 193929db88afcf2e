-- The maps of ring ranges: which consumer of a group owns which slots of a log. A group is a subscription of the log.
-- The map follows from its rows in the order of their numbers. No row is changed or deleted. Both ends are inclusive.
CREATE TABLE lanes_ring_assignments (
    log integer NOT NULL,
    subscription text NOT NULL,
    number integer NOT NULL,
    lo integer NOT NULL CHECK (lo >= 0),
    hi integer NOT NULL CHECK (hi BETWEEN lo AND 65535),
    consumer text NOT NULL,
    time timestamptz NOT NULL DEFAULT clock_timestamp(),
    login text NOT NULL DEFAULT session_user,
    PRIMARY KEY (log, subscription, number)
);
