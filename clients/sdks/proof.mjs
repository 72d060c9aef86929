// The tool that the programs bring, and what they ask.
import { writeFileSync } from "node:fs";

export const url = process.env.DRAGOMAN_URL;
export const apiKey = process.env.DRAGOMAN_API_KEY;
export const model = "for-sdks";
export const prompt = "Write the proof and tell me what you wrote.";
export const name = "write_proof";
export const description = "Writes the proof and returns it";
export const parameters = {
  type: "object",
  properties: { number: { type: "integer" } },
  required: ["number"],
  additionalProperties: false,
};

export function writeProof({ number }) {
  const text = `proof-${number}`;
  writeFileSync("proof.txt", text);
  return text;
}

// A tool that ran twice for one question, or not at all, is a failure.
export function counted(run) {
  const counter = { calls: 0 };
  counter.run = async (input) => {
    counter.calls += 1;
    return run(input);
  };
  counter.expect = (calls, when) => {
    if (counter.calls !== calls) throw new Error(`${when}: the tool ran ${counter.calls} times, not ${calls}`);
  };
  return counter;
}
