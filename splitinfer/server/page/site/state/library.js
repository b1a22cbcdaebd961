/* Many conversations: their list, search, and files of them. Pure.

   A file of the REPL's `/save` is a list of messages, or an object with ``messages``, each with a role and a content;
   answers may have ``token_ids``, which this page does not need. A file of this page has whole trees. */

import { ROOT, newConversation, newNode, path, titleOf, withPictures } from "./conversation.js";

export const KIND = "splitinfer conversations";

/* What the list shows of a conversation. */
export function entryOf(conversation) {
  return { id: conversation.id, title: conversation.title || "New conversation", updated: conversation.updated };
}

/* The entries, newest first, whose conversation has every word of ``query``, in any message. */
export function search(conversations, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const found = words.length ? conversations.filter((one) => hasAll(one, words)) : conversations;
  return found.map(entryOf).sort((a, b) => b.updated - a.updated || (a.id < b.id ? -1 : 1));
}

function hasAll(conversation, words) {
  const texts = [conversation.title, conversation.system, ...Object.values(conversation.nodes).map((node) => node.content)];
  const text = texts.join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
}

/* The shown path as the REPL's `/load` reads it: pairs of user and assistant, and a system message before. */
export function toMessages(conversation) {
  const messages = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
  const shown = path(conversation).map((id) => conversation.nodes[id]);
  while (shown.length && shown[shown.length - 1].role === "user") shown.pop(); // it has no answer
  for (const node of shown) {
    messages.push({ role: node.role, content: node.role === "user" ? withPictures(node) : node.content });
  }
  return messages;
}

/* Everything, for another browser. */
export function toFile(conversations) {
  return { kind: KIND, version: 1, conversations };
}

/* The conversations in a file's text. ``newId()`` makes ids, so that nothing that is there is overwritten.
   Throws an Error with one sentence where the text is something else. */
export function fromFile(text, name, newId, at) {
  let document;
  try {
    document = JSON.parse(text);
  } catch {
    throw new Error(`${name} is not valid JSON`);
  }
  if (document?.kind === KIND) return trees(document, name, newId);
  const messages = Array.isArray(document) ? document : document?.messages;
  if (!Array.isArray(messages)) throw new Error(`${name} has no list of messages, and this page did not save it`);
  return [fromMessages(messages, name, newId, at)];
}

function trees(document, name, newId) {
  if (document.version !== 1 || !Array.isArray(document.conversations)) {
    throw new Error(`another version of this page saved ${name}`);
  }
  return document.conversations.map((one) => checked(one, name, newId()));
}

const ROLES = ["user", "assistant"];

/* A conversation of a file, with nothing in it but what belongs there; messages get the ids that they have. */
function checked(one, name, id) {
  const isText = (value) => typeof value === "string";
  const nodes = {};
  const given = one !== null && typeof one === "object" && one.nodes !== null && typeof one.nodes === "object" ? one.nodes : null;
  if (given === null || !Array.isArray(one.root)) throw new Error(`${name} has a conversation without messages`);
  const todo = one.root.map((child) => [child, ROOT]);
  const root = [...one.root];
  while (todo.length) {
    const [key, parent] = todo.pop(), node = isText(key) && Object.hasOwn(given, key) ? given[key] : null;
    if (!node || Object.hasOwn(nodes, key) || !ROLES.includes(node.role) || !isText(node.content) || !Array.isArray(node.children)) {
      throw new Error(`${name} has a damaged message`);
    }
    nodes[key] = {
      id: key, parent, role: node.role, content: node.content, reasoning: isText(node.reasoning) ? node.reasoning : "",
      calls: [], files: (Array.isArray(node.files) ? node.files : []).filter((file) => isText(file?.name) && isText(file?.text))
        .map((file) => ({ name: file.name, text: file.text, ...(isPicture(file.picture) ? { picture: file.picture } : {}) })),
      at: Number(node.at) || 0, figures: null, error: isText(node.error) ? node.error : null,
      ended: isText(node.ended) ? node.ended : null, children: [...node.children],
    };
    todo.push(...node.children.map((child) => [child, key]));
  }
  const chosen = Object.fromEntries(Object.entries(one.chosen ?? {}).filter(([, to]) => isText(to) && nodes[to]));
  return { id, title: isText(one.title) ? one.title : "", created: Number(one.created) || 0, updated: Number(one.updated) || 0,
    system: isText(one.system) ? one.system : "", sampling: {}, root, nodes, chosen };
}

const isPicture = (url) => typeof url === "string" && /^data:image\/[\w.+-]+;base64,/i.test(url);

/* A content as text and pictures: of parts, as messages with pictures have them, or of the REPL's text, which names
   files that a page cannot read. */
function ofParts(content, name) {
  if (typeof content === "string") return { content: content.replace(/\ufdd0 ([^\ufdd1]*)\ufdd1/g, "[$1] "), files: [] };
  if (!Array.isArray(content)) return { content, files: [] };
  const urls = content.filter((part) => part?.type === "image_url").map((part) => part.image_url?.url);
  const texts = content.filter((part) => part?.type === "text").map((part) => part.text);
  if (urls.length + texts.length < content.length || !urls.every(isPicture)) throw new Error(`${name} has a part that is neither text nor a picture`);
  return { content: texts.join("\n"), files: urls.map((picture, i) => ({ name: `picture ${i + 1}`, text: "", picture })) };
}

function fromMessages(messages, name, newId, at) {
  const nodes = {}, root = [], systems = [];
  let parent = ROOT, children = root;
  messages.forEach((message, index) => {
    const { role } = message ?? {}, { content, files } = ofParts(message?.content, name);
    if (typeof content !== "string" || !["system", ...ROLES].includes(role)) {
      throw new Error(`message ${index + 1} of ${name} needs a role and a text`);
    }
    if (role === "system") systems.push(content);
    else {
      const id = newId(), reasoning = typeof message.reasoning_content === "string" ? message.reasoning_content : "";
      nodes[id] = newNode({ id, role, content, files, reasoning, ended: role === "assistant" ? "stop" : null }, parent, at);
      children.push(id);
      parent = id;
      children = nodes[id].children;
    }
  });
  const first = Object.values(nodes).find((node) => node.role === "user");
  return { ...newConversation(newId(), at), title: titleOf(first?.content ?? ""), system: systems.join("\n\n"), root, nodes };
}
