// openai: the tool runner of chat completions, or responses that continue each other; collected, then streamed.
import OpenAI from "openai";
import { apiKey, counted, description, model, name, parameters, prompt, url, writeProof } from "./proof.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const tool = counted(writeProof);

async function chat(stream) {
  const runner = client.chat.completions.runTools({
    model,
    stream,
    messages: [{ role: "user", content: prompt }],
    tools: [{ type: "function", function: { name, description, parameters, parse: JSON.parse, function: tool.run } }],
  });
  return runner.finalContent();
}

async function respond(stream, request) {
  const asked = { model, tools: [{ type: "function", name, description, parameters, strict: true }], ...request };
  return stream ? client.responses.stream(asked).finalResponse() : client.responses.create(asked);
}

async function responses(stream) {
  const first = await respond(stream, { input: prompt });
  const calls = first.output.filter((item) => item.type === "function_call");
  const input = [];
  for (const call of calls) {
    const output = await tool.run(JSON.parse(call.arguments));
    input.push({ type: "function_call_output", call_id: call.call_id, output });
  }
  const last = await respond(stream, { input, previous_response_id: first.id });
  return last.output_text;
}

const ask = { chat, responses }[process.argv[2]];
console.log(await ask(false));
tool.expect(1, "collected");
console.log(await ask(true));
tool.expect(2, "streamed");
