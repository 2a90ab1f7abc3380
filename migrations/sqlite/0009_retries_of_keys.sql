-- For an order with a key, the place in the stream and the time of its retry: after a restart, later orders of the key wait for it
-- and other orders do not. A binary without this migration refuses the database.
ALTER TABLE attempts ADD COLUMN stream_seq INTEGER;
ALTER TABLE attempts ADD COLUMN order_key TEXT;
ALTER TABLE attempts ADD COLUMN due_at INTEGER; -- ns since 1970 UTC
