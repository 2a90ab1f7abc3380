-- Where the daemon's own audit stands: one row. Without it, the next audit begins with the first message of the stream. A binary
-- without this migration refuses the database.
CREATE TABLE audit_mark (
    only_row             INTEGER PRIMARY KEY CHECK (only_row = 1),
    through              INTEGER NOT NULL, -- no message up to this sequence of the stream is missing
    anchor_seq           INTEGER,          -- a message of the stream, and when it was published: a restored stream still has it,
    anchor_ns            INTEGER,          -- a recreated stream does not
    filters              TEXT    NOT NULL, -- JSON array: the subjects that the consumer is for
    other_filter_through INTEGER NOT NULL, -- the consumer passed the messages up to here under another filter
    rows_since           INTEGER NOT NULL, -- rows processed before this do not account for their sequences
    audited_at           INTEGER NOT NULL
) STRICT;
