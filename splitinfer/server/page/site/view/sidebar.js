/* The conversations: a list with search, and what is done with all of them. */

import { search } from "../state/library.js";
import { html, useMemo, useRef, useState } from "./html.js";

const MOST = 300; // entries

export function Sidebar({ state, actions, onChosen }) {
  const [query, setQuery] = useState(""), picker = useRef(null);
  const kept = useMemo(() => Object.values(state.conversations).filter((one) => one.root.length), [state.conversations]);
  const found = useMemo(() => search(kept, query), [kept, query]);
  const rename = (entry) => {
    const title = prompt("Title", entry.title);
    if (title?.trim()) actions.rename(entry.id, title.trim());
  };
  const remove = (entry) => confirm(`Remove “${entry.title}”?`) && actions.removeChat(entry.id);
  return html`<nav class="sidebar" aria-label="Conversations">
    <button type="button" class="primary new" onClick=${() => { actions.newChat(); onChosen(); }}>New conversation</button>
    <input type="search" id="search" placeholder="Search" aria-label="Search conversations" value=${query} onInput=${(event) => setQuery(event.currentTarget.value)} />
    <ul>${found.slice(0, MOST).map((entry) => html`<li key=${entry.id} class=${entry.id === state.current ? "current" : ""}>
      <button type="button" class="title" title=${entry.title} aria-current=${entry.id === state.current ? "true" : undefined} onClick=${() => { actions.open(entry.id); onChosen(); }}>${entry.title}</button>
      <span class="small"><button type="button" aria-label=${`Rename ${entry.title}`} onClick=${() => rename(entry)}>✎</button>
        <button type="button" aria-label=${`Remove ${entry.title}`} onClick=${() => remove(entry)}>×</button></span></li>`)}</ul>
    ${query && !found.length && html`<p class="dim" role="status">No conversation matches.</p>`}
    <div class="row files">
      <input ref=${picker} type="file" accept=".json,application/json" multiple hidden onChange=${(event) => { actions.importFiles([...event.currentTarget.files]); event.currentTarget.value = ""; }} />
      <button type="button" onClick=${() => picker.current.click()}>Import</button>
      <button type="button" disabled=${!state.conversations[state.current]?.root.length} onClick=${actions.exportOne}>Export</button>
      <button type="button" disabled=${!kept.length} onClick=${actions.exportAll}>Export all</button>
    </div>
    ${!state.isLasting && html`<p class="dim">This browser stores nothing: the conversations are lost when you close the page.</p>`}
  </nav>`;
}
