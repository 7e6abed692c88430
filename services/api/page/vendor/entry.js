// What the page uses of other libraries: one module, so that it needs no import map.
import { h } from "preact";
import htm from "htm";

export { render } from "preact";
export { useEffect, useMemo, useRef, useState } from "preact/hooks";
export { signal, computed, effect, batch } from "@preact/signals";
export { createParser } from "eventsource-parser";
export { default as uPlot } from "uplot";
export const html = htm.bind(h);
