-- The consumer in the map of ranges as which a member runs; NULL = a member without ranges.
ALTER TABLE lanes_subscription_members ADD COLUMN consumer text;

-- The consumers as which members have run. An owner in the map without a row here may be misspelt.
CREATE TABLE lanes_ring_consumers (
    log integer NOT NULL,
    subscription text NOT NULL,
    consumer text NOT NULL,
    begun timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (log, subscription, consumer)
);

-- Every member with ranges writes its name. The users of the members therefore get the same rights here.
DO $$
DECLARE
    granted record;
BEGIN
    FOR granted IN
        SELECT privilege_type, CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END AS name
        FROM pg_class, aclexplode(relacl)
        WHERE pg_class.oid = 'lanes_subscription_members'::regclass AND grantee <> relowner
    LOOP
        EXECUTE format('GRANT %s ON lanes_ring_consumers TO %s', granted.privilege_type, granted.name);
    END LOOP;
END $$;
