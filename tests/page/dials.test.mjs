import assert from "node:assert/strict";
import test from "node:test";

import { byDefault, changesOf, inForce, numSet, shown } from "../../splitinfer/server/page/site/state/dials.js";

const DIALS = [
  { name: "policy", kind: "choice", value: null, in_force: "stall_free", unit: "", choices: ["stall_free", "decode_first"] },
  { name: "prefill_share", kind: "number", value: 0.3, in_force: 0.3, unit: "" },
  { name: "itl_slo_ms", kind: "number", value: null, in_force: null, unit: "milliseconds" },
  { name: "max_running", kind: "whole", value: null, in_force: 32, unit: "" },
];

test("only what was changed is asked for", () => {
  assert.deepEqual(changesOf(DIALS, {}), {});
  assert.deepEqual(changesOf(DIALS, { prefill_share: "0.3", policy: "", max_running: " " }), {}, "all is as it was");
  assert.deepEqual(changesOf(DIALS, { policy: "decode_first", max_running: "8", itl_slo_ms: "40.5" }),
    { policy: "decode_first", max_running: 8, itl_slo_ms: 40.5 });
});

test("an empty field restores a default", () => {
  assert.deepEqual(changesOf(DIALS, { prefill_share: "" }), { prefill_share: null });
});

test("what the fields show", () => {
  assert.deepEqual(DIALS.map(shown), ["", "0.3", "", ""]);
  assert.deepEqual(DIALS.map(byDefault), ["default: stall_free", "default", "default: off", "default: 32"]);
  assert.equal(inForce({ in_force: 40, unit: "milliseconds" }), "40 milliseconds");
  assert.equal(numSet(DIALS), 1);
});
