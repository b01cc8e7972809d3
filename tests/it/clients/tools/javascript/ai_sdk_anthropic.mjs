// The AI SDK's Anthropic provider: text and a stream.
import assert from "node:assert";
import { createAnthropic } from "@ai-sdk/anthropic";
import { generateText, streamText } from "ai";

const [gateway, key, name] = process.argv.slice(2);
const node = createAnthropic({ baseURL: `${gateway}/v1`, apiKey: key });
const asked = { model: node(name), prompt: "Hello", maxOutputTokens: 8 };
assert((await generateText(asked)).usage.outputTokens >= 1);
let parts = 0;
for await (const part of streamText(asked).textStream) { void part; parts += 1; }
assert(parts >= 1);
console.log("ok");
