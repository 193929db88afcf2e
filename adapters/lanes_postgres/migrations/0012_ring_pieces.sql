-- Whether the members of a subscription own ranges of slots; decided with the start.
ALTER TABLE lanes_subscriptions ADD COLUMN ring boolean NOT NULL DEFAULT false;

-- The pieces of each partition of a log, under ranges. slots: NULL = the messages without a key, which any consumer may
-- own. consumer: the consumer that the map names; NULL = nobody. epoch: number of the last acquisition; 0 = none.
-- parent, parent_epoch: the piece that this one was split from, and the epoch of its owner at the split. Until they are
-- NULL, the piece is not acquired, because the former owner may still handle its messages. floor, completed: as in
-- lanes_states. docs/model/ranges.md has the protocol.
-- Rows are often updated. With free room in each page, an update does not change the index.
CREATE TABLE lanes_ring_pieces (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    log integer NOT NULL,
    subscription text NOT NULL,
    partition integer NOT NULL,
    slots int4multirange,
    consumer text,
    epoch bigint NOT NULL DEFAULT 0,
    parent bigint,
    parent_epoch bigint,
    floor bigint NOT NULL,
    completed bigint[] NOT NULL DEFAULT '{}',
    stored timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 50);

CREATE INDEX lanes_ring_pieces_of ON lanes_ring_pieces (log, subscription, partition);

-- One sequence for all pieces: a key has a higher epoch in each piece that it moves to.
CREATE SEQUENCE lanes_ring_epochs;
