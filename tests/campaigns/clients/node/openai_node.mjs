// `openai` for node.
import { ANSWER, ASKED, KEY, MODEL, QUESTION, SCHEMA, TALE, THOUGHT, URL, installed, refused, run, same } from "./probe.mjs";

const { module, version } = await installed("openai");
const OpenAI = module.default;
const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY, maxRetries: 0 });
const head = { model: MODEL, messages: ASKED };
const fn = { name: "get_weather", description: "Tells the weather.", parameters: SCHEMA };
const tools = [{ type: "function", function: fn }];

await run(version, {
  async chat() {
    same((await client.chat.completions.create(head)).choices[0].message.content, TALE);
  },
  async stream() {
    let text = "";
    const stream = await client.chat.completions.create({ ...head, stream: true, stream_options: { include_usage: true } });
    for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
    same(text, TALE);
  },
  async stream_helper() {
    const stream = client.chat.completions.stream({ ...head, tools });
    const final = await stream.finalChatCompletion();
    same(JSON.parse(final.choices[0].message.tool_calls[0].function.arguments), { city: "Oslo" });
  },
  async run_tools() {
    const runner = client.chat.completions.runTools({
      ...head,
      tools: [{ type: "function", function: { ...fn, parse: JSON.parse, function: () => "sunny" } }],
    });
    same(await runner.finalContent(), ANSWER);
  },
  async run_tools_streamed() {
    const runner = client.chat.completions.runTools({
      ...head,
      stream: true,
      tools: [{ type: "function", function: { ...fn, parse: JSON.parse, function: () => "sunny" } }],
    });
    same(await runner.finalContent(), ANSWER);
  },
  async reasoning() {
    same((await client.chat.completions.create({ ...head, tools })).choices[0].message.reasoning_content, THOUGHT);
  },
  async responses() {
    same((await client.responses.create({ model: MODEL, input: QUESTION })).output_text, TALE);
  },
  async responses_stream() {
    const stream = client.responses.stream({ model: MODEL, input: ASKED, tools: [{ type: "function", ...fn, strict: false }] });
    const final = await stream.finalResponse();
    same(final.output.map((item) => item.type), ["reasoning", "message", "function_call"]);
  },
  async completions() {
    same((await client.completions.create({ model: MODEL, prompt: "Tell", max_tokens: 100 })).choices[0].text, TALE);
  },
  async models() {
    same((await client.models.list()).data.map((model) => model.id), [MODEL]);
  },
  async errors() {
    const wanted = { ...head, prediction: { type: "content", content: "There was" } };
    const error = await refused(400, "prediction", () => client.chat.completions.create(wanted));
    same([error.param, error.type], ["prediction", "invalid_request_error"]);
    await refused(404, "embeddings", () => client.embeddings.create({ model: MODEL, input: "x" }));
  },
  async cancel() {
    for (let i = 0; i < 3; i++) {
      const stream = await client.chat.completions.create({ ...head, stream: true, ignore_eos: true });
      for await (const _ of stream) break;
    }
    same((await client.chat.completions.create(head)).choices[0].message.content, TALE);
  },
});
