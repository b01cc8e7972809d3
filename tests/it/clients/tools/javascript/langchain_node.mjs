// LangChain for JavaScript: invoke, stream, structured output.
import assert from "node:assert";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";

const [gateway, key, name] = process.argv.slice(2);
const model = new ChatOpenAI({
  model: name, apiKey: key, maxTokens: 60, configuration: { baseURL: `${gateway}/v1` },
});
assert((await model.invoke("Hello")).usage_metadata.output_tokens >= 1);
let parts = 0;
for await (const part of await model.stream("Hello")) { void part; parts += 1; }
assert(parts >= 1);
const schema = z.object({ name: z.enum(["red", "green"]) });
const structured = model.withStructuredOutput(schema, { method: "jsonSchema", strict: true });
assert(["red", "green"].includes((await structured.invoke("Which?")).name));
console.log("ok");
