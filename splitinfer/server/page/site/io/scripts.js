/* Libraries that are loaded when they are first needed, and what they leave in the window. */

const FILES = { temml: "temml.js", uPlot: "uplot.js" };
const policy = window.trustedTypes?.createPolicy("splitinfer", { createScriptURL: (name) => scriptOf(name) }) ??
  { createScriptURL: scriptOf };
const loading = new Map();

function scriptOf(name) {
  if (!Object.hasOwn(FILES, name)) throw new TypeError(`there is no library ${name}`);
  return new URL(`../../vendor/${FILES[name]}`, import.meta.url).href;
}

/* The library ``name``. */
export function library(name) {
  if (!loading.has(name)) {
    loading.set(name, new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = policy.createScriptURL(name);
      script.onload = () => resolve(window[name]);
      script.onerror = () => {
        loading.delete(name);
        reject(new Error(`${name} could not be loaded`));
      };
      document.head.append(script);
    }));
  }
  return loading.get(name);
}
