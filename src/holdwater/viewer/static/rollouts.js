// Draws the charts of the rollouts page, and draws them again when the page was refreshed.
"use strict";

function drawChart(place, chart) {
  const box = place.appendChild(document.createElement("div"));
  box.className = "chart";
  const names = Object.keys(chart.series);
  const line = (label, at) => ({ label, stroke: COLOURS[at], width: 1.5, points: { show: chart.x.length < 100 } });
  const axis = { stroke: "#888", grid: { stroke: "#8883" } };
  const name = (plot, places) => places.map((at) => chart.labels[at] ?? "");
  const labels = chart.labels ? { values: name, incrs: [1, 2, 5, 10, 20, 50] } : {};
  const first = chart.labels ? { value: (plot, at) => chart.labels[at] ?? "--" } : {};
  new uPlot(
    {
      title: chart.title,
      width: place.clientWidth,
      height: 170,
      scales: { x: { time: Boolean(chart.time) } },
      series: [first, ...names.map(line)],
      axes: [{ ...axis, ...labels }, { ...axis, size: 60 }],
    },
    [chart.x, ...names.map((each) => chart.series[each])],
    box,
  );
}

async function drawRollouts() {
  const place = document.getElementById("rollout-charts");
  const read = await readData(place, place.dataset.charts);
  if (!read) return;
  const charts = read.filter((chart) => chart.x.length > 1);
  place.replaceChildren();
  for (const chart of charts) drawChart(place, chart);
}

document.addEventListener("DOMContentLoaded", drawRollouts);
document.addEventListener("refreshed", drawRollouts);
