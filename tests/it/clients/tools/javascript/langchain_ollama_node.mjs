// LangChain's Ollama package for JavaScript: chat and a stream.
import assert from "node:assert";
import { ChatOllama } from "@langchain/ollama";

const [gateway, key, name] = process.argv.slice(2);
const model = new ChatOllama({
  model: name, baseUrl: gateway, numPredict: 8, headers: { Authorization: `Bearer ${key}` },
});
assert((await model.invoke("Hello")).usage_metadata.output_tokens >= 1);
let parts = 0;
for await (const part of await model.stream("Hello")) { void part; parts += 1; }
assert(parts >= 1);
console.log("ok");
