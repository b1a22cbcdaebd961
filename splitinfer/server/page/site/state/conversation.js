/* A conversation as a value: a tree of messages; one path of it is shown. Pure.

   root - user - assistant - user' - assistant      an edited message is a sibling, and so is an answer made again;
               \ assistant'        \ assistant      nothing is ever overwritten

   conversation  {id, title, created, updated, model, system, sampling, root: [ids], nodes: {id: node}, chosen: {parent: id}}
   node          {id, parent, role, content, reasoning, calls, files, at, figures, error, ended, children: [ids]}

   ``chosen`` says which child of a node is shown; the last one where it says nothing. Every function returns a new
   conversation; both share the unchanged parts. Times are milliseconds since 1970, and given, as ids are. */

export const ROOT = "";

export function newConversation(id, at, settings = {}) {
  return { id, title: "", created: at, updated: at, model: settings.model ?? null, system: settings.system ?? "", sampling: settings.sampling ?? {},
    root: [], nodes: {}, chosen: {} };
}

/* The model that answers in it: the one that was chosen, or the server's first; null while none is known. */
export const modelOf = (models, { model }) => models.find((one) => one.name === model) ?? models[0] ?? null;

export function childrenOf(conversation, id) {
  return id === ROOT ? conversation.root : conversation.nodes[id]?.children ?? [];
}

/* The ids that are shown, from the first message to the last. */
export function path(conversation) {
  const shown = [];
  let at = ROOT;
  for (;;) {
    const children = childrenOf(conversation, at);
    if (!children.length) return shown;
    const chosen = conversation.chosen[at];
    at = children.includes(chosen) ? chosen : children[children.length - 1];
    shown.push(at);
  }
}

/* Which of its siblings a message is: {index, ids}. */
export function siblings(conversation, id) {
  const ids = childrenOf(conversation, conversation.nodes[id].parent);
  return { index: ids.indexOf(id), ids };
}

/* A message with all its fields. */
export function newNode(message, parent, at) {
  return { content: "", reasoning: "", calls: [], files: [], figures: null, error: null, ended: null,
    ...message, parent, at, children: [] };
}

/* A message behind ``parent``, which is shown from now on. */
export function add(conversation, parent, message, at) {
  const node = newNode(message, parent, at);
  const nodes = { ...conversation.nodes, [node.id]: node };
  let root = conversation.root;
  if (parent === ROOT) root = [...root, node.id];
  else nodes[parent] = { ...nodes[parent], children: [...nodes[parent].children, node.id] };
  const title = conversation.title || (node.role === "user" ? titleOf(node.content) : "");
  return { ...conversation, nodes, root, title, updated: at, chosen: { ...conversation.chosen, [parent]: node.id } };
}

/* Change a message's fields, such as its content when the answer is whole. */
export function change(conversation, id, fields, at = conversation.updated) {
  if (!conversation.nodes[id]) return conversation;
  return { ...conversation, updated: at, nodes: { ...conversation.nodes, [id]: { ...conversation.nodes[id], ...fields } } };
}

/* Show another sibling: ``step`` is 1 or -1. */
export function step(conversation, id, by) {
  const { index, ids } = siblings(conversation, id);
  const other = ids[Math.min(ids.length - 1, Math.max(0, index + by))];
  return { ...conversation, chosen: { ...conversation.chosen, [conversation.nodes[id].parent]: other } };
}

/* A message with all that follows it is gone. */
export function remove(conversation, id) {
  const node = conversation.nodes[id];
  if (!node) return conversation;
  const nodes = { ...conversation.nodes }, todo = [id];
  while (todo.length) {
    const one = todo.pop();
    todo.push(...nodes[one].children);
    delete nodes[one];
  }
  const without = (ids) => ids.filter((one) => one !== id);
  if (node.parent !== ROOT) nodes[node.parent] = { ...nodes[node.parent], children: without(nodes[node.parent].children) };
  const chosen = Object.fromEntries(Object.entries(conversation.chosen).filter(([from, to]) =>
    (from === ROOT || nodes[from]) && nodes[to]));
  return { ...conversation, nodes, chosen, root: node.parent === ROOT ? without(conversation.root) : conversation.root };
}

/* The first line of a text, cut at a word. */
export function titleOf(text, most = 60) {
  const line = text.trim().split("\n", 1)[0].replace(/\s+/g, " ");
  if (line.length <= most) return line;
  const cut = line.slice(0, most), space = cut.lastIndexOf(" ");
  return (space > most / 2 ? cut.slice(0, space) : cut) + "…";
}

/* A user's text with the texts that are attached to it, as the model reads it. */
export function withFiles(node) {
  const files = node.files.filter((file) => !file.picture).map((file) => {
    const longest = Math.max(2, ...[...file.text.matchAll(/`+/g)].map((run) => run[0].length));
    const fence = "`".repeat(longest + 1);
    return `${file.name}:\n${fence}\n${file.text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...files, node.content].filter(Boolean).join("\n\n");
}

/* What the server is sent: the messages on the shown path up to ``last``, in OpenAI's form. */
export function messagesTo(conversation, last) {
  const messages = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
  for (const id of pathTo(conversation, last)) {
    const node = conversation.nodes[id];
    if (node.role === "user") messages.push({ role: "user", content: withPictures(node) });
    else if (node.content || node.reasoning || node.calls.length) messages.push(answered(node));
  }
  return messages;
}

/* A user's text, or, where pictures are attached, these and the text as parts. */
export function withPictures(node) {
  const pictures = node.files.filter((file) => file.picture).map((file) => ({ type: "image_url", image_url: { url: file.picture } }));
  return pictures.length ? [...pictures, { type: "text", text: withFiles(node) }] : withFiles(node);
}

function answered(node) {
  const message = { role: "assistant", content: node.content };
  if (node.reasoning) message.reasoning_content = node.reasoning;
  return message;
}

/* The ids from the first message to ``last``, whatever is shown. */
export function pathTo(conversation, last) {
  const ids = [];
  for (let at = last; at !== ROOT && at !== undefined; at = conversation.nodes[at]?.parent) ids.push(at);
  return ids.reverse();
}
