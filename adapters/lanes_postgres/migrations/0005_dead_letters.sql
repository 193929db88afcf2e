-- Dead letters. box: name of the dead letters. record: all fields but the value, as JSON in ASCII; NULL = not written by
-- lanes. A row that was disposed of keeps its id without its value.
CREATE TABLE lanes_dead_letters (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    box text NOT NULL,
    id text NOT NULL,
    record bytea,
    value bytea NOT NULL,
    disposition text CHECK (disposition IN ('replayed', 'dropped')),
    written timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE INDEX lanes_dead_letters_of ON lanes_dead_letters (box, id);
