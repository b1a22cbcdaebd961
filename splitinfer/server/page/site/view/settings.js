/* The system message and the sampling of a conversation. They are kept with each stroke: what is drawn anew, because an
   answer comes or another field has changed, has the value that was kept. */

import { ANSWER_TOKENS, FIELDS, PRESETS, presetOf } from "../state/sampling.js";
import { html } from "./html.js";

const UNSET = { max_tokens: ANSWER_TOKENS, seed: "random" };

export function Settings({ conversation, defaults, actions }) {
  const system = conversation ? conversation.system : defaults.system ?? "";
  const sampling = (conversation ? conversation.sampling : defaults.sampling) ?? {};
  const set = (name, value) => actions.configure({ sampling: { [name]: value } });
  const numSet = FIELDS.filter(([name]) => sampling[name] !== undefined && sampling[name] !== "").length;
  return html`<details class="settings" name="panel"><summary>Settings${system.trim() ? " · system message" : ""}${numSet ? ` · ${numSet} set` : ""}</summary>
    <div class="fields">
      <label class="whole">System message<textarea rows="3" value=${system} onInput=${(event) => actions.configure({ system: event.currentTarget.value })}></textarea></label>
      <label>Preset<select name="preset" value=${presetOf(sampling) ?? ""} onChange=${(event) => actions.configure({ sampling: PRESETS.find(([name]) => name === event.currentTarget.value)?.[1] ?? {} })}>
        ${presetOf(sampling) === undefined && html`<option value="">your own</option>`}${PRESETS.map(([name]) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>
      ${FIELDS.map(([name, label, least, most, step, help]) => html`<label key=${name} title=${help}>${label}
        <input type="number" name=${name} min=${least} max=${most} step=${step} placeholder=${UNSET[name] ?? "the model's"} value=${sampling[name] ?? ""} onInput=${(event) => set(name, event.currentTarget.value)} /></label>`)}
      <label title="Where the model's template knows it">Reasoning<select name="thinking" value=${sampling.thinking ?? ""} onChange=${(event) => set("thinking", event.currentTarget.value)}>
        <option value="">the model's</option><option value="on">on</option><option value="off">off</option></select></label>
      <label class="check"><input type="checkbox" name="probabilities" checked=${Boolean(sampling.probabilities)} onChange=${(event) => set("probabilities", event.currentTarget.checked)} /> Probabilities of tokens</label>
    </div></details>`;
}
