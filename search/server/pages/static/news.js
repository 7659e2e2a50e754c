// Server-sent news: by search id, how many events and complete individuals it has. What they are about is fetched.

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
  const open = () => {
    if (source || document.hidden) return;
    source = new EventSource("/api/news");
    source.addEventListener("open", () => say("- live"));
    source.addEventListener("error", () => say("- not live: the server doesn't answer"));
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
