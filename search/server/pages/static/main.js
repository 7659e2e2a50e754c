// What every page has: parts that are fetched later or again, and buttons that ask for something.
import { follow } from "./news.js";
import { loadParts, refreshOn } from "./parts.js";
import { watchStarted } from "./started.js";
import { steer } from "./steering.js";

document.documentElement.classList.add("js");
loadParts(document);
steer();
const listeners = refreshOn(document);

for (const [selector, module] of [["[data-course]", "./course.js"], ["[data-pareto]", "./pareto.js"]]) {
  const figure = document.querySelector(selector);
  if (figure) {
    const { draw } = await import(module);
    listeners.push(draw(figure));
  }
}
const form = document.querySelector("form[data-launching]");
if (form) {
  const { launchFrom } = await import("./launching.js");
  launchFrom(form);
}
watchStarted();
if (document.querySelector("[data-live]")) {
  follow(document.getElementById("news"), (cursors) => listeners.forEach((tell) => tell?.(cursors)));
}
