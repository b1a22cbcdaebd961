/* A panel with what other programs need to use this server. */

import { snippets } from "../state/connect.js";
import { html } from "./html.js";
import { copy } from "./markdown.js";
import { Panel } from "./panel.js";

export function Connect({ model }) {
  const base = `${location.origin}/v1`;
  const copied = (text) => html`<button type="button" onClick=${(event) => copy(text, event.currentTarget)}>Copy</button>`;
  return html`<${Panel} id="connect" label="Connect">
    <p class="dim">Replace KEY with an API key; <code>splitinfer keys add NAME --file KEYS</code> makes one. If this server needs no key, any text works.</p>
    <p>Base URL <code>${base}</code> ${copied(base)}</p>
    ${snippets(location.origin, model.name).map(([name, text]) => html`<details key=${name} name="snippet"><summary>${name}</summary>
      <div class="snippet"><pre tabindex="0">${text}</pre>${copied(text)}</div></details>`)}
  </${Panel}>`;
}
