/* A button of the header, and the panel that it opens: over the chat, so that nothing below it moves. The browser closes
   it, at Escape or a click elsewhere. */

import { html } from "./html.js";

export function Panel({ id, label, children }) {
  return html`<button type="button" popovertarget=${id}>${label}</button>
    <section class="panel" popover="auto" id=${id} aria-label=${label}>${children}</section>`;
}
