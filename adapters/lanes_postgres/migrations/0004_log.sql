-- Logs: messages with an order of their own. Names are looked up in the schema that search_path names first.

-- One row for each log. incarnation: identity of this creation of the log.
CREATE TABLE lanes_logs (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE,
    partitions integer NOT NULL CHECK (partitions BETWEEN 1 AND 65536),
    incarnation text NOT NULL DEFAULT gen_random_uuid()::text,
    created timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE SEQUENCE lanes_log_batches;

-- The messages of one partition in one call of append are a batch. run: number of messages of the batch, in its first
-- row only. slot: ring slot of the key. headers: pairs of a name and a value. A value is a text, or an object whose
-- member "base64" has the bytes.
CREATE TABLE lanes_log_messages (
    batch bigint NOT NULL,
    index integer NOT NULL,
    log integer NOT NULL,
    partition integer NOT NULL,
    run integer,
    slot integer,
    time timestamptz NOT NULL,
    key bytea,
    subject text NOT NULL,
    headers jsonb,
    value bytea NOT NULL,
    PRIMARY KEY (batch, index)
);

-- Batches that have no position yet. Each transaction takes its tickets at its COMMIT, so a transaction that waited for
-- a row lock of another transaction has the higher ticket. The sequencer deletes the rows.
CREATE TABLE lanes_log_pending (
    ticket bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    log integer NOT NULL,
    partition integer NOT NULL,
    batch bigint NOT NULL,
    run integer NOT NULL
);

-- The position of the first message of each batch. The positions of a partition begin at 0 and have no gaps. A trim
-- keeps the last row of each partition, because the next position follows from that row.
CREATE TABLE lanes_log_entries (
    log integer NOT NULL,
    partition integer NOT NULL,
    position bigint NOT NULL,
    batch bigint NOT NULL,
    run integer NOT NULL,
    PRIMARY KEY (log, partition, position)
);

-- The progress of the sequencer; the row with the highest id counts. holes: tickets up to the highest ticket that were
-- not visible, and may become visible. hole_xids: for each hole, a transaction id above that of its transaction.
-- No row is updated: while a long transaction runs, each read of an updated row would visit all of its versions.
CREATE TABLE lanes_log_sequencings (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    highest bigint NOT NULL,
    holes bigint[] NOT NULL,
    hole_xids bigint[] NOT NULL
);

-- Take a ticket for a batch at the COMMIT. The trigger locks nothing, so no COMMIT waits for another one.
-- The qualified name saves a search_path, which would cost time at each COMMIT.
DO $do$
BEGIN
    EXECUTE format(
        $create$
        CREATE FUNCTION %1$I.lanes_log_ticket() RETURNS trigger LANGUAGE plpgsql AS $body$
        BEGIN
            INSERT INTO %1$I.lanes_log_pending (log, partition, batch, run)
                VALUES (NEW.log, NEW.partition, NEW.batch, NEW.run);
            RETURN NULL;
        END
        $body$
        $create$,
        current_schema()
    );
END
$do$;

CREATE CONSTRAINT TRIGGER lanes_log_ticket AFTER INSERT ON lanes_log_messages DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (NEW.run IS NOT NULL) EXECUTE FUNCTION lanes_log_ticket();

-- Give positions to visible batches, in order of their tickets, at most `most` at once.
-- Returns the number of batches; NULL = another session is at it.
-- A batch that becomes visible late has a ticket below `highest`. Such a ticket is a hole, and gets the next position.
-- Its transaction cannot precede the batches that have positions already, because they did not wait for its COMMIT.
CREATE FUNCTION lanes_log_sequence(most integer) RETURNS integer LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    last lanes_log_sequencings;
    horizon bigint;
    tickets bigint[];
    new_highest bigint;
    kept_holes bigint[];
    kept_xids bigint[];
    mine bigint;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'lanes_log_sequence needs READ COMMITTED' USING ERRCODE = 'invalid_transaction_state';
    END IF;
    IF NOT pg_try_advisory_xact_lock(hashtextextended('lanes_log_sequence', 'lanes_log_pending'::regclass::oid::bigint)) THEN
        RETURN NULL;
    END IF;
    -- Each statement from here on sees all that the former holder of the lock committed.
    SELECT * INTO last FROM lanes_log_sequencings ORDER BY id DESC LIMIT 1;
    last.highest := coalesce(last.highest, 0);
    -- Transactions below the horizon have ended, so the next statement sees their tickets, or they were rolled back.
    horizon := pg_snapshot_xmin(pg_current_snapshot())::text::bigint;
    SELECT array_agg(ticket ORDER BY ticket) INTO tickets FROM (
        (SELECT ticket FROM lanes_log_pending WHERE ticket > last.highest ORDER BY ticket LIMIT most)
        UNION ALL
        SELECT ticket FROM lanes_log_pending WHERE ticket = ANY (last.holes)
    ) AS visible;
    IF tickets IS NULL AND (last.id IS NULL OR NOT EXISTS (SELECT FROM unnest(last.hole_xids) AS xid WHERE xid <= horizon)) THEN
        RETURN 0;
    END IF;
    new_highest := greatest(last.highest, (SELECT max(ticket) FROM unnest(tickets) AS ticket));
    SELECT coalesce(array_agg(ticket), '{}'), coalesce(array_agg(xid), '{}') INTO kept_holes, kept_xids FROM (
        SELECT ticket, xid FROM unnest(last.holes, last.hole_xids) AS hole (ticket, xid) WHERE xid > horizon
        UNION ALL
        SELECT ticket, pg_current_xact_id()::text::bigint FROM generate_series(last.highest + 1, new_highest) AS ticket
    ) AS hole WHERE NOT EXISTS (SELECT FROM unnest(tickets) AS seen WHERE seen = ticket);
    WITH moved AS (
        DELETE FROM lanes_log_pending WHERE ticket = ANY (tickets) RETURNING ticket, log, partition, batch, run
    ), placed AS (
        SELECT *, sum(run) OVER (PARTITION BY log, partition ORDER BY ticket) - run AS before FROM moved
    ), ends AS MATERIALIZED (
        SELECT log, partition, coalesce((
            SELECT position + entry.run FROM lanes_log_entries AS entry
            WHERE entry.log = each.log AND entry.partition = each.partition ORDER BY position DESC LIMIT 1
        ), 0) AS next FROM (SELECT DISTINCT log, partition FROM moved) AS each
    )
    INSERT INTO lanes_log_entries (log, partition, position, batch, run)
        SELECT log, partition, next + before, batch, run FROM placed JOIN ends USING (log, partition);
    INSERT INTO lanes_log_sequencings (highest, holes, hole_xids) VALUES (new_highest, kept_holes, kept_xids)
        RETURNING id INTO mine;
    DELETE FROM lanes_log_sequencings WHERE id = mine - 2;
    -- One transaction at a time notifies, so the lock that a NOTIFY takes at its COMMIT delays no appender.
    PERFORM pg_notify('lanes_log_' || 'lanes_log_pending'::regclass::oid, '');
    RETURN coalesce(array_length(tickets, 1), 0);
END
$$;

-- The subscriptions of each log. starts: the first position of each partition, decided once.
CREATE TABLE lanes_subscriptions (
    log integer NOT NULL,
    name text NOT NULL,
    start text NOT NULL,
    starts bigint[] NOT NULL,
    created timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (log, name)
);

-- The running members of a subscription. waits: whether the member waits for partitions that others own.
CREATE TABLE lanes_subscription_members (
    log integer NOT NULL,
    subscription text NOT NULL,
    member text NOT NULL,
    owned integer NOT NULL,
    waits boolean NOT NULL,
    seen timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (log, subscription, member)
);
