// openai for JavaScript: chat by name, a stream, responses, completions.
import assert from "node:assert";
import OpenAI from "openai";

const [gateway, key, name] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${gateway}/v1`, apiKey: key });
const messages = [{ role: "user", content: "Hello" }];
const said = await client.chat.completions.create({ model: name, messages, max_tokens: 8 });
assert(said.usage.completion_tokens >= 1);
const stream = client.chat.completions.stream({ model: name, messages, max_tokens: 8 });
assert(["stop", "length"].includes((await stream.finalChatCompletion()).choices[0].finish_reason));
const answer = await client.responses.create({ model: name, input: "Hello", max_output_tokens: 8 });
assert(["completed", "incomplete"].includes(answer.status));
const events = [];
for await (const event of await client.responses.create({
  model: name, input: "Hello", max_output_tokens: 8, stream: true,
})) events.push(event.type);
assert.equal(events[0], "response.created");
const text = await client.completions.create({ model: name, prompt: "Hello", max_tokens: 8 });
assert(text.usage.total_tokens > 1);
console.log("ok");
