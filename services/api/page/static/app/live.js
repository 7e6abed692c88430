// Owns data that follow the platform: a value that is read again when something has happened. Must not draw anything.
import { useEffect, useState } from "../vendor/vendor.js";
import { runPath, stream } from "./api.js";

const SETTLE_MS = 400;

/** What `load(abort)` answers, again every `everyMs` and after `again()`. {value, error, again}. */
export function useLoaded(load, keys, everyMs = 0) {
  const [state, setState] = useState({ value: undefined, error: null, round: 0 });
  useEffect(() => setState((before) => ({ ...before, value: undefined, error: null })), keys);
  useEffect(() => {
    const abort = new AbortController();
    let timer;
    const look = async () => {
      try {
        const value = await load(abort.signal);
        if (!abort.signal.aborted) setState((before) => ({ ...before, value, error: null }));
      } catch (error) {
        if (!abort.signal.aborted) setState((before) => ({ ...before, error }));
      }
      if (everyMs && !abort.signal.aborted) timer = setTimeout(look, everyMs);
    };
    look();
    return () => { abort.abort(); clearTimeout(timer); };
  }, [...keys, state.round]);
  return { ...state, again: () => setState((before) => ({ ...before, round: before.round + 1 })) };
}

/** Calls `changed()` soon after anything happened in a run. The text says why the stream is not connected, "" if it is. */
export function useRunEvents(run, changed) {
  const [problem, setProblem] = useState("");
  useEffect(() => {
    const abort = new AbortController();
    let timer = 0;
    const soon = () => { timer ||= setTimeout(() => { timer = 0; changed(); }, SETTLE_MS); };
    stream(runPath(run, "/events"), soon, abort.signal, setProblem);
    return () => { abort.abort(); clearTimeout(timer); };
  }, [run]);
  return problem;
}
