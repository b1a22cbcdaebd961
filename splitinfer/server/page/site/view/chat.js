/* The chat: messages, and where the next one is written. */

import { path, siblings } from "../state/conversation.js";
import { pauseOf } from "../state/figures.js";
import { figuresOf } from "../state/stream.js";
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./html.js";
import { Message } from "./message.js";

const SHOWN = 30, MORE = 100; // messages
const MOST_FILE = 2_000_000; // characters of an attached text
const MOST_PICTURE = 20_000_000; // bytes, as the server
const SUGGESTIONS = ["Tell me a story about a wolf and a fox.", "Explain in five sentences why the sky is blue.",
  "Write a Python function that finds prime numbers.", "Plan five simple dinners, with a shopping list."];
const NEAR = 80; // pixels from the end, within which the end is followed

export function Chat({ state, model, actions }) {
  const conversation = state.conversations[state.current] ?? null;
  const ids = conversation ? path(conversation) : [];
  const [most, setMost] = useState(SHOWN);
  const list = useRef(null), follows = useRef(true);
  const isBusy = ids.some((id) => state.live[id]);
  useEffect(() => { setMost(SHOWN); follows.current = true; }, [state.current]);
  useLayoutEffect(() => { if (follows.current && list.current) list.current.scrollTop = list.current.scrollHeight; });
  const scrolled = () => {
    const at = list.current;
    follows.current = at.scrollHeight - at.scrollTop - at.clientHeight < NEAR;
  };
  const pause = pauseOf(state.seen);
  const send = (text, files) => {
    follows.current = true;
    return actions.send(text, files);
  };
  return html`<section class="chat" aria-label="Chat">
    <div class="messages" ref=${list} onScroll=${scrolled} tabindex="0" role="log" aria-label="Messages">
      ${!ids.length && html`<${Welcome} model=${model} send=${send} />`}
      ${ids.length > most && html`<button type="button" class="earlier" onClick=${() => { follows.current = false; setMost(most + MORE); }}>
        Show ${Math.min(MORE, ids.length - most)} earlier messages</button>`}
      ${ids.slice(-most).map((id) => html`<${Kept} key=${id} node=${conversation.nodes[id]} answer=${state.live[id]}
        place=${siblings(conversation, id)} actions=${actions} isBusy=${isBusy} isLast=${id === ids[ids.length - 1]} pause=${pause} />`)}
    </div>
    <${Composer} key=${state.current} send=${send} stop=${actions.stop} isBusy=${isBusy} isReady=${Boolean(model)} />
    <${Context} conversation=${conversation} ids=${ids} live=${state.live} model=${model} />
  </section>`;
}

/* A message that is drawn again only when something of it has changed, however often another one does. */
function Kept(props) {
  const { node, answer, place, actions, isBusy, isLast, pause } = props, shownPause = answer ? pause : null;
  return useMemo(() => html`<${Message} node=${node} answer=${answer} place=${place} actions=${actions} isBusy=${isBusy} isLast=${isLast} pause=${shownPause} />`,
    [node, answer, place.index, place.ids.length, isBusy, isLast, shownPause]);
}

function Welcome({ model, send }) {
  return html`<div class="welcome"><h2>${model ? model.name : "Connecting …"}</h2>
    ${model && html`<p class="dim">${model.context && `A conversation may have ${model.context.toLocaleString("en")} tokens. `}It stays in this browser.</p>
      <div class="suggestions">${SUGGESTIONS.map((text) => html`<button type="button" key=${text} onClick=${() => send(text)}>${text}</button>`)}</div>`}</div>`;
}

/* How much of the context the last answer uses, also while it is written. */
function Context({ conversation, ids, live, model }) {
  const figures = (id) => (live[id] ? figuresOf(live[id]) : conversation.nodes[id].figures);
  const last = [...ids].reverse().map(figures).find((one) => one?.prompt);
  if (!last || !model?.context) return null;
  const used = last.prompt + (last.generated ?? 0), share = Math.min(1, used / model.context);
  return html`<div class="context dim"><meter min="0" max="1" high="0.85" value=${share} aria-label="Context used"></meter>
    ${used.toLocaleString("en")} of ${model.context.toLocaleString("en")} tokens of context</div>`;
}

const asUrl = (file) => new Promise((done, failed) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.onerror = () => failed(reader.error);
  reader.readAsDataURL(file);
});

function Composer({ send, stop, isBusy, isReady }) {
  const [text, setText] = useState(""), [files, setFiles] = useState([]), [problem, setProblem] = useState("");
  const area = useRef(null), picker = useRef(null);
  useEffect(() => { if (matchMedia("(pointer: fine)").matches) area.current.focus(); }, []);
  useLayoutEffect(() => {
    area.current.style.height = "auto";
    area.current.style.height = `${Math.min(area.current.scrollHeight, innerHeight * 0.4)}px`;
  }, [text]);
  const submit = () => {
    if (isBusy || !isReady || !send(text, files)) return;
    setText("");
    setFiles([]);
    setProblem("");
  };
  const keys = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  };
  const attach = async (given) => {
    const added = [];
    for (const file of given) {
      if (file.type.startsWith("image/")) {
        if (file.size > MOST_PICTURE) setProblem(`${file.name} is too large; a picture may have 20 MB.`);
        else added.push({ name: file.name || "picture", text: "", picture: await asUrl(file) });
        continue;
      }
      const content = file.size > 4 * MOST_FILE ? null : await file.text();
      if (content === null || content.length > MOST_FILE) setProblem(`${file.name} is too long; a text may have 2,000,000 characters.`);
      else if (content.includes("\u0000")) setProblem(`${file.name} is not a text file or a picture.`);
      else added.push({ name: file.name, text: content });
    }
    setFiles((before) => [...before, ...added]);
  };
  const pasted = (event) => {
    const given = [...event.clipboardData.files].filter((file) => file.type.startsWith("image/"));
    if (!given.length || event.clipboardData.types.includes("text/plain")) return; // a text's picture of itself
    event.preventDefault();
    attach(given);
  };
  const dropped = (event) => { event.preventDefault(); attach([...event.dataTransfer.files]); };
  return html`<form class="composer" onSubmit=${(event) => { event.preventDefault(); submit(); }} onDragOver=${(event) => event.preventDefault()} onDrop=${dropped}>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    ${files.length > 0 && html`<ul class="attached">${files.map((file, i) => html`<li key=${i}>${file.picture && html`<img src=${file.picture} alt="" />`}${file.name}
      <button type="button" aria-label=${`Remove ${file.name}`} onClick=${() => setFiles(files.filter((_, j) => j !== i))}>×</button></li>`)}</ul>`}
    <div class="row">
      <input ref=${picker} type="file" multiple hidden onChange=${(event) => { attach([...event.currentTarget.files]); event.currentTarget.value = ""; }} />
      <button type="button" aria-label="Attach texts or pictures" title="Attach texts or pictures" onClick=${() => picker.current.click()}>+</button>
      <textarea ref=${area} rows="1" aria-label="Message" placeholder="Message" value=${text} onInput=${(event) => setText(event.currentTarget.value)} onKeyDown=${keys} onPaste=${pasted}></textarea>
      ${isBusy ? html`<button type="button" class="primary" onClick=${stop}>Stop</button>`
        : html`<button type="submit" class="primary" disabled=${!isReady || (!text.trim() && !files.length)}>Send</button>`}
    </div></form>`;
}
