-- Logs over tables of the user. relation: the table, with its schema; NULL = the log has its own messages.
ALTER TABLE lanes_logs ADD COLUMN relation text;

-- Make a log over a table: a trigger that gives each inserted row its place in the order of the COMMITs, and a view by
-- which the rows are read. Idempotent. The trigger acts with the rights of the caller of this function, so that the
-- users who insert rows need no right in this schema.
CREATE FUNCTION lanes_log_over(
    log_name text, of_table regclass, log_partitions integer,
    id name, key name, value name, "time" name, subject name, headers name
) RETURNS integer LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    here CONSTANT text := current_schema();
    found lanes_logs;
    relation_name text;
    column_name name;
    id_number smallint;
    key_bytes text;
    place text;
    rest text;
BEGIN
    SELECT format('%I.%I', nspname, relname) INTO relation_name
        FROM pg_class JOIN pg_namespace AS space ON space.oid = relnamespace WHERE pg_class.oid = of_table;
    FOREACH column_name IN ARRAY ARRAY[id, key, value, "time", subject, headers] LOOP
        IF column_name IS NOT NULL AND NOT EXISTS (
            SELECT FROM pg_attribute WHERE attrelid = of_table AND attname = column_name AND attnum > 0 AND NOT attisdropped
        ) THEN
            RAISE EXCEPTION 'table % has no column %; name its columns by Columns', relation_name, column_name
                USING ERRCODE = 'LN002';
        END IF;
    END LOOP;
    SELECT attnum INTO id_number FROM pg_attribute
        WHERE attrelid = of_table AND attname = id AND atttypid IN ('bigint'::regtype, 'integer'::regtype);
    IF id_number IS NULL OR NOT EXISTS (
        SELECT FROM pg_index WHERE indrelid = of_table AND indisunique AND indisvalid AND indpred IS NULL
            AND indnkeyatts = 1 AND indkey[0] = id_number
    ) THEN
        RAISE EXCEPTION 'column % of table % is no unique number; add a column such as lanes_id bigint GENERATED ALWAYS AS IDENTITY UNIQUE, and name it by Columns(id=…)',
            id, relation_name USING ERRCODE = 'LN002';
    END IF;
    IF NOT EXISTS (
        SELECT FROM pg_attribute WHERE attrelid = of_table AND attname = "time"
            AND atttypid = 'timestamptz'::regtype
    ) THEN
        RAISE EXCEPTION 'column % of table % is no timestamptz; name another one by Columns(time=…)', "time", relation_name
            USING ERRCODE = 'LN002';
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

    key_bytes := lanes_log_bytes(of_table, key);
    -- The messages of a key are in one partition. The hash is of four bytes of SHA-256.
    place := CASE WHEN key IS NULL THEN format('NEW.%I %% %s', id, found.partitions) ELSE format(
        'CASE WHEN NEW.%1$I IS NULL THEN NEW.%2$I %% %3$s ELSE '
        '(''x'' || encode(substr(sha256(%4$s), 1, 4), ''hex''))::bit(32)::bigint %% %3$s END',
        key, id, found.partitions, replace(key_bytes, '$', 'NEW.')
    ) END;
    EXECUTE format(
        $create$
        CREATE OR REPLACE FUNCTION %1$I.lanes_log_ticket_%2$s() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
        SET search_path = pg_catalog, pg_temp AS $body$
        BEGIN
            INSERT INTO %1$I.lanes_log_pending (log, partition, batch, run)
                VALUES (%2$s, abs(%3$s), NEW.%4$I, 1);
            RETURN NULL;
        END
        $body$
        $create$,
        here, found.id, place, id
    );
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
    EXECUTE format(
        'CREATE OR REPLACE VIEW %1$I.lanes_log_over_%2$s AS SELECT %3$I AS batch, 0 AS index, %2$s AS log, '
        '%4$s AS key, coalesce(%5$s, '''') AS value, %6$I AS time, %7$s FROM %8$s',
        here, found.id, id, CASE WHEN key IS NULL THEN 'NULL::bytea' ELSE replace(key_bytes, '$', '') END,
        replace(lanes_log_bytes(of_table, value), '$', ''), "time", rest, relation_name
    );
    RETURN found.id;
END
$$;

-- The expression of the bytes of a column; $ stands for what precedes the column.
CREATE FUNCTION lanes_log_bytes(of_table regclass, named name) RETURNS text LANGUAGE sql STABLE
SET search_path = pg_catalog AS $$
    SELECT CASE atttypid WHEN 'bytea'::regtype THEN format('$%I', named)
        ELSE format('convert_to($%I::text, ''UTF8'')', named) END
    FROM pg_attribute WHERE attrelid = of_table AND attname = named
$$;
