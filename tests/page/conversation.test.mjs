import assert from "node:assert/strict";
import test from "node:test";

import { ROOT, add, change, messagesTo, modelOf, newConversation, path, remove, siblings, step, titleOf, withFiles } from "../../splitinfer/server/page/site/state/conversation.js";

function chat() {
  let made = newConversation("c", 1, { system: "Be brief." });
  made = add(made, ROOT, { id: "u1", role: "user", content: "One?" }, 2);
  made = add(made, "u1", { id: "a1", role: "assistant", content: "1" }, 3);
  made = add(made, "a1", { id: "u2", role: "user", content: "Two?" }, 4);
  return add(made, "u2", { id: "a2", role: "assistant", content: "2", reasoning: "hm" }, 5);
}

test("a conversation is a path of messages, titled by its first", () => {
  assert.deepEqual(path(chat()), ["u1", "a1", "u2", "a2"]);
  assert.equal(chat().title, "One?");
  assert.equal(chat().updated, 5);
});

test("an edited message is a sibling, and both branches stay", () => {
  const edited = add(chat(), "a1", { id: "u3", role: "user", content: "Three?" }, 6);
  assert.deepEqual(path(edited), ["u1", "a1", "u3"]);
  assert.deepEqual(siblings(edited, "u3"), { index: 1, ids: ["u2", "u3"] });
  assert.deepEqual(path(step(edited, "u3", -1)), ["u1", "a1", "u2", "a2"]);
  assert.deepEqual(path(step(edited, "u3", 1)), ["u1", "a1", "u3"], "there is no further one");
  assert.deepEqual(path(step(step(edited, "u3", -1), "u2", 1)), ["u1", "a1", "u3"]);
});

test("the first message has siblings, too", () => {
  const other = add(chat(), ROOT, { id: "u9", role: "user", content: "Else?" }, 6);
  assert.deepEqual(path(other), ["u9"]);
  assert.deepEqual(path(step(other, "u9", -1)), ["u1", "a1", "u2", "a2"]);
});

test("nothing is changed in place", () => {
  const before = chat(), text = JSON.stringify(before);
  add(before, "a2", { id: "x", role: "user", content: "" }, 9);
  change(before, "a2", { content: "changed" });
  remove(before, "u2");
  step(before, "u2", 1);
  assert.equal(JSON.stringify(before), text);
  assert.equal(change(before, "a1", { content: "x" }).nodes.u2, before.nodes.u2, "what has not changed is shared");
});

test("what is removed takes what follows with it", () => {
  const left = remove(chat(), "u2");
  assert.deepEqual(path(left), ["u1", "a1"]);
  assert.deepEqual(Object.keys(left.nodes).sort(), ["a1", "u1"]);
  assert.deepEqual(left.chosen, { [ROOT]: "u1", u1: "a1" });
  assert.deepEqual(path(remove(chat(), "u1")), []);
});

test("the server is sent the path up to a message, with the reasoning of answers and the files", () => {
  let made = chat();
  made = add(made, "a2", { id: "u4", role: "user", content: "What is it?", files: [{ name: "a.md", text: "```\nx\n```\n" }] }, 6);
  assert.deepEqual(messagesTo(made, "u4"), [
    { role: "system", content: "Be brief." },
    { role: "user", content: "One?" }, { role: "assistant", content: "1" },
    { role: "user", content: "Two?" }, { role: "assistant", content: "2", reasoning_content: "hm" },
    { role: "user", content: "a.md:\n````\n```\nx\n```\n````\n\nWhat is it?" },
  ]);
  assert.equal(messagesTo(made, "u1").length, 2, "an answer is asked for again without what followed");
  assert.equal(messagesTo({ ...made, system: " " }, "u1").length, 1);
});

test("an answer that is empty is not sent", () => {
  const made = add(newConversation("c", 1), ROOT, { id: "u", role: "user", content: "Hi" }, 1);
  const failed = add(add(made, "u", { id: "a", role: "assistant" }, 2), "a", { id: "v", role: "user", content: "Again" }, 3);
  assert.deepEqual(messagesTo(failed, "v").map((one) => one.role), ["user", "user"]);
});

test("a conversation keeps its model while the server has it", () => {
  const models = [{ name: "small" }, { name: "large" }];
  assert.equal(modelOf(models, newConversation("c", 1)).name, "small");
  assert.equal(modelOf(models, newConversation("c", 1, { model: "large" })).name, "large");
  assert.equal(modelOf(models, { model: "gone" }).name, "small");
  assert.equal(modelOf([], {}), null);
});

test("titles end at a word", () => {
  assert.equal(titleOf("  Tell me\tof  it\nand more"), "Tell me of it");
  assert.equal(titleOf("word ".repeat(30)), `${"word ".repeat(11)}word…`);
  assert.equal(titleOf("x".repeat(100)), `${"x".repeat(60)}…`);
});

test("pictures are parts of the message, texts are in its text", () => {
  const files = [{ name: "a.png", text: "", picture: "data:image/png;base64,AA==" }, { name: "f", text: "a" }];
  const made = add(newConversation("c", 0), ROOT, { id: "u", role: "user", content: "What is it?", files }, 1);
  assert.deepEqual(messagesTo(made, "u"), [{ role: "user", content: [
    { type: "image_url", image_url: { url: "data:image/png;base64,AA==" } },
    { type: "text", text: "f:\n```\na\n```\n\nWhat is it?" },
  ] }]);
});

test("files come before the text, in fences that they cannot end", () => {
  assert.equal(withFiles({ content: "", files: [{ name: "f", text: "a" }] }), "f:\n```\na\n```");
});
