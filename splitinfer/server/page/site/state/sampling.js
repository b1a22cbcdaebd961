/* The settings of answers: what is asked of the server of them. Pure. */

/* The token limit of an answer where none is set, as in the REPL. */
export const ANSWER_TOKENS = 2048;

/* name, label, least, most, step, and what it does. An empty value leaves it to the model. */
export const FIELDS = [
  ["temperature", "Temperature", 0, 2, 0.05, "0 always takes the likeliest token; more is more varied."],
  ["top_p", "Top p", 0, 1, 0.01, "Keep the most likely tokens whose probabilities add up to this."],
  ["top_k", "Top k", 0, 1000, 1, "Keep this many of the most likely tokens; 0 keeps all."],
  ["min_p", "Min p", 0, 1, 0.01, "Keep tokens with at least this share of the top token's probability."],
  ["repetition_penalty", "Repetition penalty", 1, 2, 0.05, "Discourage the last 20 tokens; 1 is off."],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1, "Discourage tokens that have already appeared."],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.1, "Discourage tokens by how often they have appeared."],
  ["max_tokens", "Token limit", 1, 1000000, 1, `Stop after this many tokens; ${ANSWER_TOKENS} if empty.`],
  ["seed", "Seed", 0, 9007199254740991, 1, "The same seed gives the same answer."],
];

/* A setting as a number within its bounds, or undefined where it is left to the model. */
export function valueOf(name, text) {
  const field = FIELDS.find((one) => one[0] === name);
  if (!field || text === "" || text === null || text === undefined) return undefined;
  const value = Number(text), [, , least, most, step] = field;
  if (!Number.isFinite(value)) return undefined;
  const bounded = Math.min(most, Math.max(least, value));
  return step >= 1 ? Math.round(bounded) : bounded;
}

/* Settings for a purpose: name, and values for all fields that have to do with it; empty: the model's. */
const OWN = { temperature: "", top_p: "", top_k: "", min_p: "" };
export const PRESETS = [
  ["the model's", OWN],
  ["exact", { ...OWN, temperature: "0" }],
  ["creative", { ...OWN, temperature: "1.1", min_p: "0.05" }],
];

/* The preset that settings are, or undefined. */
export function presetOf(sampling) {
  return PRESETS.find(([, values]) => Object.entries(values).every(([name, value]) => String(sampling[name] ?? "") === value))?.[0];
}

/* The body of a request for an answer to ``messages``. */
export function requestOf(model, messages, sampling) {
  const body = { model, messages, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  for (const [name] of FIELDS) {
    const value = valueOf(name, sampling[name]) ?? (name === "max_tokens" ? ANSWER_TOKENS : undefined);
    if (value !== undefined) body[name] = value;
  }
  if (sampling.thinking === "on") body.chat_template_kwargs = { enable_thinking: true };
  if (sampling.thinking === "off") body.chat_template_kwargs = { enable_thinking: false };
  if (sampling.probabilities) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return body;
}

/* The body of a request that goes on behind the tokens of an answer that was cut. */
export function continuationOf(model, tokens, sampling) {
  const { messages: _messages, chat_template_kwargs: _template, logprobs: _logprobs, top_logprobs: _top, ...body } =
    requestOf(model, [], sampling);
  return { ...body, prompt: tokens, max_tokens: body.max_tokens };
}
