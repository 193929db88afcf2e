-- Logs over tables after an upgrade, or after a change of an owner. made: version of the tables whose lanes_log_over made
-- the trigger and the view of a log over a table; NULL = an older one than 11, or the log has its own messages.
ALTER TABLE lanes_logs ADD COLUMN made integer;

-- The owners of a table and of its partitions that have partitions.
CREATE FUNCTION lanes_log_owners(of_table regclass) RETURNS SETOF oid LANGUAGE sql STABLE
SET search_path = pg_catalog AS $$
    SELECT DISTINCT relowner FROM pg_class
        WHERE pg_class.oid = of_table
            OR pg_class.oid IN (SELECT relid FROM pg_partition_tree(of_table) WHERE NOT isleaf)
$$;

-- The users who may use the function of the trigger of a log, and own no such table any more.
CREATE FUNCTION lanes_log_former_owners(log_id integer) RETURNS SETOF oid LANGUAGE sql STABLE
SET search_path FROM CURRENT AS $$
    SELECT DISTINCT acl.grantee FROM lanes_logs AS log JOIN pg_proc AS function
        ON function.oid = to_regproc(format('%I.lanes_log_ticket_%s', current_schema(), log.id)),
        aclexplode(function.proacl) AS acl
        WHERE log.id = log_id AND acl.grantee <> 0 AND acl.grantee <> function.proowner
            AND acl.grantee NOT IN (SELECT lanes_log_owners(to_regclass(log.relation)))
$$;

-- Make a log over a table: a trigger that gives each inserted row its place in the order of the COMMITs, and a view by
-- which the rows are read. Idempotent. The trigger acts with the rights of the caller of this function, so that the
-- users who insert rows need no right in this schema.
CREATE OR REPLACE FUNCTION lanes_log_over(
    log_name text, of_table regclass, log_partitions integer,
    id name, key name, value name, "time" name, subject name, headers name
) RETURNS integer LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    here CONSTANT text := current_schema();
    found lanes_logs;
    relation_name text;
    other name;
    column_name name;
    column_type regtype;
    id_number smallint;
    place text;
    rest text;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'this transaction is %; execute lanes_log_over in a transaction of READ COMMITTED',
            upper(current_setting('transaction_isolation')) USING ERRCODE = 'LN002';
    END IF;
    -- Two calls at once would replace the same function and view. Each later statement sees what the first call made.
    PERFORM pg_advisory_xact_lock(hashtextextended('lanes_log_over', 'lanes_logs'::regclass::oid::bigint));
    SELECT format('%I.%I', nspname, relname) INTO relation_name
        FROM pg_class JOIN pg_namespace AS space ON space.oid = relnamespace WHERE pg_class.oid = of_table;
    FOREACH column_name IN ARRAY ARRAY[id, key, value, "time", subject, headers] LOOP
        IF column_name IS NOT NULL AND lanes_log_type(of_table, column_name) IS NULL THEN
            RAISE EXCEPTION 'table % has no column %; name its columns by Columns', relation_name, column_name
                USING ERRCODE = 'LN002';
        END IF;
    END LOOP;
    SELECT attnum INTO id_number FROM pg_attribute
        WHERE attrelid = of_table AND attname = id AND attnotnull AND atttypid IN ('bigint'::regtype, 'integer'::regtype);
    IF id_number IS NULL OR NOT EXISTS (
        SELECT FROM pg_index WHERE indrelid = of_table AND indisunique AND indisvalid AND indpred IS NULL
            AND indnkeyatts = 1 AND indkey[0] = id_number
    ) THEN
        RAISE EXCEPTION 'column % of table % is no unique number that is NOT NULL; add a column such as lanes_id bigint GENERATED ALWAYS AS IDENTITY UNIQUE, and name it by Columns(id=…)',
            id, relation_name USING ERRCODE = 'LN002';
    END IF;
    IF lanes_log_type(of_table, "time") <> 'timestamptz'::regtype THEN
        RAISE EXCEPTION 'column % of table % is no timestamptz; name another one by Columns(time=…)', "time", relation_name
            USING ERRCODE = 'LN002';
    END IF;
    -- The text of a date or a float depends on settings of each session, so one key would be in two partitions.
    column_type := lanes_log_type(of_table, key);
    IF column_type NOT IN (
        'text'::regtype, 'varchar'::regtype, 'bpchar'::regtype, 'name'::regtype, 'bytea'::regtype, 'uuid'::regtype,
        'smallint'::regtype, 'integer'::regtype, 'bigint'::regtype, 'numeric'::regtype, 'boolean'::regtype,
        'json'::regtype, 'jsonb'::regtype, 'inet'::regtype, 'cidr'::regtype, 'macaddr'::regtype
    ) AND NOT EXISTS (
        SELECT FROM pg_type WHERE pg_type.oid = column_type AND (typtype = 'e' OR typname = 'citext')
    ) THEN
        RAISE EXCEPTION 'column % of table % is a %, whose text depends on settings of the session; name a column of type text or bigint by Columns(key=…)',
            key, relation_name, column_type USING ERRCODE = 'LN002';
    END IF;
    -- A text that is no JSON would fail each read of its partition.
    column_type := lanes_log_type(of_table, headers);
    IF column_type <> 'jsonb'::regtype THEN
        RAISE EXCEPTION 'column % of table % is a %; headers need jsonb. Change the type of the column, or omit Columns(headers=…)',
            headers, relation_name, column_type USING ERRCODE = 'LN002';
    END IF;
    INSERT INTO lanes_logs (name, partitions, relation) VALUES (log_name, log_partitions, relation_name)
        ON CONFLICT (name) DO NOTHING;
    SELECT * INTO found FROM lanes_logs WHERE name = log_name;
    IF found.relation IS DISTINCT FROM relation_name OR found.partitions <> log_partitions THEN
        RAISE EXCEPTION 'log % exists with % partitions over %; use another name', log_name, found.partitions,
            coalesce(found.relation, 'no table') USING ERRCODE = 'LN002';
    END IF;
    IF EXISTS (
        SELECT FROM pg_trigger WHERE tgrelid = of_table AND tgname = 'lanes_log_ticket'
            AND tgfoid <> coalesce(to_regproc(format('%I.lanes_log_ticket_%s', here, found.id))::oid, 0)
    ) THEN
        RAISE EXCEPTION 'table % is read by another log already; use that one', relation_name USING ERRCODE = 'LN002';
    END IF;

    -- The messages of a key are in one partition. The hash is of four bytes of SHA-256.
    place := CASE WHEN key IS NULL THEN format('NEW.%I %% %s', id, found.partitions) ELSE format(
        'CASE WHEN NEW.%1$I IS NULL THEN NEW.%2$I %% %3$s ELSE '
        '(''x'' || encode(substr(sha256(%4$s), 1, 4), ''hex''))::bit(32)::bigint %% %3$s END',
        key, id, found.partitions, lanes_log_bytes(of_table, key, 'NEW.')
    ) END;
    -- The name of a column may contain any quote.
    EXECUTE format(
        'CREATE OR REPLACE FUNCTION %I.lanes_log_ticket_%s() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER '
        'SET search_path = pg_catalog, pg_temp AS %L',
        here, found.id, format(
            $body$
            BEGIN
                IF current_setting('synchronous_commit') = 'off' THEN
                    PERFORM set_config('synchronous_commit', 'local', true);
                END IF;
                INSERT INTO %1$I.lanes_log_pending (log, partition, batch, run)
                    VALUES (%2$s, abs(%3$s), NEW.%4$I, 1);
                RETURN NULL;
            END
            $body$,
            here, found.id, place, id
        )
    );
    -- A trigger fires without a right on its function. With the right, any user could forge tickets. An owner may insert
    -- rows anyway, and needs the right to add a partition, which copies the trigger.
    EXECUTE format('REVOKE EXECUTE ON FUNCTION %I.lanes_log_ticket_%s() FROM PUBLIC', here, found.id);
    FOR other IN SELECT pg_get_userbyid(role) FROM lanes_log_former_owners(found.id) AS role LOOP
        EXECUTE format('REVOKE EXECUTE ON FUNCTION %I.lanes_log_ticket_%s() FROM %I', here, found.id, other);
    END LOOP;
    FOR other IN SELECT pg_get_userbyid(role) FROM lanes_log_owners(of_table) AS role LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %I.lanes_log_ticket_%s() TO %I', here, found.id, other);
    END LOOP;
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = of_table AND tgname = 'lanes_log_ticket') THEN
        EXECUTE format(
            'CREATE CONSTRAINT TRIGGER lanes_log_ticket AFTER INSERT ON %s DEFERRABLE INITIALLY DEFERRED '
            'FOR EACH ROW EXECUTE FUNCTION %I.lanes_log_ticket_%s()', relation_name, here, found.id
        );
        EXECUTE format(
            'CREATE OR REPLACE TRIGGER lanes_log_refuse_replica BEFORE INSERT ON %s '
            'FOR EACH STATEMENT EXECUTE FUNCTION %I.lanes_log_refuse_replica()', relation_name, here
        );
        EXECUTE format('ALTER TABLE %s ENABLE REPLICA TRIGGER lanes_log_refuse_replica', relation_name);
    END IF;
    rest := format(
        '%s AS subject, %s AS headers',
        CASE WHEN subject IS NULL THEN quote_literal(log_name) ELSE format('coalesce(%I::text, %L)', subject, log_name) END,
        CASE WHEN headers IS NULL THEN 'NULL::jsonb' ELSE format(
            '(SELECT jsonb_agg(jsonb_build_array(pair.key, coalesce(pair.value, ''''))) '
            'FROM jsonb_each_text(CASE WHEN jsonb_typeof(%1$I::jsonb) = ''object'' THEN %1$I::jsonb END) AS pair)', headers
        ) END
    );
    -- A view of two relations cannot be written, so a GRANT on all tables of the schema gives no right on the rows.
    EXECUTE format(
        'CREATE OR REPLACE VIEW %1$I.lanes_log_over_%2$s AS SELECT %3$I AS batch, 0 AS index, %2$s AS log, '
        '%4$s AS key, coalesce(%5$s, '''') AS value, %6$I AS time, %7$s FROM %8$s CROSS JOIN (SELECT) AS nothing',
        here, found.id, id, CASE WHEN key IS NULL THEN 'NULL::bytea' ELSE lanes_log_bytes(of_table, key, '') END,
        lanes_log_bytes(of_table, value, ''), "time", rest, relation_name
    );
    UPDATE lanes_logs SET made = 11 WHERE lanes_logs.id = found.id AND made IS DISTINCT FROM 11;
    RETURN found.id;
END
$$;

-- Make the triggers and the views of the existing logs anew. The columns of a log are those that its view reads. A log
-- of another owner stays as it is, and so does one whose columns are refused today. Its `made` stays NULL, which the
-- start of a consumer and the doctor report.
DO $do$
DECLARE
    each record;
    of_table regclass;
    entries text[];
    numbers integer[];
    names name[];
    former CONSTANT text := current_setting('lock_timeout');
BEGIN
    FOR each IN SELECT id, name, partitions, relation FROM lanes_logs WHERE relation IS NOT NULL LOOP
        BEGIN
            -- A transaction of a user that holds the view or the table, and waits for a table of this schema, goes on.
            PERFORM set_config('lock_timeout', '300ms', true);
            of_table := to_regclass(each.relation);
            SELECT regexp_split_to_array(ev_action::text, '\{TARGETENTRY ') INTO entries FROM pg_rewrite
                WHERE ev_class = to_regclass(format('%I.lanes_log_over_%s', current_schema(), each.id));
            SELECT array_agg(substring(entries[place] FROM ':varattno (\d+)')::integer ORDER BY place) INTO numbers
                FROM unnest('{2,5,6,7,8}'::integer[], '{batch,key,value,time,subject}'::text[]) AS entry (place, name)
                WHERE position(format(':resname %s ', entry.name) IN entries[place]) > 0;
            -- The headers are read in a query of their own.
            numbers := numbers || substring(
                array_to_string(entries[9:], ' ') FROM ':varattno (\d+)[^{}]*:varlevelsup 1'
            )::integer;
            IF array_length(numbers, 1) = 6 THEN
                names := ARRAY(
                    SELECT attname FROM unnest(numbers) WITH ORDINALITY AS column_of (number, place)
                    LEFT JOIN pg_attribute ON attrelid = of_table AND attnum = number ORDER BY place
                );
                PERFORM lanes_log_over(
                    each.name, of_table, each.partitions, names[1], names[2], names[3], names[4], names[5], names[6]
                );
            END IF;
        EXCEPTION WHEN OTHERS THEN
            NULL;
        END;
    END LOOP;
    PERFORM set_config('lock_timeout', former, true);
END
$do$;
