// An endpoint for orders, with nothing but Node.
//
//     node shop.mjs [PORT] [FILE]
//
// It stores each order once, whatever happens: a line of the file is an order with its key, and a key that is in the file is not
// stored again. order-processor calls again with the same key after a crash, a timeout or a lost connection. A real shop has a
// database: then the key is a primary key, and order and effect are one transaction.

import { createServer } from "node:http";
import { closeSync, existsSync, fsyncSync, openSync, readFileSync, writeSync } from "node:fs";

const port = Number(process.argv[2] ?? 8080);
const file = process.argv[3] ?? "sales.ndjson";

// The last line is incomplete after a crash. Its order was not answered, so it comes again.
const keys = new Set();
if (existsSync(file)) {
  for (const line of readFileSync(file, "utf8").split("\n").slice(0, -1)) {
    try {
      keys.add(JSON.parse(line).key);
    } catch {
      // An incomplete line.
    }
  }
}
const sales = openSync(file, "a");
// Ends a line that a crash left incomplete.
writeSync(sales, "\n");

// A failure stores nothing, so that the next call can succeed. Synchronous: two requests with one key come one after the other.
function store(key, { customer, cents }) {
  if (keys.has(key)) return false;
  writeSync(sales, JSON.stringify({ key, customer, cents }) + "\n");
  fsyncSync(sales);
  keys.add(key);
  return true;
}

function answer(response, status, text, headers = {}) {
  response.writeHead(status, { "Content-Length": Buffer.byteLength(text), ...headers });
  response.end(text);
}

function handle(request, response, body) {
  const key = (request.headers["idempotency-key"] ?? "").replaceAll('"', "");
  if (request.method !== "POST" || key === "") return answer(response, 400, "the request has no Idempotency-Key");
  let order;
  try {
    order = JSON.parse(body);
  } catch {
    order = null;
  }
  if (typeof order?.customer !== "string" || !Number.isInteger(order.cents)) {
    // 422 makes the order a dead letter. Do not use it for an order that may succeed later.
    return answer(response, 422, "an order needs a text at customer and a whole number at cents");
  }
  try {
    // A key that was completed before is a success too, never 409.
    answer(response, 200, store(key, order) ? "stored" : "known");
  } catch (error) {
    // For example a full disk: the orders wait, and no attempt is counted.
    answer(response, 503, error.message, { "Retry-After": "5" });
  }
}

const server = createServer((request, response) => {
  const parts = [];
  request.on("data", (part) => parts.push(part));
  request.on("end", () => handle(request, response, Buffer.concat(parts).toString()));
});
server.listen(port, "127.0.0.1", () => console.log(`listening on http://127.0.0.1:${port}/orders`));

process.on("exit", () => closeSync(sales));
