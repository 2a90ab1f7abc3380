-- How the ids of messages are made, and from which message on: one row at the first bind, and one at the first bind after each change
-- of the settings. A message that may have been delivered before a change keeps the scheme of the row before. A binary without this
-- migration refuses the database.
CREATE TABLE id_schemes (
    number         INTEGER NOT NULL PRIMARY KEY, -- 1, 2, 3: the order of the changes
    from_seq       INTEGER NOT NULL, -- the first stream sequence that was not delivered before the change
    stream         TEXT    NOT NULL, -- the name of the stream in ids
    pointer        TEXT,             -- inbox.id_pointer
    scope          TEXT    NOT NULL, -- inbox.id_scope: 'subject', 'stream' or 'header:NAME'
    through_ns     INTEGER NOT NULL, -- a lower sequence that was published after this belongs to a later stream
    gone_before_ns INTEGER NOT NULL, -- a message that was published before this belongs to a former stream
    recorded_at    INTEGER NOT NULL
) STRICT;
