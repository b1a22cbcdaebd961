import assert from "node:assert/strict";
import test from "node:test";

import { ROOT, add, newConversation, path } from "../../splitinfer/server/page/site/state/conversation.js";
import { fromFile, search, toFile, toMessages } from "../../splitinfer/server/page/site/state/library.js";

function ids() {
  let count = 0;
  return () => `n${++count}`;
}

function chat(id, at, ...texts) {
  let made = newConversation(id, at, { system: "Be brief." }), parent = ROOT;
  texts.forEach((content, i) => {
    made = add(made, parent, { id: `${id}${i}`, role: i % 2 ? "assistant" : "user", content }, at);
    parent = `${id}${i}`;
  });
  return made;
}

test("search finds all words in any message, newest first", () => {
  const all = [chat("a", 1, "The wolf", "howls"), chat("b", 3, "A house"), chat("c", 2, "wolf and HOUSE")];
  assert.deepEqual(search(all, "").map((one) => one.id), ["b", "c", "a"]);
  assert.deepEqual(search(all, "house").map((one) => one.id), ["b", "c"]);
  assert.deepEqual(search(all, "howls wolf").map((one) => one.id), ["a"]);
  assert.deepEqual(search(all, "bear"), []);
});

test("a conversation is exported as the REPL loads it: pairs", () => {
  assert.deepEqual(toMessages(chat("a", 1, "Hi", "Ho", "unanswered")), [
    { role: "system", content: "Be brief." }, { role: "user", content: "Hi" }, { role: "assistant", content: "Ho" },
  ]);
});

test("files of the REPL's /save come back", () => {
  const saved = [{ role: "system", content: "S" }, { role: "user", content: "Hi" },
    { role: "assistant", content: "Ho", token_ids: [1, 2] }];
  for (const text of [JSON.stringify(saved), JSON.stringify({ messages: saved })]) {
    const [made] = fromFile(text, "s.json", ids(), 5);
    assert.deepEqual(toMessages(made), [saved[0], saved[1], { role: "assistant", content: "Ho" }]);
    assert.equal(made.title, "Hi");
  }
});

test("a whole library comes back, under new ids and with nothing else in it", () => {
  const all = [chat("a", 1, "Hi", "Ho"), chat("b", 2, "He")];
  const text = JSON.stringify(toFile([{ ...all[0], sampling: { temperature: "<b>" }, extra: 1 }, all[1]]));
  const found = fromFile(text, "f.json", ids(), 9);
  assert.deepEqual(found.map((one) => one.id), ["n1", "n2"]);
  assert.deepEqual(path(found[0]), path(all[0]));
  assert.equal(found[0].nodes.a1.content, "Ho");
  assert.equal("extra" in found[0], false);
  assert.deepEqual(found[0].sampling, {});
});

const damaged = (change) => {
  const document = JSON.parse(JSON.stringify(toFile([chat("a", 1, "Hi", "Ho")])));
  change(document.conversations[0], document);
  return JSON.stringify(document);
};

for (const [name, text, said] of [
  ["no JSON", "<html>", /f is not valid JSON/],
  ["something else", '{"a":1}', /has no list of messages/],
  ["a number", "3", /has no list of messages/],
  ["a message without text", '[{"role":"user"}]', /message 1 of f needs a role and a text/],
  ["another role", '[{"role":"tool","content":"x"}]', /message 1 of f/],
  ["nothing for a message", "[null]", /message 1 of f/],
  ["another version", damaged((_, document) => { document.version = 2; }), /another version/],
  ["a message that is missing", damaged((one) => { delete one.nodes.a1; }), /damaged/],
  ["a circle", damaged((one) => { one.nodes.a1.children = ["a0"]; }), /damaged/],
  ["a prototype's name", damaged((one) => { one.root = ["__proto__"]; }), /damaged/],
  ["no messages at all", damaged((one) => { one.nodes = null; }), /without messages/],
]) {
  test(`a file with ${name} is refused in one sentence`, () => {
    assert.throws(() => fromFile(text, "f", ids(), 1), said);
  });
}

test("a picture is exported and comes back, in a library and in messages", () => {
  const picture = "data:image/png;base64,AA==", files = [{ name: "a.png", text: "", picture }];
  let made = add(newConversation("c", 0), ROOT, { id: "u", role: "user", content: "What is it?", files }, 1);
  made = add(made, "u", { id: "a", role: "assistant", content: "A cat." }, 2);
  const [whole] = fromFile(JSON.stringify(toFile([made])), "f.json", ids(), 3);
  assert.deepEqual(whole.nodes.u.files, files);
  const [listed] = fromFile(JSON.stringify(toMessages(made)), "m.json", ids(), 3);
  assert.deepEqual(toMessages(listed), toMessages(made));
  assert.equal(toMessages(listed)[0].content[0].image_url.url, picture);
});

test("what is no picture is none after an import", () => {
  const files = [{ name: "a.png", text: "", picture: "https://example.com/a.png" }];
  const made = add(newConversation("c", 0), ROOT, { id: "u", role: "user", content: "Hi", files }, 1);
  const [whole] = fromFile(JSON.stringify(toFile([made])), "f.json", ids(), 3);
  assert.deepEqual(whole.nodes.u.files, [{ name: "a.png", text: "" }]);
  const parts = [{ type: "image_url", image_url: { url: files[0].picture } }];
  assert.throws(() => fromFile(JSON.stringify([{ role: "user", content: parts }]), "m.json", ids(), 3), /m.json has a part/);
  const [repl] = fromFile(JSON.stringify([{ role: "user", content: "\ufdd0 /a.png\ufdd1Hi" }]), "r.json", ids(), 3);
  assert.equal(Object.values(repl.nodes)[0].content, "[/a.png] Hi");
});
