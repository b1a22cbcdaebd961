/* Preact by tagged templates: no build, and no text of the page is ever parsed as HTML. */

import htm from "../../vendor/htm.js";
import { h } from "../../vendor/preact.js";

export { render } from "../../vendor/preact.js";
export { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../../vendor/preact-hooks.js";
export const html = htm.bind(h);
