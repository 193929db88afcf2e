-- The position of a subscription in each partition of a source, and the epoch of its owner. Each acquisition takes the
-- next number of the column epoch, which never repeats, even after a row was deleted. completed: the finished positions
-- above floor, as the starts and ends of half-open runs.
-- Rows are often updated. With free room in each page, an update does not change the index.
CREATE TABLE lanes_states (
    subscription text NOT NULL,
    source text NOT NULL,
    partition bigint NOT NULL,
    incarnation text NOT NULL,
    epoch bigint GENERATED ALWAYS AS IDENTITY,
    floor bigint NOT NULL,
    completed bigint[] NOT NULL DEFAULT '{}',
    stored timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (subscription, source, partition, incarnation)
) WITH (fillfactor = 50);
