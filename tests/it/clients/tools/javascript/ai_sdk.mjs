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
// Greedy, so that the object is the same one each time.
const asked = { model: node(name), prompt: "Hello", maxOutputTokens: 60, temperature: 0 };
assert((await generateText(asked)).usage.outputTokens >= 1);
const stream = streamText(asked);
for await (const part of stream.textStream) void part;
assert(["stop", "length"].includes(await stream.finishReason));
const schema = z.object({ name: z.enum(["red", "green"]) });
const object = await generateText({ ...asked, output: Output.object({ schema }) });
assert(["red", "green"].includes(object.output.name));
const responses = createOpenAI({ baseURL, apiKey: key })(name);
assert((await generateText({ ...asked, model: responses })).usage.outputTokens >= 1);
console.log("ok");
