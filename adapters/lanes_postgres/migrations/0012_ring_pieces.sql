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

-- Every member reads the pieces, also one without ranges. The users of the states therefore get the same rights here.
DO $$
DECLARE
    granted record;
BEGIN
    FOR granted IN
        SELECT privilege_type, CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END AS name
        FROM pg_class, aclexplode(relacl) WHERE pg_class.oid = 'lanes_states'::regclass AND grantee <> relowner
    LOOP
        EXECUTE format('GRANT %s ON lanes_ring_pieces, lanes_ring_assignments TO %s', granted.privilege_type, granted.name);
        IF granted.privilege_type = 'UPDATE' THEN
            EXECUTE format('GRANT USAGE ON SEQUENCE lanes_ring_epochs TO %s', granted.name);
        END IF;
    END LOOP;
END $$;
