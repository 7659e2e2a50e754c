// What charts have in common: colours that are those of the page, and a size that follows it.

const COLOURS = ["--phase-1", "--phase-2", "--phase-3", "--phase-4"];

/** A colour of the page by the name of its property. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** The colour of the n-th phase. */
export function phaseColour(place) {
  return colour(COLOURS[place % COLOURS.length]);
}

/** Distances between the marks of an axis that counts something. */
export const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap((unit) => [unit, 2 * unit, 5 * unit]);

/** Options of an axis in the page's colours. */
export function axis(label, options = {}) {
  return {
    label,
    stroke: colour("--soft"),
    grid: { stroke: colour("--line"), width: 1 },
    ticks: { stroke: colour("--line"), width: 1 },
    font: "12px system-ui, sans-serif",
    labelFont: "12px system-ui, sans-serif",
    labelSize: 20,
    ...options,
  };
}

/**
 * Make a chart, and again when the colours change; its width follows the page's.
 * @param {HTMLElement} place
 * @param {() => object} make options, without a size
 * @param {() => number[][]} data
 * @returns {() => object} gives the chart as it is now
 */
export function chart(place, make, data) {
  const size = () => ({ width: Math.max(200, place.clientWidth), height: Math.max(220, Math.min(380, place.clientWidth * 0.5)) });
  let made = null;
  const build = () => {
    made?.destroy();
    made = new uPlot({ ...make(), ...size() }, data(), place);
  };
  build();
  new ResizeObserver(() => made.setSize(size())).observe(place);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", build);
  return () => made;
}
