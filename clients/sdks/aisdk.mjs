// The AI SDK through one of its providers: generateText, then streamText.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool as define } from "ai";
import { apiKey, counted, description, model, name, parameters, prompt, url, writeProof } from "./proof.mjs";

const baseURL = `${url}/v1`;
const models = {
  chat: () => createOpenAI({ baseURL, apiKey }).chat(model),
  responses: () => createOpenAI({ baseURL, apiKey }).responses(model),
  messages: () => createAnthropic({ baseURL, apiKey })(model),
  compatible: () => createOpenAICompatible({ name: "dragoman", baseURL, apiKey, includeUsage: true })(model),
};
const tool = counted(writeProof);
const request = {
  model: models[process.argv[2]](),
  prompt,
  maxRetries: 0,
  stopWhen: stepCountIs(4),
  tools: { [name]: define({ description, inputSchema: jsonSchema(parameters), execute: tool.run }) },
};

const collected = await generateText(request);
console.log(collected.text);
tool.expect(1, "collected");

const streamed = streamText({ ...request, onError: ({ error }) => { throw error; } });
console.log(await streamed.text);
tool.expect(2, "streamed");

for (const usage of [collected.totalUsage, await streamed.totalUsage]) {
  if (!(usage.inputTokens > 0 && usage.outputTokens > 0)) throw new Error(`no usage: ${JSON.stringify(usage)}`);
}
