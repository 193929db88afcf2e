-- Refuse appends in a session whose triggers are off, because such messages would never have a position.
-- A session of session_replication_role = replica fires this trigger alone. The workers of a logical replication copy
-- tables with all their positions, so they are let through.
DO $do$
BEGIN
    EXECUTE format(
        $create$
        CREATE FUNCTION %1$I.lanes_log_refuse_replica() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog AS $body$
        BEGIN
            IF current_setting('session_replication_role') = 'replica' AND EXISTS (
                SELECT FROM pg_stat_get_activity(pg_backend_pid()) AS activity WHERE activity.backend_type = 'client backend'
            ) THEN
                RAISE EXCEPTION 'session_replication_role is replica, so the messages of this append would never be read'
                    USING ERRCODE = 'LN001';
            END IF;
            RETURN NULL;
        END
        $body$
        $create$,
        current_schema()
    );
END
$do$;

CREATE TRIGGER lanes_log_refuse_replica BEFORE INSERT ON lanes_log_messages
    FOR EACH STATEMENT EXECUTE FUNCTION lanes_log_refuse_replica();
ALTER TABLE lanes_log_messages ENABLE REPLICA TRIGGER lanes_log_refuse_replica;
