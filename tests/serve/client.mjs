// The openai package for Node against a server: node client.mjs URL MESSAGES (tests/serve/test_clients.py). Prints what it got as JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
const given = { model: "tiny", messages: JSON.parse(process.argv[3]), max_tokens: 8, temperature: 0 };
const out = { streamed: "" };

out.whole = (await client.chat.completions.create(given)).choices[0].message.content;
for await (const chunk of await client.chat.completions.create({ ...given, stream: true, stream_options: { include_usage: true } })) {
  out.streamed += chunk.choices[0]?.delta?.content ?? "";
  out.usage = chunk.usage ?? out.usage;
}
out.helper = (await client.chat.completions.stream(given).finalChatCompletion()).choices[0].message.content;

async function failure(more) {
  try {
    await client.chat.completions.create({ ...given, ...more });
  } catch (error) {
    return error.constructor.name;
  }
}
out.error = await failure({ model: "gpt-4" });
out.bad = await failure({ temperature: -1 });
out.response = (await client.responses.create({ model: "tiny", input: given.messages, max_output_tokens: 8, temperature: 0 })).output_text;

const aborted = await client.chat.completions.create({ ...given, max_tokens: 400, stream: true });
for await (const chunk of aborted) aborted.controller.abort();
console.log(JSON.stringify(out));
