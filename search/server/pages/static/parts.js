// Parts of a page: rendered by the server like the page itself, fetched when they are wanted or when they changed.

const AT_MOST_EVERY_MS = 1500;

/** The part that is at a URL, as HTML; null if it can't be had. Why not is a part, too, which not all want. */
export async function fetched(url, { refusals = false } = {}) {
  try {
    const answer = await fetch(url, { headers: { accept: "text/html" } });
    if (answer.status === 401) {
      location.reload(); // The page that comes asks to sign in, and leads back here.
      return null;
    }
    return answer.ok || (refusals && answer.status < 500) ? await answer.text() : null;
  } catch {
    return null; // The server is away; the next news brings another try.
  }
}

/** Put a part in place, keeping what has the focus, what is open and what is typed. */
export function put(element, text) {
  if (element.dataset.shown === text) return;
  element.dataset.shown = text;
  const active = element.contains(document.activeElement) ? document.activeElement : null;
  const typed = active instanceof HTMLInputElement ? active.value : null;
  const open = new Set([...element.querySelectorAll("details[open][id]")].map((each) => each.id));
  const scrolled = [...element.querySelectorAll(".wide")].map((each) => each.scrollLeft);
  const before = state(element);
  element.innerHTML = text;
  const after = state(element);
  const said = document.getElementById("said");
  // Told once also to those who can't see it, not each time that it is drawn.
  if (said && before && after && before !== after) said.textContent = `now: ${after}`;
  [...element.querySelectorAll(".wide")].forEach((each, place) => (each.scrollLeft = scrolled[place] ?? 0));
  for (const each of element.querySelectorAll("details[id]")) each.open = open.has(each.id);
  const again = active?.id ? document.getElementById(active.id) : null;
  if (again) {
    if (typed !== null) again.value = typed;
    again.focus({ preventScroll: true });
  }
  loadParts(element);
}

/** The state that a part says, in one line. */
function state(element) {
  return [...element.querySelectorAll("[data-say] > *")].map((each) => each.textContent.trim()).join(", ");
}

/** Load what is to come by itself, and let the links of the others load theirs in place. */
export function loadParts(root) {
  for (const element of root.querySelectorAll("[data-part]")) {
    const load = async () => {
      element.setAttribute("aria-busy", "true");
      const url = element.dataset.part;
      const text = await fetched(url + (url.includes("?") ? "&" : "?") + "part=1", { refusals: true });
      element.removeAttribute("aria-busy");
      if (text !== null) put(element, text);
    };
    const details = element.closest("details");
    if (!("auto" in element.dataset)) {
      element.querySelector("a")?.addEventListener("click", (event) => {
        event.preventDefault();
        event.currentTarget.textContent += " …";
        load();
      }, { once: true });
    } else if (details && !details.open) {
      details.addEventListener("toggle", load, { once: true });
    } else {
      load();
    }
  }
}

/**
 * Fetch live parts again after news of their search, not too often.
 * @returns {((cursors: object) => void)[]} whom to tell of news
 */
export function refreshOn(root) {
  const alive = {};
  const listeners = [...root.querySelectorAll("[data-live]")].map((element) => throttled(element.dataset.search, async () => {
    const text = await fetched(element.dataset.live);
    if (text !== null) put(element, text);
  }));
  // When a driver comes or goes, what is shown once may have changed, too.
  listeners.push((cursors) => {
    for (const [search, cursor] of Object.entries(cursors)) {
      if (search in alive && alive[search] !== cursor.alive && root.querySelector(`[data-search="${CSS.escape(search)}"]`)) {
        if (!cursor.alive) root.querySelectorAll("[data-when-done]").forEach((each) => (each.dataset.auto = ""));
        for (const element of root.querySelectorAll("main > section")) loadParts(element);
      }
      alive[search] = cursor.alive;
    }
  });
  return listeners;
}

/**
 * A listener that does something after news, at most every so often, and once more after the last.
 * @param {string | undefined} search whose news count; all if there is none
 * @param {() => Promise<void>} act
 */
export function throttled(search, act) {
  let busy = false;
  let again = false;
  const run = async () => {
    busy = true;
    do {
      again = false;
      await act();
      await new Promise((done) => setTimeout(done, AT_MOST_EVERY_MS));
    } while (again);
    busy = false;
  };
  return (cursors) => {
    if (search && !(search in cursors)) return;
    again = true;
    if (!busy) run();
  };
}
