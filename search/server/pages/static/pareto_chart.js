// Chart of score against parameters, with the data of the table below it.
import { axis, chart, colour, phaseColour } from "./charts.js";

/** @param {HTMLElement} figure with `data-pareto`, the id of a table whose rows have `data-x`, `data-y` and a link */
export function draw(figure) {
  const rows = [...document.querySelectorAll(`#${figure.dataset.pareto} tr[data-x]`)];
  const numbers = (name) => rows.map((row) => Number(row.dataset[name]));
  const data = [numbers("x"), numbers("y")];
  const place = figure.querySelector(".plot");
  const padded = (_, low, high) => {
    const margin = 0.06 * (high - low) || 0.05 * Math.abs(high) || 1;
    return [Math.max(0, low - margin), high + margin];
  };
  const plot = chart(
    place,
    () => ({
      scales: { x: { time: false, range: padded }, y: { range: padded } },
      legend: { show: false },
      cursor: { y: false, drag: { x: false } },
      axes: [axis("parameters [millions]", { size: 34 }), axis("score [%]", { size: 46 })],
      series: [
        {},
        {
          label: "score",
          stroke: colour("--good"),
          width: 1.5,
          paths: uPlot.paths.stepped({ align: 1 }),
          points: { show: true, size: 8, fill: phaseColour(0), stroke: phaseColour(0) },
        },
      ],
      hooks: {
        setCursor: [(now) => rows.forEach((row, at) => row.classList.toggle("chosen", at === now.cursor.idx))],
      },
    }),
    () => data,
  );
  place.addEventListener("click", (event) => {
    const at = plot().cursor.idx;
    if (event.target.closest(".u-over") && at != null) location.assign(rows[at].querySelector("a").href);
  });
}
