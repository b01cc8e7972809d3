// Vercel's AI SDK runs its loop with a tool, streamed and not.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { execSync } from "node:child_process";
import { z } from "zod";

const [gateway, key, name, prompt] = process.argv.slice(2);
const node = createOpenAICompatible({ name: "node", baseURL: `${gateway}/v1`, apiKey: key });
const bash = tool({
  description: "Run a command in the shell",
  inputSchema: z.object({ command: z.string() }),
  execute: async ({ command }) => execSync(command).toString(),
});
const work = { model: node(name), prompt, tools: { bash }, stopWhen: stepCountIs(5) };
console.log((await generateText(work)).text);
console.log(await streamText(work).text);
