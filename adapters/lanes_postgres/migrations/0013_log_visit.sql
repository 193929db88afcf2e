-- Look like lanes_log_look, and read the messages of some partitions too, because each new message waits for the answer.
-- The first row has the result of the look. The messages of partition numbers[i] from position starts[i] on follow it,
-- unless they are more than `room`: the reader then chooses among them.
-- A plan for each call would cost more than its execution. The plans stay index scans when the tables grow.
CREATE FUNCTION lanes_log_visit(
    most integer, of_log integer, partitions integer, numbers integer[], starts bigint[], room integer
) RETURNS TABLE (
    done integer, ends bigint[], number integer, "position" bigint, key bytea, subject text, headers text, value bytea,
    "time" double precision
) LANGUAGE plpgsql SET search_path FROM CURRENT SET plan_cache_mode TO force_generic_plan SET enable_seqscan TO off AS $$
#variable_conflict use_column
DECLARE
    look record;
    unread bigint;
BEGIN
    SELECT * INTO look FROM lanes_log_look(most, of_log, partitions);
    SELECT sum(look.ends[wanted.number + 1] - wanted.start) INTO unread
        FROM unnest(numbers, starts) AS wanted (number, start) WHERE look.ends[wanted.number + 1] > wanted.start;
    done := look.done;
    ends := look.ends;
    RETURN NEXT;
    IF unread <= room THEN
        -- Another session may have given positions since the look, so the rows are limited again.
        RETURN QUERY SELECT
            NULL::integer, NULL::bigint[], wanted.number, found.position, found.key, found.subject, found.headers,
            found.value, extract(epoch FROM found.time)::double precision
            FROM unnest(numbers, starts) AS wanted (number, start) CROSS JOIN LATERAL (
                SELECT entry.position + message.index AS position, message.key, message.subject,
                    message.headers::text AS headers, message.value, message.time
                FROM (
                    SELECT position, batch FROM lanes_log_entries WHERE log = of_log AND partition = wanted.number
                    AND position >= coalesce((
                        SELECT max(position) FROM lanes_log_entries
                        WHERE log = of_log AND partition = wanted.number AND position <= wanted.start
                    ), 0) ORDER BY position
                ) AS entry CROSS JOIN LATERAL (
                    SELECT index, key, subject, headers, value, time FROM lanes_log_messages
                    WHERE batch = entry.batch AND index >= wanted.start - entry.position ORDER BY index
                ) AS message LIMIT room
            ) AS found WHERE look.ends[wanted.number + 1] > wanted.start
            ORDER BY wanted.number, found.position LIMIT room;
    END IF;
END
$$;

-- The users of lanes_log_look get the same right here.
DO $$
DECLARE
    granted record;
BEGIN
    FOR granted IN
        SELECT CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END AS name
        FROM pg_proc, aclexplode(proacl)
        WHERE pg_proc.oid = 'lanes_log_look(integer, integer, integer)'::regprocedure AND grantee <> proowner
    LOOP
        EXECUTE format(
            'GRANT EXECUTE ON FUNCTION lanes_log_visit(integer, integer, integer, integer[], bigint[], integer) TO %s',
            granted.name
        );
    END LOOP;
END $$;
