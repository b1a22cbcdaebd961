// `@anthropic-ai/sdk` for node.
import { ANSWER, ASKED, KEY, MODEL, SCHEMA, TALE, THOUGHT, URL, installed, refused, run, same } from "./probe.mjs";

const { module, version } = await installed("@anthropic-ai/sdk");
const Anthropic = module.default;
const client = new Anthropic({ baseURL: URL, apiKey: KEY, maxRetries: 0 });
const head = { model: MODEL, max_tokens: 500, messages: ASKED };
const tools = [{ name: "get_weather", description: "Tells the weather.", input_schema: SCHEMA }];

await run(version, {
  async create() {
    same((await client.messages.create(head)).content[0].text, TALE);
  },
  async stream() {
    const stream = client.messages.stream({ ...head, tools });
    let inputs = 0;
    stream.on("inputJson", () => (inputs += 1));
    const final = await stream.finalMessage();
    same(final.content.map((block) => block.type), ["thinking", "text", "tool_use"]);
    same([final.content[2].input, inputs > 0], [{ city: "Oslo" }, true]);
  },
  async tools() {
    const first = await client.messages.create({ ...head, tools });
    const result = { type: "tool_result", tool_use_id: first.content.at(-1).id, content: "sunny" };
    const messages = [...ASKED, { role: "assistant", content: first.content }, { role: "user", content: [result] }];
    same((await client.messages.create({ ...head, messages, tools })).content[0].text, ANSWER);
  },
  async tool_runner() {
    const tool = { ...tools[0], type: "custom", run: () => "sunny", parse: (given) => given };
    const final = await client.beta.messages.toolRunner({ ...head, tools: [tool] });
    same(final.content[0].text, ANSWER);
  },
  async thinking() {
    const wanted = { ...head, max_tokens: 2048, tools, thinking: { type: "enabled", budget_tokens: 1024 } };
    same((await client.messages.create(wanted)).content[0].thinking, THOUGHT);
  },
  async counts() {
    const counted = await client.messages.countTokens({ model: MODEL, messages: ASKED });
    same(counted.input_tokens > 5, true);
  },
  async models() {
    same((await client.models.list()).data.map((model) => model.display_name), [MODEL]);
  },
  async errors() {
    await refused(400, "container", () => client.messages.create({ ...head, container: "box" }));
    await refused(404, "batches", () => client.messages.batches.create({ requests: [] }));
  },
});
