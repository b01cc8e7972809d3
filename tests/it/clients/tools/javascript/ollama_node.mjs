// ollama for JavaScript: list, chat, a stream.
import assert from "node:assert";
import { Ollama } from "ollama";

const [gateway, key, name] = process.argv.slice(2);
const client = new Ollama({ host: gateway, headers: { Authorization: `Bearer ${key}` } });
assert.equal((await client.list()).models[0].name, name);
const messages = [{ role: "user", content: "Hello" }];
const options = { num_predict: 8 };
assert((await client.chat({ model: name, messages, options })).eval_count >= 1);
let last;
for await (const part of await client.chat({ model: name, messages, options, stream: true })) {
  last = part;
}
assert(last.done);
console.log("ok");
