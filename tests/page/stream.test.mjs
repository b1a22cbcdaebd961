import assert from "node:assert/strict";
import test from "node:test";

import { announcementOf, begin, endOf, eventParser, figuresOf, take, waitOf } from "../../splitinfer/server/page/site/state/stream.js";

const STREAM = ': ping\n\ndata: {"a":1}\n\nevent: figures\r\ndata: one\r\ndata: two\r\n\r\ndata:[DONE]\n\n: last\n';

test("events are the same however the bytes are cut", () => {
  const whole = eventParser().feed(STREAM);
  assert.deepEqual(whole, [
    { comment: "ping" }, { name: "message", data: '{"a":1}' }, { name: "figures", data: "one\ntwo" },
    { name: "message", data: "[DONE]" }, { comment: "last" },
  ]);
  for (let size = 1; size < 9; size++) {
    const parser = eventParser(), found = [];
    for (let i = 0; i < STREAM.length; i += size) found.push(...parser.feed(STREAM.slice(i, i + size)));
    assert.deepEqual(found, whole, `in pieces of ${size}`);
  }
});

const chunk = (delta, more = {}) => JSON.stringify({ choices: [{ index: 0, delta, finish_reason: null, ...more }], usage: null });

test("an answer is folded from its chunks", () => {
  let answer = begin(1000);
  answer = take(answer, chunk({ role: "assistant", content: "" }), 1010);
  assert.equal(answer.first, null, "nothing was said yet");
  answer = take(answer, chunk({ reasoning: "hm", reasoning_content: "hm" }), 1100);
  answer = take(answer, chunk({ content: "Once" }), 1200);
  answer = take(answer, chunk({ content: " upon" }), 1600);
  answer = take(answer, chunk({}, { finish_reason: "stop" }), 1700);
  answer = take(answer, JSON.stringify({ choices: [], usage: { prompt_tokens: 9, completion_tokens: 6,
    prompt_tokens_details: { cached_tokens: 4 }, completion_tokens_details: { reasoning_tokens: 2 },
    splitinfer: { drafts_tried: 7, drafts_right: 4 } } }), 1700);
  assert.equal(endOf(answer, false), "stop");
  answer = take(answer, "[DONE]", 1800);
  assert.deepEqual([answer.content, answer.reasoning, answer.isWhole], ["Once upon", "hm", true]);
  assert.deepEqual(figuresOf(answer),
    { ttft: 100, rate: 10, generated: 6, prompt: 9, cached: 4, reasoning: 2, tried: 7, right: 4 });
  assert.equal(figuresOf(begin(0)).tried, null, "nobody drafts");
});

test("calls of tools and probabilities are collected", () => {
  let answer = begin(0);
  answer = take(answer, chunk({ tool_calls: [{ index: 0, id: "call_1", function: { name: "look", arguments: '{"a"' } }] }), 1);
  answer = take(answer, chunk({ tool_calls: [{ index: 0, function: { arguments: ":1}" } }] }), 2);
  answer = take(answer, chunk({ content: "x" }, { logprobs: { content: [{ token: "x", logprob: -0.5 }] } }), 3);
  assert.deepEqual(answer.calls, [{ id: "call_1", name: "look", arguments: '{"a":1}' }]);
  assert.deepEqual(answer.logprobs, [{ token: "x", logprob: -0.5 }]);
});

test("while a prompt is read, the answer says how far and how long", () => {
  const progress = (processed, left) => JSON.stringify({ choices: [{ index: 0, delta: {}, finish_reason: null }],
    prompt_progress: { total: 1850, cache: 50, processed, time_ms: 100, seconds_left: left } });
  assert.equal(waitOf(begin(0)), "Waiting for the first token");
  assert.equal(waitOf({ ...begin(0), isLoading: true }), "Loading the model");
  let answer = take(begin(0), progress(50, null), 1);
  assert.equal(waitOf(answer), "Reading 1,800 tokens");
  answer = take(answer, progress(512, 39.2), 2);
  assert.equal(waitOf(answer), "Reading 512 of 1,850 tokens, 40 s left");
  assert.equal(waitOf(take(answer, progress(600, 400), 3)), "Reading 600 of 1,850 tokens, 7 min left");
  assert.deepEqual([answer.first, take(answer, chunk({ content: "Once" }), 9).reading], [null, null]);
});

test("how it ended", () => {
  const failed = take(begin(0), JSON.stringify({ error: { message: "stage mini was lost" } }), 1);
  assert.deepEqual([failed.error, endOf(failed, false)], ["stage mini was lost", "error"]);
  assert.equal(endOf(begin(0), true), "stopped");
  assert.equal(endOf(begin(0), false), "cut", "a stream that ends without its end");
  assert.deepEqual(["stop", "length", "stopped", "cut", "error"].map((end) => announcementOf(end).split(" ").at(-1)),
    ["complete.", "complete.", "stopped.", "interrupted.", "failed."]);
  assert.match(take(begin(0), "<html>", 1).error, /not JSON/);
  assert.deepEqual(figuresOf(begin(0)).rate, null);
});

test("an answer that was stopped has the figures of what had come", () => {
  const chunk = (text, generated) => JSON.stringify({ choices: [{ delta: { content: text } }],
    usage: { prompt_tokens: 9, completion_tokens: generated } });
  const answer = take(take(begin(0), chunk("a", 1), 100), chunk("b", 3), 200);
  assert.equal(endOf(answer, true), "stopped");
  assert.deepEqual([figuresOf(answer).generated, figuresOf(answer).prompt, figuresOf(answer).rate], [3, 9, 20]);
});
