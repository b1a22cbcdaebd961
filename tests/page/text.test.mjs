import assert from "node:assert/strict";
import test from "node:test";

import { blocks } from "../../splitinfer/server/page/site/state/blocks.js";
import { snippets } from "../../splitinfer/server/page/site/state/connect.js";
import { PRESETS, continuationOf, inForce, presetOf, requestOf, valueOf } from "../../splitinfer/server/page/site/state/sampling.js";

const TEXT = "One.\n\nTwo\nlines.\n\n```py\na\n\n~~~\nb\n```\n\n- a\n\n- b\n\n  c\n\nThree.\n\n$$\nx\n\ny\n$$\n\nFour.\n";

test("a text is cut between its blocks, and nowhere else", () => {
  assert.deepEqual(blocks(TEXT), ["One.\n\n", "Two\nlines.\n\n", "```py\na\n\n~~~\nb\n```\n\n- a\n\n- b\n\n  c\n\n",
    "Three.\n\n$$\nx\n\ny\n$$\n\n", "Four.\n"].flatMap((one) => one.startsWith("Three") ? ["Three.\n\n", one.slice(8)] : [one]));
  assert.deepEqual(blocks(""), []);
});

test("however much of it has come, the blocks are the text, and whole ones stay", () => {
  let before = [];
  for (let size = 1; size <= TEXT.length; size++) {
    const found = blocks(TEXT.slice(0, size));
    assert.equal(found.join(""), TEXT.slice(0, size));
    assert.deepEqual(found.slice(0, before.length - 1), before.slice(0, -1), `at ${size}`);
    before = found;
  }
});

test("settings are numbers within their bounds, or left to the server", () => {
  assert.equal(valueOf("temperature", "0.7"), 0.7);
  assert.equal(valueOf("temperature", "9"), 2);
  assert.equal(valueOf("top_k", "2.6"), 3);
  for (const text of ["", null, undefined, "warm", "NaN"]) assert.equal(valueOf("temperature", text), undefined);
  assert.equal(valueOf("surprise", "1"), undefined);
});

test("a request has what was set and nothing else", () => {
  assert.deepEqual(requestOf("m", [], { temperature: "0", top_p: "" }),
    { model: "m", messages: [], stream: true, return_progress: true, stream_options: { include_usage: true, continuous_usage_stats: true }, temperature: 0, max_tokens: 2048 });
  const more = requestOf("m", [], { thinking: "off", probabilities: true });
  assert.deepEqual([more.chat_template_kwargs, more.top_logprobs], [{ enable_thinking: false }, 5]);
});

test("to continue an answer is to ask for it with its beginning as the last message", () => {
  const messages = [{ role: "user", content: "Hi" }, { role: "assistant", content: "Once" }], sampling = { thinking: "on" };
  assert.deepEqual(continuationOf("m", messages, sampling),
    { ...requestOf("m", messages, sampling), add_generation_prompt: false, continue_final_message: true });
});

test("an empty field shows what is in force", () => {
  const model = { defaults: { temperature: 0.7, top_k: 0 } };
  assert.deepEqual(["temperature", "top_k", "max_tokens", "seed", "top_p"].map((name) => inForce(model, name)),
    [0.7, 0, 2048, "random", "default"]);
});

test("a preset sets what belongs to it and is known again", () => {
  for (const [name, values] of PRESETS) assert.equal(presetOf({ ...values, seed: "7" }), name);
  assert.equal(presetOf({}), "default");
  assert.equal(presetOf({ temperature: "0.3" }), undefined);
});

test("what other programs need has this server's URL and its model, whatever its name", () => {
  const found = snippets("http://mini.local:8080", "it's/a \"model\"");
  assert.equal(found.length, 3);
  for (const [, text] of found) assert.ok(text.includes("http://mini.local:8080/v1"), text);
  assert.ok(found[0][1].includes(String.raw`"model":"it'\''s/a \"model\""`), found[0][1]);
  assert.ok(found[1][1].includes(String.raw`model="it's/a \"model\""`));
});
