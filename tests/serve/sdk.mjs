// The AI SDK against a server: node sdk.mjs URL MESSAGES (tests/serve/test_clients.py). Prints what it got as JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, streamText, tool } from "ai";

const model = createOpenAICompatible({ name: "kvstored", baseURL: process.argv[2] + "/v1" }).chatModel("tiny");
const given = { model, messages: JSON.parse(process.argv[3]), maxOutputTokens: 8, temperature: 0, maxRetries: 0 };
const out = { streamed: "" };

const whole = await generateText(given);
out.whole = whole.text;
out.usage = whole.usage.outputTokens;
for await (const piece of streamText(given).textStream) out.streamed += piece;

const look = tool({
  inputSchema: jsonSchema({ type: "object", properties: { k: { enum: ["a", "b"] } }, required: ["k"], additionalProperties: false }),
});
const asked = { ...given, tools: { look }, toolChoice: { type: "tool", toolName: "look" }, maxOutputTokens: 90 };
out.called = (await generateText(asked)).toolCalls.map((call) => [call.toolName, call.input.k]);
out.calledInPieces = (await streamText(asked).toolCalls).map((call) => [call.toolName, call.input.k]);
console.log(JSON.stringify(out));
