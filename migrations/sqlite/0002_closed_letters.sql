-- What operators do with dead letters stays on record. A binary without this migration refuses the database.

-- When the message was published; NULL in letters from before this migration.
ALTER TABLE dead_letters ADD COLUMN published_at INTEGER;

-- Dead letters that an operator has replayed or discarded, whole, with who did it and when. A message in here is dealt with
-- for ever: when it is delivered again, and after a crash of the server it may be, it is a duplicate.
CREATE TABLE closed_letters (
    id           TEXT    NOT NULL,
    subject      TEXT    NOT NULL,
    stream_seq   INTEGER NOT NULL,
    delivered    INTEGER NOT NULL,
    reason       TEXT    NOT NULL,
    error        TEXT    NOT NULL,
    headers      TEXT    NOT NULL,
    payload      BLOB    NOT NULL,
    dead_at      INTEGER NOT NULL,
    digest       BLOB    NOT NULL,
    published_at INTEGER,
    closed_as    TEXT    NOT NULL, -- 'replayed' or 'discarded'
    closed_by    TEXT    NOT NULL, -- user@host
    closed_at    INTEGER NOT NULL,
    applied_id   TEXT              -- in processed_ids, if it was applied
) STRICT;
CREATE INDEX closed_letters_id_digest ON closed_letters (id, digest);
