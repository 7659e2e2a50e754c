// What the server was asked to start: looked after until it is settled what became of it.
import { fetched, put } from "./parts.js";

const EVERY_MS = 1000;
let watching = false;

/** Fetch what was started again and again until nothing of it is unsettled any more. */
export async function watchStarted() {
  if (watching) return;
  watching = true;
  while (document.querySelector("[data-started] [data-unsettled]")) {
    await pause();
    if (!document.hidden) await refreshStarted();
  }
  watching = false;
}

/** Fetch anew what became of what was started, where the page says that. */
export async function refreshStarted() {
  const started = document.querySelector("[data-started]");
  const text = started && (await fetched(started.dataset.started));
  if (text) put(started, text);
}

/** Wait until it may have changed. */
export function pause() {
  return new Promise((done) => setTimeout(done, EVERY_MS));
}
