-- The tables of the inbox. Every *_at column is in nanoseconds since 1970-01-01 UTC.
-- Names and first columns are a contract with operators and their queries; later columns are ours.

-- One row for each message whose effect is durable. The rowid is the order of the commits: ids are only ever added at its
-- end and dropped from its start, so pruning is a range delete and the number of rows is max - min + 1.
CREATE TABLE processed_ids (
    id           TEXT    NOT NULL,
    stream_seq   INTEGER NOT NULL,
    digest       BLOB    NOT NULL,
    processed_at INTEGER NOT NULL
) STRICT;
CREATE UNIQUE INDEX processed_ids_id ON processed_ids (id);

-- The built-in handler's record of every order. No unique index here: applying once is the inbox's work, and a second
-- index would cost a random page for every order.
CREATE TABLE orders (
    id           TEXT    NOT NULL,
    subject      TEXT    NOT NULL,
    stream_seq   INTEGER NOT NULL,
    published_at INTEGER NOT NULL,
    payload      BLOB    NOT NULL
) STRICT;

-- Messages that could not be applied, whole. The same message is never buried twice; another message under the same id is.
CREATE TABLE dead_letters (
    id         TEXT    NOT NULL,
    subject    TEXT    NOT NULL,
    stream_seq INTEGER NOT NULL,
    delivered  INTEGER NOT NULL,
    reason     TEXT    NOT NULL,
    error      TEXT    NOT NULL,
    headers    TEXT    NOT NULL, -- JSON object: name -> array of values
    payload    BLOB    NOT NULL,
    dead_at    INTEGER NOT NULL,
    digest     BLOB    NOT NULL
) STRICT;
CREATE UNIQUE INDEX dead_letters_id_digest ON dead_letters (id, digest);

-- Runs of the handler that did not succeed. Written on the failure path only; a row goes with the message's outcome.
-- `failed` counts runs that ended in a failure, `started` those that began and have not ended.
CREATE TABLE attempts (
    id         TEXT    NOT NULL PRIMARY KEY,
    failed     INTEGER NOT NULL,
    started    INTEGER NOT NULL,
    last_error TEXT,
    updated_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
