/* The system message and the sampling of a conversation. They are kept with each stroke: what is drawn anew, because an
   answer comes or another field has changed, has the value that was kept. */

import { FIELDS, PRESETS, inForce, presetOf } from "../state/sampling.js";
import { html } from "./html.js";
import { Panel } from "./panel.js";

/* ``given``: {system, sampling} of the conversation. ``model``: whose values fill the empty fields. */
export function Settings({ given, model, actions }) {
  const { system = "", sampling = {} } = given, preset = presetOf(sampling);
  const set = (name, value) => actions.configure({ sampling: { [name]: value } });
  const numSet = [system.trim(), ...FIELDS.map(([name]) => sampling[name])].filter((value) => value !== undefined && value !== "").length;
  const thinks = model.defaults.enable_thinking ?? null;
  return html`<${Panel} id="settings" label=${`Settings${numSet ? ` (${numSet})` : ""}`}>
    <div class="fields">
      <label class="whole">System message<textarea rows="3" value=${system} onInput=${(event) => actions.configure({ system: event.currentTarget.value })}></textarea></label>
      <label>Preset<select name="preset" value=${preset ?? ""} onChange=${(event) => actions.configure({ sampling: PRESETS.find(([name]) => name === event.currentTarget.value)?.[1] ?? {} })}>
        ${preset === undefined && html`<option value="">custom</option>`}${PRESETS.map(([name]) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>
      ${FIELDS.map(([name, label, least, most, step, help]) => html`<label key=${name} title=${help}>${label}
        <input type="number" name=${name} min=${least} max=${most} step=${step} placeholder=${inForce(model, name)} value=${sampling[name] ?? ""} onInput=${(event) => set(name, event.currentTarget.value)} /></label>`)}
      ${thinks !== null && html`<label>Reasoning<select name="thinking" value=${sampling.thinking ?? ""} onChange=${(event) => set("thinking", event.currentTarget.value)}>
        <option value="">${thinks ? "on" : "off"} (default)</option><option value="on">on</option><option value="off">off</option></select></label>`}
      <label class="check whole"><input type="checkbox" name="probabilities" checked=${Boolean(sampling.probabilities)} onChange=${(event) => set("probabilities", event.currentTarget.checked)} /> Show the probability of each token</label>
    </div></${Panel}>`;
}
