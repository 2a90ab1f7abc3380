-- The messages that handlers want to have published. A handler inserts a row in the transaction of the order. The daemon publishes
-- the row after the commit and deletes it after the receipt of the server. A binary without this migration refuses the database.
CREATE TABLE outbox (
    row        INTEGER PRIMARY KEY AUTOINCREMENT,
    id         TEXT    NOT NULL DEFAULT (lower(hex(randomblob(16)))), -- the header Nats-Msg-Id
    subject    TEXT    NOT NULL,
    headers    TEXT,              -- JSON object: name -> value or array of values
    payload    ANY     NOT NULL,
    created_at INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000 AS INTEGER) * 1000000), -- ns since 1970 UTC
    sought_from INTEGER           -- the message may have been published since this time, before the row existed
) STRICT;

-- For each stream that rows were published to: every row that is still in the outbox can only be in the stream after this sequence.
CREATE TABLE outbox_targets (
    stream     TEXT    PRIMARY KEY,
    created_at INTEGER NOT NULL, -- of the stream: a recreated one begins again
    after_seq  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
