"""An endpoint for orders, with nothing but Python's standard library.

    python3 shop.py [PORT] [DATABASE]

It stores each order once, whatever happens: the key of the order is the primary key of its table, and order and effect are one
transaction. order-processor calls again with the same key after a crash, a timeout or a lost connection.
"""

import json
import sqlite3
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT = int(sys.argv[1]) if len(sys.argv) > 1 else 8080
DATABASE = sys.argv[2] if len(sys.argv) > 2 else "shop.db"


def connect():
    return sqlite3.connect(DATABASE, timeout=10)


def store(key, order):
    """Returns whether the order is new. A failure stores nothing, so that the next call can succeed."""
    connection = connect()
    try:
        with connection:  # One transaction.
            row = (key, order["customer"], order["cents"])
            new = connection.execute("INSERT INTO sales VALUES (?, ?, ?) ON CONFLICT DO NOTHING", row)
            return new.rowcount == 1
    finally:
        connection.close()


class Shop(BaseHTTPRequestHandler):
    # Connections are used again.
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        key = self.headers.get("Idempotency-Key", "").strip('"')
        if not key:
            return self.answer(400, "the request has no Idempotency-Key")
        try:
            order = json.loads(body)
            customer, cents = order["customer"], order["cents"]
            if not isinstance(customer, str) or not isinstance(cents, int):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            # 422 makes the order a dead letter. Do not use it for an order that may succeed later.
            return self.answer(422, "an order needs a text at customer and a whole number at cents")
        try:
            new = store(key, order)
        except sqlite3.OperationalError as error:
            # For example locked, or a full disk: the orders wait, and no attempt is counted.
            return self.answer(503, str(error), ("Retry-After", "5"))
        # A key that was completed before is a success too, never 409.
        self.answer(200, "stored" if new else "known")

    def answer(self, status, text, *headers):
        body = text.encode()
        self.send_response(status)
        for name, value in (("Content-Length", str(len(body))), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        pass


with connect() as database:
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("CREATE TABLE IF NOT EXISTS sales (key TEXT PRIMARY KEY, customer TEXT NOT NULL, cents INTEGER NOT NULL)")

print(f"listening on http://127.0.0.1:{PORT}/orders", flush=True)
ThreadingHTTPServer(("127.0.0.1", PORT), Shop).serve_forever()
