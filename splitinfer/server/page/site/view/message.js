/* One message: a user's, or an answer with its reasoning, calls of tools, figures and what can be done with it. */

import { blocks } from "../state/blocks.js";
import { figuresOf, waitOf } from "../state/stream.js";
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./html.js";
import { copy, show } from "./markdown.js";

/* A text as markdown, drawn again only when it changes. */
function Markdown({ text }) {
  const element = useRef(null);
  useLayoutEffect(() => show(element.current, text), [text]);
  return html`<div class="markdown" ref=${element}></div>`;
}

/* A text that grows: whole blocks stay as they are. */
function Growing({ text }) {
  return html`<div>${blocks(text).map((one, i) => html`<${Markdown} key=${i} text=${one} />`)}</div>`;
}

const count = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

/* The figures of an answer in words. */
export function inWords(figures) {
  if (!figures) return "";
  const parts = [];
  if (figures.rate) parts.push(`${figures.rate.toFixed(1)} tokens/s`);
  if (figures.ttft !== null) parts.push(`${(figures.ttft / 1000).toFixed(2)} s to first token`);
  if (figures.generated) parts.push(count(figures.generated, "token"));
  if (figures.reasoning) parts.push(`${figures.reasoning.toLocaleString("en")} of reasoning`);
  if (figures.prompt) parts.push(`${figures.prompt.toLocaleString("en")} in the prompt${figures.cached ? `, ${figures.cached.toLocaleString("en")} cached` : ""}`);
  if (figures.tried) parts.push(`${figures.right.toLocaleString("en")} of ${count(figures.tried, "draft")} right`);
  return parts.join(" · ");
}

function Reasoning({ text, isComing }) {
  if (!text) return null;
  return html`<details class="reasoning" open=${isComing}>
    <summary>${isComing ? "Reasoning …" : `Reasoning, ${count(text.trim().split(/\s+/).length, "word")}`}</summary>
    <div class="plain">${text}</div>
  </details>`;
}

function Calls({ calls }) {
  return calls.map((call, i) => html`<details class="call" key=${i}>
    <summary>Tool call: <code>${call.name}</code></summary><pre tabindex="0">${pretty(call.arguments)}</pre>
  </details>`);
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 1);
  } catch {
    return text;
  }
}

function Probabilities({ logprobs }) {
  const [chosen, setChosen] = useState(null);
  if (!logprobs?.length) return null;
  const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
  const token = chosen === null ? null : logprobs[chosen];
  return html`<details class="probabilities"><summary>Probabilities of ${count(logprobs.length, "token")}</summary>
    <div class="tokens">${logprobs.slice(0, 2000).map((one, i) => html`<button type="button" key=${i} aria-pressed=${chosen === i}
      class=${`token p${Math.min(9, Math.floor(10 * Math.exp(one.logprob)))}`} title=${percent(one.logprob)}
      onClick=${() => setChosen(chosen === i ? null : i)}>${one.token.replace(/\n/g, "↵")}</button>`)}</div>
    ${token && html`<table aria-label="Most likely tokens here"><tbody>${token.top_logprobs.map((one) => html`<tr>
      <td><code>${JSON.stringify(one.token)}</code></td><td>${percent(one.logprob)}</td></tr>`)}</tbody></table>`}
  </details>`;
}

const ENDS = { length: "Stopped at the token limit.", stopped: "Stopped.", cut: "Interrupted.", edited: "Edited." };

function Editor({ text, isAnswer, onDone, onCancel }) {
  const area = useRef(null);
  useEffect(() => { area.current.focus(); area.current.setSelectionRange(text.length, text.length); }, []);
  const keys = (event) => {
    if (event.key === "Escape") { event.stopPropagation(); onCancel(); }
    if (event.key === "Enter" && (event.metaKey || event.ctrlKey)) onDone(area.current.value);
  };
  return html`<div class="editor">
    <textarea ref=${area} aria-label="Edited text" rows=${Math.min(16, text.split("\n").length + 1)} onKeyDown=${keys}>${text}</textarea>
    <div class="row"><button type="button" class="primary" onClick=${() => onDone(area.current.value)}>${isAnswer ? "Save as a branch" : "Send as a branch"}</button>
    <button type="button" onClick=${onCancel}>Cancel</button></div></div>`;
}

/* ``answer``: what is coming, if it is. ``place``: {index, ids} among its siblings. ``pause``: why it pauses. */
export function Message({ node, answer, place, actions, isBusy, isLast, pause }) {
  const [isEdited, setEdited] = useState(false);
  const isAnswer = node.role === "assistant", content = answer?.content ?? node.content;
  const reasoning = answer?.reasoning ?? node.reasoning, calls = answer?.calls ?? node.calls ?? [];
  const figures = useMemo(() => (answer ? figuresOf(answer) : node.figures), [answer, node.figures]);
  const said = !answer && (node.error ?? (isAnswer ? ENDS[node.ended] : null));
  const canContinue = isAnswer && isLast && !answer && !reasoning && !calls.length && content && node.ended && node.ended !== "stop";
  return html`<article class=${`message ${node.role}`} aria-busy=${Boolean(answer)} aria-label=${isAnswer ? "Answer" : "Your message"}>
    ${node.files?.map((file, i) => file.picture ? html`<figure class="picture" key=${i}><img src=${file.picture} alt=${file.name} /></figure>` : html`<details class="file" key=${i}><summary>${file.name}, ${count(file.text.length, "character")}</summary><pre tabindex="0">${file.text.slice(0, 20000)}</pre></details>`)}
    <${Reasoning} text=${reasoning} isComing=${Boolean(answer) && !content} />
    ${isEdited
      ? html`<${Editor} text=${content} isAnswer=${isAnswer} onCancel=${() => setEdited(false)} onDone=${(text) => { setEdited(false); actions.edit(node.id, text); }} />`
      : isAnswer ? (answer ? html`<${Growing} text=${content} />` : html`<${Markdown} text=${content} />`) : html`<div class="plain">${content}</div>`}
    <${Calls} calls=${calls} />
    ${answer && pause && html`<p class="pause" role="status">${pause.text} ${pause.help}</p>`}
    ${answer && !pause && !content && !reasoning && html`<p class="dim waiting">${waitOf(answer)} <span class="dots"></span></p>`}
    ${said && html`<p class=${node.error ? "error" : "dim"}>${said}</p>`}
    ${!answer && html`<${Probabilities} logprobs=${node.logprobs} />`}
    <footer>
      ${place.ids.length > 1 && html`<span class="branches"><button type="button" aria-label="Previous branch" disabled=${isBusy || place.index === 0} onClick=${() => actions.step(node.id, -1)}>‹</button>
        ${place.index + 1} / ${place.ids.length}<button type="button" aria-label="Next branch" disabled=${isBusy || place.index === place.ids.length - 1} onClick=${() => actions.step(node.id, 1)}>›</button></span>`}
      ${!answer && !isEdited && html`<span class="actions">
        <button type="button" onClick=${(event) => copy(content, event.currentTarget)}>Copy</button>
        <button type="button" disabled=${isBusy} onClick=${() => setEdited(true)}>Edit</button>
        ${isAnswer && html`<button type="button" disabled=${isBusy} onClick=${() => actions.retry(node.id)}>Retry</button>`}
        ${canContinue && html`<button type="button" disabled=${isBusy} onClick=${() => actions.continue(node.id)}>Continue</button>`}
        <button type="button" disabled=${isBusy} onClick=${() => actions.removeMessage(node.id)}>Remove</button>
      </span>`}
      ${isAnswer && html`<span class="dim figures">${inWords(figures)}</span>`}
    </footer>
  </article>`;
}
