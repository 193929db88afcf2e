-- The positions of messages that have had their effect. Names are looked up in the schema that search_path names first.

-- One row for each topic of each subscription. incarnation: id of the creation of the topic; '' = unknown.
CREATE TABLE lanes_topics (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    subscription text NOT NULL,
    topic text NOT NULL,
    incarnation text NOT NULL,
    UNIQUE (subscription, topic)
);

-- The last message of a key that had its effect. key: a digest of 32 bytes, or the position of a single message as 8
-- bytes. epoch: the highest fencing token that wrote the row; NULL = no token, or deleted by unfence.
-- Rows are often updated. With free room in each page, an update does not change the index.
CREATE TABLE lanes_positions (
    topic integer NOT NULL,
    partition bigint NOT NULL,
    key bytea NOT NULL,
    position bigint NOT NULL,
    epoch bigint,
    PRIMARY KEY (topic, partition, key)
) WITH (fillfactor = 70);

-- Dead letters that were replayed, by the position of their message.
CREATE TABLE lanes_letters (
    topic integer NOT NULL,
    partition bigint NOT NULL,
    position bigint NOT NULL,
    PRIMARY KEY (topic, partition, position)
);
