// Vercel's `ai`, with its providers for any server of OpenAI's API, for OpenAI (responses) and for Anthropic.
import { ANSWER, KEY, MODEL, QUESTION, SCHEMA, TALE, THOUGHT, URL, installed, run, same } from "./probe.mjs";

const { module: ai, version } = await installed("ai");
const { createOpenAICompatible } = (await installed("@ai-sdk/openai-compatible")).module;
const { createOpenAI } = (await installed("@ai-sdk/openai")).module;
const { createAnthropic } = (await installed("@ai-sdk/anthropic")).module;

const model = {
  compatible: createOpenAICompatible({ name: "splitinfer", baseURL: `${URL}/v1`, apiKey: KEY, includeUsage: true })(MODEL),
  responses: createOpenAI({ baseURL: `${URL}/v1`, apiKey: KEY }).responses(MODEL),
  chat: createOpenAI({ baseURL: `${URL}/v1`, apiKey: KEY }).chat(MODEL),
  anthropic: createAnthropic({ baseURL: `${URL}/v1`, apiKey: KEY })(MODEL),
};
const weather = ai.tool({
  description: "Tells the weather.",
  inputSchema: ai.jsonSchema(SCHEMA),
  execute: async ({ city }) => `sunny in ${city}`,
});
const stopWhen = (ai.isStepCount ?? ai.stepCountIs)(4);
// Otherwise the provider hands back references to what it takes for stored.
const providerOptions = { openai: { store: false } };
const abilities = {};
for (const [name, one] of Object.entries(model)) {
  abilities[`${name}_text`] = async () => {
    const { text, usage } = await ai.generateText({ model: one, prompt: QUESTION, maxRetries: 0 });
    same([text, usage.outputTokens > 2], [TALE, true]);
  };
  abilities[`${name}_stream`] = async () => {
    const result = ai.streamText({ model: one, prompt: QUESTION, maxRetries: 0 });
    same(await result.text, TALE);
    same((await result.usage).inputTokens > 5, true);
  };
  abilities[`${name}_tools`] = async () => {
    const { text, steps } = await ai.generateText({ model: one, prompt: QUESTION, tools: { get_weather: weather }, stopWhen, maxRetries: 0, providerOptions });
    same([text, steps.length], [ANSWER, 2]);
    if (name === "compatible" || name === "anthropic") same(steps[0].reasoningText, THOUGHT);
  };
  abilities[`${name}_tools_streamed`] = async () => {
    const result = ai.streamText({ model: one, prompt: QUESTION, tools: { get_weather: weather }, stopWhen, maxRetries: 0, providerOptions });
    same([await result.text, (await result.steps).length], [ANSWER, 2]);
  };
  abilities[`${name}_object`] = async () => {
    const schema = { ...SCHEMA, properties: { city: { enum: ["Oslo", "Bergen"] } }, additionalProperties: false };
    const wanted = { model: one, prompt: QUESTION, output: ai.Output.object({ schema: ai.jsonSchema(schema) }), maxRetries: 0 };
    same(schema.properties.city.enum.includes((await ai.generateText(wanted)).output.city), true);
  };
}
await run(version, abilities);
