/* The dials of serving: read by everybody, turned by who may. */

import { byDefault, changesOf, inForce, numSet, shown } from "../state/dials.js";
import { html, useEffect, useState } from "./html.js";

/* ``given``: {dials, may_change}, or null. ``set``: those that are set, as the pipeline says, so that changes of others are
   seen. ``problem``: why the last change was refused. */
export function Dials({ given, set, problem, actions }) {
  const [entered, setEntered] = useState({}), [isOpen, setOpen] = useState(false);
  const known = JSON.stringify(set ?? {});
  useEffect(() => { if (isOpen) actions.readDials(); }, [isOpen, known]);
  const count = Object.keys(set ?? {}).length;
  return html`<details class="dials" onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>Dials of serving${count ? ` · ${count} set` : ""}</summary>
    ${given === null ? html`<p class="dim">…</p>` : given.may_change
      ? html`<${Form} dials=${given.dials} entered=${entered} setEntered=${setEntered} problem=${problem} actions=${actions} />`
      : html`<p class="dim">Only a key with the scope <code>admin</code> may change these.</p><ul>${given.dials.map((dial) => html`
        <li key=${dial.name}><b>${dial.name}</b> ${inForce(dial)}${dial.value === null ? html` <span class="dim">(default)</span>` : ""}
          <p class="dim">${dial.meaning}</p></li>`)}</ul>`}
  </details>`;
}

function Form({ dials, entered, setEntered, problem, actions }) {
  const changes = changesOf(dials, entered), isChanged = Object.keys(changes).length > 0;
  const enter = (name, text) => setEntered({ ...entered, [name]: text });
  const turn = async (event) => {
    event.preventDefault();
    if (isChanged && (await actions.turnDials(changes))) setEntered({});
  };
  return html`<form onSubmit=${turn}><ul>${dials.map((dial) => html`<li key=${dial.name}>
      <label>${dial.name}<${Control} dial=${dial} text=${entered[dial.name] ?? shown(dial)} enter=${enter} /></label>
      <p class="dim" id=${`dial-${dial.name}`}>${dial.meaning}${dial.unit ? ` In ${dial.unit}.` : ""}</p></li>`)}</ul>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    <div class="row buttons"><button type="submit" class="primary" disabled=${!isChanged}>Apply</button>
      <button type="button" disabled=${!isChanged} onClick=${() => setEntered({})}>Undo</button>
      <button type="button" disabled=${numSet(dials) === 0} onClick=${() => { setEntered(Object.fromEntries(dials.map((dial) => [dial.name, ""]))); }}>Reset to defaults</button></div>
  </form>`;
}

function Control({ dial, text, enter }) {
  const told = { name: dial.name, value: text, "aria-describedby": `dial-${dial.name}` };
  if (dial.kind === "choice") {
    return html`<select ...${told} onChange=${(event) => enter(dial.name, event.currentTarget.value)}>
      <option value="">${byDefault(dial)}</option>${dial.choices.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}</select>`;
  }
  return html`<input type="number" ...${told} min=${dial.least} max=${dial.most} step=${dial.kind === "whole" ? 1 : "any"}
    placeholder=${byDefault(dial)} onInput=${(event) => enter(dial.name, event.currentTarget.value)} />`;
}
