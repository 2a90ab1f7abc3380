-- Which consumer this database belongs to, one row. A database without the row has never had a consumer: if the consumer has
-- acknowledged orders, another database has them. A binary without this migration refuses the database.
CREATE TABLE binding (
    only             INTEGER NOT NULL PRIMARY KEY CHECK (only = 1),
    stream           TEXT,             -- NULL: of a version that did not record it; the next bind does
    consumer         TEXT,
    not_ours_through INTEGER NOT NULL, -- orders up to this stream sequence were processed without this database
    bound_at         INTEGER NOT NULL
) STRICT;

-- A database of a former version that has processed something keeps its consumer, whichever that is.
INSERT INTO binding
SELECT 1, NULL, NULL, 0, 0
WHERE EXISTS (SELECT 1 FROM processed_ids) OR EXISTS (SELECT 1 FROM dead_letters)
   OR EXISTS (SELECT 1 FROM closed_letters) OR EXISTS (SELECT 1 FROM attempts);
