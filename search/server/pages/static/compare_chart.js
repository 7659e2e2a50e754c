// Chart of several searches' courses: per group the mean of the best so far, and a band between the worst and the best.
import { SCALES, WHOLE, axis, chart, phaseColour, read } from "./charts.js";

/** @param {HTMLElement} figure with `data-compare`, the URL of the courses */
export async function draw(figure) {
  const place = figure.querySelector(".plot");
  place.setAttribute("aria-busy", "true");
  const found = await read(figure.dataset.compare);
  place.removeAttribute("aria-busy");
  if (!found) return;
  const { x, by, groups } = found;
  const counted = by === "hours" ? "hours" : "individuals";
  const scale = SCALES[figure.dataset.scale];
  const shown = (values) => values.map((value) => (value === null ? null : scale.value(value)));
  const stepped = uPlot.paths.stepped({ align: 1 });
  const edge = (label, colour) => ({ label, class: "edge", stroke: colour, width: 0, paths: stepped, points: { show: false } });
  const series = (group) => {
    const colour = phaseColour(group.place);
    const name = group.searches.join(", ");
    const line = { label: name, stroke: colour, width: 2, dash: group.place < 4 ? [] : [8, 4], paths: stepped, points: { show: false } };
    return [line, edge(`${name}, best`, colour), edge(`${name}, worst`, colour)];
  };
  chart(
    place,
    () => ({
      scales: { x: { time: false }, y: { distr: scale.distr } },
      cursor: { y: false },
      axes: [axis(counted, { size: 34, ...(by === "hours" ? {} : { incrs: WHOLE }) }), axis(`best so far: ${scale.title}`, { size: 46 })],
      series: [{ label: counted }, ...groups.flatMap(series)],
      bands: groups.map((group, at) => ({ series: [3 * at + 2, 3 * at + 3], fill: `color-mix(in srgb, ${phaseColour(group.place)} 18%, transparent)` })),
    }),
    () => [x, ...groups.flatMap((group) => [group.mean, group.high, group.low].map(shown))],
  );
  figure.dataset.drawn = String(groups.length);
}
