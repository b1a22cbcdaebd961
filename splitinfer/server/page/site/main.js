/* The page: its frame, and what is shown in it. */

import { makeController } from "./controller.js";
import { modelOf } from "./state/conversation.js";
import { Chat } from "./view/chat.js";
import { Connect } from "./view/connect.js";
import { html, render, useEffect, useState } from "./view/html.js";
import { Pipeline } from "./view/pipeline.js";
import { Settings } from "./view/settings.js";
import { Sidebar } from "./view/sidebar.js";

const controller = makeController(), { actions } = controller;

function App() {
  const [state, setState] = useState(controller.state), [isOpen, setOpen] = useState(false);
  useEffect(() => controller.listen(setState), []);
  useEffect(() => {
    const keys = (event) => shortcut(event, setOpen);
    addEventListener("keydown", keys);
    return () => removeEventListener("keydown", keys);
  }, []);
  const isChat = state.view === "chat", given = state.conversations[state.current] ?? state.defaults, model = modelOf(state.models, given);
  return html`<a class="skip" href="#main">Skip to content</a>
    <header>
      ${isChat && html`<button type="button" class="menu" aria-expanded=${isOpen} aria-label="Conversations" onClick=${() => setOpen(!isOpen)}>☰</button>`}
      <h1>splitinfer</h1>
      <div class="tabs" role="group" aria-label="View">
        ${["chat", "pipeline"].map((view) => html`<button type="button" key=${view} aria-pressed=${state.view === view} onClick=${() => actions.setView(view)}>${view === "chat" ? "Chat" : "Pipeline"}</button>`)}</div>
      ${state.models.length > 1 ? html`<select class="model" aria-label="Model" value=${model.name} onChange=${(event) => actions.configure({ model: event.currentTarget.value })}>
        ${state.models.map(({ name }) => html`<option key=${name} value=${name}>${name}</option>`)}</select>` : html`<span class="dim model">${model?.name ?? ""}</span>`}
      ${isChat && model && html`<${Settings} given=${given} model=${model} actions=${actions} /><${Connect} model=${model} />`}
    </header>
    ${state.problem && html`<div class="problem" role="alert">${state.problem}<button type="button" aria-label="Dismiss" onClick=${actions.dismiss}>×</button></div>`}
    <main id="main" class=${isOpen ? "open" : ""}>
      ${state.needsKey ? html`<${Key} enter=${actions.enter} />` : isChat ? html`
        <${Sidebar} state=${state} actions=${actions} onChosen=${() => setOpen(false)} />
        <${Chat} state=${state} model=${model} actions=${actions} />` : html`<${Pipeline} state=${state} actions=${actions} />`}
    </main>
    <div class="hidden" role="status">${state.announced}</div>`;
}

/* A key buys a session, and no script keeps it. A link may bring it (…/#key=KEY), which is taken out of the address. */
const brought = new URLSearchParams(location.hash.slice(1)).get("key") ?? "";
if (brought) history.replaceState(null, "", location.pathname);

function Key({ enter }) {
  const [key, setKey] = useState(brought);
  return html`<form class="key-form" onSubmit=${(event) => { event.preventDefault(); enter(key); setKey(""); }}>
    <h2>This server needs a key</h2><p class="dim">The server's owner makes one with <code>splitinfer keys add NAME --file KEYS</code>.</p>
    <label>Key<input type="password" name="key" autocomplete="current-password" value=${key} onInput=${(event) => setKey(event.currentTarget.value)} /></label>
    <button type="submit" class="primary" disabled=${!key.trim()}>Enter</button></form>`;
}

function shortcut(event, setOpen) {
  const isCommand = event.metaKey || event.ctrlKey;
  if (event.key === "Escape" && !document.querySelector(":popover-open")) {
    setOpen(false);
    actions.stop();
  } else if (isCommand && event.key.toLowerCase() === "k") {
    event.preventDefault();
    setOpen(true);
    requestAnimationFrame(() => document.getElementById("search")?.focus());
  } else if (isCommand && event.shiftKey && event.key.toLowerCase() === "o") {
    event.preventDefault();
    actions.newChat();
  }
}

render(html`<${App} />`, document.getElementById("app"));
controller.start();
