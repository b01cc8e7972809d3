// AI SDK: text, a stream, an object, by chat completions and by responses.
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, streamText } from "ai";
import { z } from "zod";

const [gateway, key, name] = process.argv.slice(2);
const baseURL = `${gateway}/v1`;
const node = createOpenAICompatible({
  name: "cresset", baseURL, apiKey: key, supportsStructuredOutputs: true,
});
const asked = { model: node(name), prompt: "Hello", maxOutputTokens: 60 };
assert((await generateText(asked)).usage.outputTokens >= 1);
const stream = streamText(asked);
for await (const part of stream.textStream) void part;
assert(["stop", "length"].includes(await stream.finishReason));
const schema = z.object({ name: z.enum(["red", "green"]) });
// An object may hold any number of blanks, so there is room for them, and it is the same each time.
const steady = { ...asked, maxOutputTokens: 400, temperature: 1, seed: 7 };
const object = await generateText({ ...steady, output: Output.object({ schema }) });
assert(["red", "green"].includes(object.output.name));
const responses = createOpenAI({ baseURL, apiKey: key })(name);
assert((await generateText({ ...asked, model: responses })).usage.outputTokens >= 1);
console.log("ok");
