-- The id of a message without an id of its own loses the creation time of its stream. A stream that is restored from a snapshot
-- gets a new creation time but keeps its messages, so an old id would name the same message a second time.
-- Before: <stream>@<created, ns>:<stream_seq>:<published, ns>. After: <stream>@<published, ns>:<stream_seq>.
-- Rows of `orders` keep their ids: triggers of users must not fire, and users may have copied these ids.
-- A binary without this migration refuses the database.

-- Ids that have the old form and name their own sequence. `key` is the row. Attempts have no sequence.
CREATE TABLE former_ids (
    tab     TEXT NOT NULL,
    key     ANY  NOT NULL,
    created TEXT NOT NULL,
    new_id  TEXT NOT NULL,
    PRIMARY KEY (tab, key)
) STRICT, WITHOUT ROWID;

INSERT INTO former_ids
WITH ids (tab, key, id, stream_seq) AS (
    SELECT 'attempts', id, id, NULL FROM attempts
    UNION ALL SELECT 'applied', rowid, applied_id, stream_seq FROM closed_letters
    UNION ALL SELECT 'closed_letters', rowid, id, stream_seq FROM closed_letters
    UNION ALL SELECT 'dead_letters', rowid, id, stream_seq FROM dead_letters
    UNION ALL SELECT 'processed_ids', row, id, stream_seq FROM processed_ids
),
-- Cut from the end: the name of a stream may contain each of the separators. LIMIT keeps SQLite from putting one expression into
-- the other, which would compute each of them up to 50 times.
without_published AS (
    SELECT *, rtrim(id, '0123456789') AS a FROM ids WHERE id GLOB '?*@[0-9]*:[0-9]*:[0-9]*' AND instr(id, char(0)) = 0 LIMIT -1
),
without_seq AS (
    SELECT *, rtrim(substr(a, 1, length(a) - 1), '0123456789') AS b FROM without_published WHERE a LIKE '%:' AND a <> id LIMIT -1
),
without_created AS (
    SELECT *, substr(a, length(b) + 1, length(a) - length(b) - 1) AS seq,
           rtrim(substr(b, 1, length(b) - 1), '0123456789') AS c
    FROM without_seq WHERE b LIKE '%:' LIMIT -1
)
SELECT tab, key, substr(b, length(c) + 1, length(b) - length(c) - 1), c || substr(id, length(a) + 1) || ':' || seq
FROM without_created
WHERE c LIKE '_%@' AND seq <> '' AND length(b) - length(c) > 1 AND seq = coalesce(CAST(stream_seq AS TEXT), seq);

-- A database that has processed a restored stream has two old ids of one message. The first one stays. The rows are compared only
-- if there are ids of two streams.
DELETE FROM processed_ids WHERE row IN (
    SELECT key FROM (
        SELECT key, row_number() OVER (PARTITION BY new_id ORDER BY key) AS place FROM former_ids
        WHERE tab = 'processed_ids' AND (SELECT count(DISTINCT created) FROM former_ids WHERE tab = 'processed_ids') > 1
    ) WHERE place > 1
);
UPDATE processed_ids SET id = new_id FROM former_ids WHERE tab = 'processed_ids' AND key = processed_ids.row;

-- The index contains hashes of the old ids: with it, every order would look new. The next start builds another one.
DELETE FROM id_segments;
DELETE FROM id_pages;

-- Of two rows that get one id, the later one is ignored here, keeps its old id, and is deleted.
UPDATE OR IGNORE dead_letters SET id = new_id FROM former_ids WHERE tab = 'dead_letters' AND key = dead_letters.rowid;
DELETE FROM dead_letters WHERE rowid IN (SELECT key FROM former_ids WHERE tab = 'dead_letters' AND new_id <> id);
UPDATE OR IGNORE attempts SET id = new_id FROM former_ids WHERE tab = 'attempts' AND key = attempts.id;
DELETE FROM attempts WHERE id IN (SELECT key FROM former_ids WHERE tab = 'attempts');

-- A record of what operators did: both rows stay.
UPDATE closed_letters SET id = new_id FROM former_ids WHERE tab = 'closed_letters' AND key = closed_letters.rowid;
UPDATE closed_letters SET applied_id = new_id FROM former_ids WHERE tab = 'applied' AND key = closed_letters.rowid;

DROP TABLE former_ids;

-- Up to where ids were deleted. A message that is both below a sequence and older than the time in its row may have been processed
-- although its id is gone.
CREATE TABLE pruned (
    cause      TEXT    NOT NULL PRIMARY KEY, -- 'sequence': below the first sequence of the stream; 'time': of a former stream
    below_seq  INTEGER NOT NULL,
    before_ns  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
