/* A panel with what other programs need to use this server. */

import { snippets } from "../state/connect.js";
import { html } from "./html.js";
import { copy } from "./markdown.js";

export function Connect({ model }) {
  const base = `${location.origin}/v1`;
  const copied = (text) => html`<button type="button" onClick=${(event) => copy(text, event.currentTarget)}>Copy</button>`;
  return html`<details class="settings connect" name="panel"><summary>Connect other programs</summary>
    <p>Base URL <code>${base}</code> ${copied(base)}</p>
    <p class="dim">KEY is a key of this server; any text will do where it needs none. <code>splitinfer keys add NAME --file KEYS</code> makes one.</p>
    ${model && snippets(location.origin, model.name).map(([name, text]) => html`<div key=${name}>
      <p>${name} ${copied(text)}</p><pre tabindex="0">${text}</pre></div>`)}
  </details>`;
}
