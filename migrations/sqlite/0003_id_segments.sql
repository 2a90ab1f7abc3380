-- Ids are found through an index of our own (src/store/sqlite/ids.rs): in a B-tree over random ids every row would dirty a page of
-- its own, and the table would become slower with its size (benches/README.md). A binary without this migration refuses the
-- database.

-- `row` is the order of the commits. It is in the index, so it must outlive a VACUUM, and no row may get the number of one
-- that is gone: hence a column, and AUTOINCREMENT. Nothing here keeps an id from standing twice; who adds rows looks first, in
-- the same transaction.
CREATE TABLE processed_ids_by_row (
    id           TEXT    NOT NULL,
    stream_seq   INTEGER NOT NULL,
    digest       BLOB    NOT NULL,
    processed_at INTEGER NOT NULL,
    row          INTEGER PRIMARY KEY AUTOINCREMENT
) STRICT;
INSERT INTO processed_ids_by_row SELECT id, stream_seq, digest, processed_at, rowid FROM processed_ids ORDER BY rowid;
DROP TABLE processed_ids;
ALTER TABLE processed_ids_by_row RENAME TO processed_ids;

-- Rows of processed_ids that were sealed: they stand in the index. Those after the last segment are in memory only, and read
-- from processed_ids at every start.
CREATE TABLE id_segments (
    segment   INTEGER PRIMARY KEY,
    first_row INTEGER NOT NULL,
    last_row  INTEGER NOT NULL,
    filter    BLOB    NOT NULL -- a Bloom filter of the ids, then 8 bytes of hash
) STRICT;

-- The ids of a segment by their hash, in 256 pages. Page number: segment * 256 + the first byte of the hash.
CREATE TABLE id_pages (
    page    INTEGER PRIMARY KEY,
    entries BLOB    NOT NULL -- in order, 8 bytes each, little-endian: 32 bits of the hash above the row less first_row; then 8 bytes of hash over it all
) STRICT;
