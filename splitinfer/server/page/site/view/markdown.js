/* Markdown of answers as elements. What an answer says is never trusted:

     marked      HTML in it becomes text; pictures become links; formulas become their source, marked as such
     DOMPurify   lets through what texts are made of, and links to the web; no class but a code's language
     policy      the page's Content-Security-Policy allows no script, style or request that a text could bring

   Formulas are then drawn from their source by Temml, which makes MathML elements, and commands for links and classes are
   switched off in it. */

import { Marked } from "../../vendor/marked.js";
import DOMPurify from "../../vendor/purify.js";
import { library } from "../io/scripts.js";

const MOST_FORMULA = 4000; // characters
const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escaped = (text) => text.replace(/[&<>"']/g, (one) => ENTITIES[one]);

const block = {
  name: "displayMaths", level: "block",
  start: (text) => text.match(/\$\$|\\\[/)?.index,
  tokenizer(text) {
    const found = /^\$\$([^$]+?)\$\$(?:\n|$)/.exec(text) ?? /^\\\[([\s\S]+?)\\\](?:\n|$)/.exec(text);
    return found ? { type: "displayMaths", raw: found[0], text: found[1].trim() } : undefined;
  },
  renderer: (token) => `<p><code class="maths-display">${escaped(token.text)}</code></p>`,
};
const inline = {
  name: "inlineMaths", level: "inline",
  start: (text) => text.match(/\$|\\\(|\\\[/)?.index,
  tokenizer(text) {
    const found = /^\\\(([\s\S]+?)\\\)/.exec(text) ?? /^\\\[([\s\S]+?)\\\]/.exec(text) ?? /^\$\$([^$\n]+?)\$\$/.exec(text) ??
      /^\$(?![\s$])([^$\n]*?[^\s$\\])\$(?!\d)/.exec(text);
    return found ? { type: "inlineMaths", raw: found[0], text: found[1].trim() } : undefined;
  },
  renderer: (token) => `<code class="maths">${escaped(token.text)}</code>`,
};

const marked = new Marked({ gfm: true, async: false }, { extensions: [block, inline] }, {
  renderer: {
    html: ({ text }) => (/^<br\s*\/?>$/i.test(text.trim()) ? "<br>" : escaped(text)),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || "picture")}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    code: ({ text, lang }) => `<pre><code class="language-${escaped((lang ?? "").split(/\s/)[0])}">${escaped(text)}\n</code></pre>`,
  },
});

const RULES = {
  ALLOWED_TAGS: ["a", "b", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "li", "ol",
    "p", "pre", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["href", "title", "class", "start", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, RETURN_TRUSTED_TYPE: true,
};

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.hasAttribute("class") && !(node.tagName === "CODE" && /^(?:maths|maths-display|language-[\w+#.-]*)$/.test(node.className))) {
    node.removeAttribute("class");
  }
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  }
});

/* A text's HTML, clean. */
export function cleanHtml(text) {
  return DOMPurify.sanitize(marked.parse(text), RULES);
}

/* Show a text in an element, with a button to copy each block of code, and its formulas drawn. */
export function show(element, text) {
  element.innerHTML = cleanHtml(text);
  element.querySelectorAll("pre").forEach(addCopy);
  element.querySelectorAll("table").forEach(addFrame);
  const formulas = [...element.querySelectorAll("code.maths, code.maths-display")];
  if (formulas.length) library("temml").then((temml) => formulas.forEach((one) => draw(temml, one))).catch(() => {});
}

function addCopy(pre) {
  const code = pre.querySelector("code"), frame = document.createElement("div"), bar = document.createElement("div");
  const language = /language-(.+)/.exec(code?.className ?? "")?.[1] ?? "", button = document.createElement("button");
  frame.className = "code";
  bar.className = "code-bar";
  pre.tabIndex = 0;
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.setAttribute("aria-label", `Copy this ${language || "code"}`);
  button.addEventListener("click", () => copy(code.textContent, button));
  bar.append(Object.assign(document.createElement("span"), { textContent: language }), button);
  pre.replaceWith(frame);
  frame.append(bar, pre);
}

function addFrame(table) {
  const frame = document.createElement("div");
  frame.className = "wide";
  frame.tabIndex = 0;
  table.replaceWith(frame);
  frame.append(table);
}

/* Copy a text, and say so on the button. */
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = copyByHand(text) ? "Copied" : "Not allowed";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

/* Over plain http from another machine there is no clipboard API (secure contexts only, W3C). */
function copyByHand(text) {
  const area = Object.assign(document.createElement("textarea"), { value: text });
  document.body.append(area);
  area.select();
  const isDone = document.execCommand("copy");
  area.remove();
  return isDone;
}

function draw(temml, element) {
  if (!element.isConnected || element.textContent.length > MOST_FORMULA) return;
  const source = element.textContent, drawn = document.createElement("span");
  drawn.className = element.className;
  try {
    temml.render(source, drawn, { displayMode: element.className === "maths-display", throwOnError: true, trust: false, maxExpand: 200 });
    element.replaceWith(drawn);
  } catch { /* it stays its source */ }
}
