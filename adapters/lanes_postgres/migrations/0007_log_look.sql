-- Give positions to visible batches like lanes_log_sequence, and return the next position of each partition of a log.
-- A reader asks once for both, because a message waits for the answer.
-- Without a hole before and after, a crash that undoes the call changes no position: the next call finds the same
-- tickets in the same order. Only then does the COMMIT not wait for the disk. What a reader stores later about these
-- positions, in this database, is durable only together with them.
CREATE FUNCTION lanes_log_look(most integer, of_log integer, partitions integer, OUT done integer, OUT ends bigint[])
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    done := lanes_log_sequence(most);
    IF done > 0 AND (
        SELECT bool_and(holes = '{}') FROM (SELECT holes FROM lanes_log_sequencings ORDER BY id DESC LIMIT 2) AS last
    ) THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    ends := ARRAY(
        SELECT coalesce((
            SELECT position + run FROM lanes_log_entries
            WHERE log = of_log AND partition = number ORDER BY position DESC LIMIT 1
        ), 0) FROM generate_series(0, partitions - 1) AS number ORDER BY number
    );
END
$$;
