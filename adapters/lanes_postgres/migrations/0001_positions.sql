-- Which messages have had their effect. Names are looked up in the schema that search_path names first.

-- One row for each topic of each subscription. incarnation: which making of the topic; '' = not known.
CREATE TABLE lanes_topics (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    subscription text NOT NULL,
    topic text NOT NULL,
    incarnation text NOT NULL,
    UNIQUE (subscription, topic)
);

-- The last message of a key that had its effect. key: a digest of 32 bytes; of 8 bytes, the position of a message that
-- stands for itself. epoch: the highest fencing token that wrote the row; NULL = none did.
-- Rows are updated in place, again and again: the room in a page that this leaves spares the index.
CREATE TABLE lanes_positions (
    topic integer NOT NULL,
    partition bigint NOT NULL,
    key bytea NOT NULL,
    position bigint NOT NULL,
    epoch bigint,
    PRIMARY KEY (topic, partition, key)
) WITH (fillfactor = 70);

-- Dead letters that were handled after all, by the position of their message.
CREATE TABLE lanes_letters (
    topic integer NOT NULL,
    partition bigint NOT NULL,
    position bigint NOT NULL,
    PRIMARY KEY (topic, partition, position)
);
