/* The dials of serving as a form: what was entered -> the changes to ask for. Pure. */

/* The value of a dial as its field shows it: what was set; nothing where the default is in force. */
export const shown = (dial) => (dial.value === null ? "" : String(dial.value));

/* What is in force, in words. */
export function inForce(dial) {
  if (dial.in_force === null) return "off";
  return `${dial.in_force}${dial.unit ? ` ${dial.unit}` : ""}`;
}

/* What an empty field stands for. */
export const byDefault = (dial) => (dial.value === null ? `default: ${inForce(dial)}` : "default");

/* The changes by what was entered: {name: text}. An empty field is the default; what is as it was, is no change. */
export function changesOf(dials, entered) {
  const changes = {};
  for (const dial of dials) {
    const text = entered[dial.name]?.trim();
    if (text === undefined || text === shown(dial)) continue;
    changes[dial.name] = text === "" ? null : dial.kind === "choice" ? text : Number(text);
  }
  return changes;
}

/* How many are not at their default. */
export const numSet = (dials) => dials.filter((dial) => dial.value !== null).length;
