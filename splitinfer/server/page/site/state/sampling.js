/* The settings of answers: what is asked of the server of them. Pure. */

/* The token limit of an answer where none is set, as in the REPL. */
export const ANSWER_TOKENS = 2048;

/* name, label, least, most, step, and what it does. An empty value leaves it to the server. */
export const FIELDS = [
  ["temperature", "Temperature", 0, 2, 0.05, "0 always takes the most likely token; higher values vary more."],
  ["top_p", "Top p", 0.01, 1, 0.01, "Keep the most likely tokens whose probabilities add up to this; 1 is off."],
  ["top_k", "Top k", 0, 1000, 1, "Keep this many of the most likely tokens; 0 is off."],
  ["min_p", "Min p", 0, 1, 0.01, "Keep tokens with at least this share of the top token's probability; 0 is off."],
  ["repetition_penalty", "Repetition penalty", 1, 2, 0.05, "Discourage the last 20 tokens; 1 is off."],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1, "Discourage tokens that have already appeared."],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.1, "Discourage tokens by how often they have appeared."],
  ["max_tokens", "Token limit", 1, 1000000, 1, "Stop after this many tokens."],
  ["seed", "Seed", 0, 9007199254740991, 1, "The same seed gives the same answer."],
];

/* A setting as a number within its bounds, or undefined where it is left to the server. */
export function valueOf(name, text) {
  const field = FIELDS.find((one) => one[0] === name);
  if (!field || text === "" || text === null || text === undefined) return undefined;
  const value = Number(text), [, , least, most, step] = field;
  if (!Number.isFinite(value)) return undefined;
  const bounded = Math.min(most, Math.max(least, value));
  return step >= 1 ? Math.round(bounded) : bounded;
}

/* Settings for a purpose: name, and values for all fields that have to do with it; empty: the default. */
const OWN = { temperature: "", top_p: "", top_k: "", min_p: "" };
export const PRESETS = [
  ["default", OWN],
  ["exact", { ...OWN, temperature: "0" }],
  ["creative", { ...OWN, temperature: "1.1", min_p: "0.05" }],
];

/* The preset that settings are, or undefined. */
export function presetOf(sampling) {
  return PRESETS.find(([, values]) => Object.entries(values).every(([name, value]) => String(sampling[name] ?? "") === value))?.[0];
}

/* What an empty field stands for, as the server says it. */
export const inForce = (model, name) => ({ max_tokens: ANSWER_TOKENS, seed: "random" })[name] ?? model.defaults[name] ?? "default";

/* The body of a request for an answer to ``messages``. */
export function requestOf(model, messages, sampling) {
  const body = { model, messages, stream: true, return_progress: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  for (const [name] of FIELDS) {
    const value = valueOf(name, sampling[name]) ?? (name === "max_tokens" ? ANSWER_TOKENS : undefined);
    if (value !== undefined) body[name] = value;
  }
  if (sampling.thinking === "on") body.chat_template_kwargs = { enable_thinking: true };
  if (sampling.thinking === "off") body.chat_template_kwargs = { enable_thinking: false };
  if (sampling.probabilities) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return body;
}

/* The body of a request that continues the last of ``messages``, an answer that was cut. */
export const continuationOf = (...given) => ({ ...requestOf(...given), add_generation_prompt: false, continue_final_message: true });
