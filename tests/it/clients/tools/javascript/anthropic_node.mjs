// Anthropic's package for JavaScript: a message and a stream.
import assert from "node:assert";
import Anthropic from "@anthropic-ai/sdk";

const [gateway, key, name] = process.argv.slice(2);
const client = new Anthropic({ baseURL: gateway, apiKey: key });
const asked = { model: name, max_tokens: 8, messages: [{ role: "user", content: "Hello" }] };
const said = await client.messages.create(asked);
assert(said.usage.output_tokens >= 1);
const whole = await client.messages.stream(asked).finalMessage();
assert(["end_turn", "max_tokens"].includes(whole.stop_reason));
console.log("ok");
