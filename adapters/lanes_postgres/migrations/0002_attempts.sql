-- Messages that have failed and are not finished. state: 'held' = waits for a retry, 'blocked' = waits for unblock
-- or park, 'parking' = the dead letter is not confirmed. epoch: as in lanes_positions.
CREATE TABLE lanes_attempts (
    topic integer NOT NULL,
    partition bigint NOT NULL,
    position bigint NOT NULL,
    attempts integer NOT NULL CHECK (attempts > 0),
    state text NOT NULL CHECK (state IN ('held', 'blocked', 'parking')),
    error_type text NOT NULL,
    since timestamptz NOT NULL DEFAULT clock_timestamp(),
    epoch bigint,
    PRIMARY KEY (topic, partition, position)
);
