import assert from "node:assert/strict";
import test from "node:test";

import { KEPT, NOTHING, at, inWords, lost, pauseOf, told, withSpans } from "../../splitinfer/server/page/site/state/figures.js";

const PIPELINE = { stages: [{ name: "studio" }, { name: "mini" }], links: [{}] };
const figures = (more) => ({ stages: [{}, {}], generated_per_second: 5, running: 1, waiting: 0, words: [], tracks: [[], []], ...more });

test("spans lie on one clock and never overlap", () => {
  let seen = told(NOTHING, "pipeline", PIPELINE, 0);
  seen = told(seen, "figures", figures({ tracks: [[[-400, 100, "p", ""], [-250, 50, "d", "l", 30]], []] }), 1000);
  assert.deepEqual(seen.tracks[0], [
    { start: 600, end: 700, kind: "prefill", cause: "", busy: 100 },
    { start: 750, end: 800, kind: "decode", cause: "link", busy: 30 },
  ]);
  seen = told(seen, "figures", figures({ tracks: [[[-720, 100, "s", "u"]], []] }), 1500);
  assert.deepEqual(seen.tracks[0][2], { start: 800, end: 880, kind: "draft", cause: "upstream", busy: 100 });
  assert.equal(seen.history.length, 2);
  assert.equal(lost(seen).isLive, false);
});

test("what is old is forgotten", () => {
  const track = withSpans([{ start: 0, end: 10 }, { start: KEPT, end: KEPT + 5 }], [], KEPT + 11);
  assert.deepEqual(track.map((span) => span.start), [KEPT]);
});

test("with other stages, or other layers on them, everything begins anew", () => {
  const cut = (layers) => ({ stages: layers.map((own, i) => ({ name: `s${i}`, layers: own })) });
  const first = told(told(NOTHING, "pipeline", cut([[0, 4], [4, 6]]), 0), "figures", figures({ tracks: [[[-9, 9, "d", ""]], []] }), 1);
  assert.equal(told(first, "pipeline", { ...cut([[0, 4], [4, 6]]), context: 9 }, 2).tracks[0].length, 1);
  const other = told(first, "pipeline", cut([[0, 3], [3, 6]]), 2);
  assert.deepEqual([other.tracks, other.figures], [[[], []], null]);
  const three = told(first, "pipeline", cut([[0, 1], [1, 2], [2, 6]]), 2);
  assert.equal(told(three, "figures", figures(), 3), three, "figures of the cut before are late");
  assert.equal(told(NOTHING, "figures", figures(), 3), NOTHING, "of stages that nobody knows");
});

test("a moment is in a span, in a gap with the cause of what follows, or nowhere", () => {
  const track = withSpans([], [[0, 10, "p", ""], [30, 10, "d", "l"]], 100);
  assert.equal(at(track, 105).span.kind, "prefill");
  assert.deepEqual(at(track, 120).gap, { start: 110, end: 130, cause: "link" });
  assert.equal(at(track, 99), null);
  assert.equal(at(track, 200), null, "what follows has not come yet");
});

test("a timeline in words", () => {
  const track = withSpans([], [[0, 50, "d", ""], [50, 20, "v", "", 10]], 0);
  assert.equal(inWords(track, 0, 100), "generating 50 %, discarded 10 %");
  assert.equal(inWords([], 0, 100), "idle");
});

test("an answer's pause has the words of the pipeline", () => {
  const word = { code: "lost", text: "Answers pause." };
  const seen = told(NOTHING, "pipeline", PIPELINE, 0);
  assert.equal(pauseOf(told(seen, "figures", figures({ words: [{ code: "full" }, word] }), 1)), word);
  assert.equal(pauseOf(NOTHING), null);
});

test("an event that is not known changes nothing", () => {
  assert.equal(told(NOTHING, "else", {}, 1), NOTHING);
});
