// What the scripts for node share; the same contract as probe.py's.
import { readFileSync } from "node:fs";
import path from "node:path";

export const URL = process.env.CLIENT_URL ?? "http://127.0.0.1:8080";
export const KEY = process.env.CLIENT_KEY ?? "none";
export const MODEL = process.env.CLIENT_MODEL ?? "scripted";
export const QUESTION = "What is the weather in Oslo?";
export const ASKED = [{ role: "user", content: QUESTION }];
export const TALE = "There was a king who had three daughters, and the youngest told the best tales of all.";
export const ANSWER = "It is sunny in Oslo, as the tool says.";
export const THOUGHT = "The user asks for something that the tool can do.";
export const SCHEMA = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };

export function same(found, expected) {
  const [a, b] = [JSON.stringify(found), JSON.stringify(expected)];
  if (a !== b) throw new Error(`${String(a).slice(0, 300)} is not ${String(b).slice(0, 300)}`);
}

export async function refused(status, naming, call) {
  try {
    await call();
  } catch (error) {
    if ((error.status ?? error.statusCode) !== status) throw error;
    if (!String(error.message).includes(naming)) throw new Error(`${error.message} does not name ${naming}`);
    return error;
  }
  throw new Error(`${naming} was taken`);
}

// The packages are installed in the folder that CLIENT_MODULES names, not beside this file.
export async function installed(name) {
  const root = path.join(process.env.CLIENT_MODULES, "node_modules", ...name.split("/"));
  const described = JSON.parse(readFileSync(path.join(root, "package.json"), "utf8"));
  const entry = described.exports?.["."] ?? described.exports;
  const found = [entry?.import, entry?.default, described.module, described.main].find((one) => one);
  const file = typeof found === "string" ? found : (found.default ?? found.node);
  return { module: await import(path.join(root, file)), version: described.version };
}

export async function run(version, abilities) {
  const found = {};
  const only = process.argv.slice(2);
  for (const [name, ability] of Object.entries(abilities)) {
    if (only.length && !only.includes(name)) continue;
    try {
      await ability();
      found[name] = null;
    } catch (error) {
      found[name] = `${error.name}: ${error.message}`.slice(0, 600);
      if (only.length) console.error(error);
    }
  }
  process.stdout.write(JSON.stringify({ version, found }) + "\n");
}
