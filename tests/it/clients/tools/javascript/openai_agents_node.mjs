// The OpenAI Agents library for JavaScript: one turn over responses and one over chat.
import assert from "node:assert";
import {
  Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled,
} from "@openai/agents";
import OpenAI from "openai";

const [gateway, key, name] = process.argv.slice(2);
setTracingDisabled(true);
const client = new OpenAI({ baseURL: `${gateway}/v1`, apiKey: key });
for (const Interface of [OpenAIResponsesModel, OpenAIChatCompletionsModel]) {
  const agent = new Agent({
    name: "A", instructions: "Be brief.", model: new Interface(client, name),
    modelSettings: { maxTokens: 400, temperature: 0 },
  });
  assert.equal(typeof (await run(agent, "Hello")).finalOutput, "string");
}
console.log("ok");
