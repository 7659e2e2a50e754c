// Server-sent news: by search id, how many events and complete individuals it has. What they are about is fetched.

const AGAIN_MS = 5000;

/**
 * Listen while the page is seen; a hidden one holds no connection.
 * @param {HTMLElement} said where to say whether the page is live
 * @param {(cursors: Record<string, {events: number, done: number, alive: boolean}>) => void} tell
 */
export function follow(said, tell) {
  let source = null;
  const say = (text) => {
    if (said.textContent !== text) said.textContent = text;
  };
  const lost = async () => {
    say("- not live: the server doesn't answer");
    // The browser connects again by itself after a silence, but not after an answer that is no stream.
    if (source?.readyState !== EventSource.CLOSED) return;
    source = null;
    setTimeout(open, AGAIN_MS);
    if ((await signedOut()) && !source) say("- not live: signed out");
  };
  const open = () => {
    if (source || document.hidden) return;
    source = new EventSource("/api/news");
    source.addEventListener("open", () => say("- live"));
    source.addEventListener("error", lost);
    source.addEventListener("cursors", (event) => tell(JSON.parse(event.data)));
  };
  const close = () => {
    source?.close();
    source = null;
  };
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  addEventListener("pagehide", close);
  addEventListener("pageshow", open);
  open();
}

/** Whether the server wants a token; an event source doesn't tell why it was refused. */
async function signedOut() {
  const enough = new AbortController();
  try {
    return (await fetch("/api/news", { signal: enough.signal })).status === 401;
  } catch {
    return false;
  } finally {
    enough.abort();
  }
}
