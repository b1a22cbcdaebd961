/* A growing text in blocks, so that of a long answer only its end is drawn again. Pure. */

/* The text cut at empty lines outside of fences, lists, quotes and formulas; joined with "" it is the text again. */
export function blocks(text) {
  const found = [];
  let start = 0, at = 0, fence = null, isMaths = false;
  for (const line of text.split(/(?<=\n)/)) {
    const mark = /^ {0,3}(`{3,}|~{3,})/.exec(line);
    if (mark && fence === null && !isMaths) fence = mark[1];
    else if (mark && fence !== null && mark[1][0] === fence[0] && mark[1].length >= fence.length &&
      line.trim() === mark[1]) fence = null;
    else if (fence === null && (line.split("$$").length % 2 === 0)) isMaths = !isMaths;
    at += line.length;
    if (fence === null && !isMaths && !line.trim() && text.slice(start, at).trim() && endsHere(text, at)) {
      found.push(text.slice(start, at));
      start = at;
    }
  }
  if (start < text.length) found.push(text.slice(start));
  return found;
}

/* Whether a block may end before what begins at ``at``: not where a list or a quote goes on, or nothing has come yet. */
function endsHere(text, at) {
  const end = text.indexOf("\n", at), line = text.slice(at, end < 0 ? text.length : end);
  return end >= 0 && line.trim() !== "" && !/^(\s|[-*+>]|\d+[.)])/.test(line);
}
