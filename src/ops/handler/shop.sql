-- Your own tables. A file that was applied must not change: write the next change into 0002_….sql.
CREATE TABLE sales (
    id    TEXT    NOT NULL PRIMARY KEY,
    sku   TEXT    NOT NULL,
    cents INTEGER NOT NULL CHECK (cents >= 0),
    note  TEXT
) STRICT;

CREATE TABLE sold (
    sku    TEXT    NOT NULL PRIMARY KEY,
    orders INTEGER NOT NULL
) STRICT;
