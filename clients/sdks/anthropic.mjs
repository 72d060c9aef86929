// @anthropic-ai/sdk: its tool runner, collected, then streamed.
import Anthropic from "@anthropic-ai/sdk";
import { apiKey, counted, description, model, name, parameters, prompt, url, writeProof } from "./proof.mjs";

const client = new Anthropic({ baseURL: url, apiKey, maxRetries: 0 });
const tool = counted(writeProof);
const request = {
  model,
  max_tokens: 1000,
  messages: [{ role: "user", content: prompt }],
  tools: [{ type: "custom", name, description, input_schema: parameters, parse: (input) => input, run: tool.run }],
};
const text = (message) => message.content.filter((block) => block.type === "text").map((block) => block.text).join("");

console.log(text(await client.beta.messages.toolRunner(request)));
tool.expect(1, "collected");

let last;
for await (const stream of client.beta.messages.toolRunner({ ...request, stream: true })) last = await stream.finalMessage();
console.log(text(last));
tool.expect(2, "streamed");
