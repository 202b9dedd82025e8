// The plans that the search completed: seconds of a step against memory.
"use strict";

autopar.drawCandidates = function () {
  const place = document.getElementById("candidates");
  if (!place) return;
  const { data, seconds, GIB } = autopar;
  const all = data.candidates;
  const [unit, unitName] = autopar.unitOf(Math.max(...all.map((one) => one.peak_bytes)));
  const said = (one) =>
    `${one.baseline || one.kind || "the plan"}<br>${autopar.plain(one.words)}<br>${seconds(one.step_time_s)}, ` +
    `${(one.peak_bytes / unit).toFixed(1)} ${unitName}`;

  function points(name, chosen, marker) {
    return {
      type: "scatter", mode: "markers", name,
      x: chosen.map((one) => one.step_time_s), y: chosen.map((one) => one.peak_bytes / unit),
      text: chosen.map((one) => said(one)), hovertemplate: "%{text}<extra></extra>", marker,
    };
  }

  const front = all.filter((one) => one.front);
  const line = {
    type: "scatter", mode: "lines", name: "fastest for its memory", hoverinfo: "skip",
    line: { shape: "hv", width: 1, color: autopar.color("--faint") },
    x: front.map((one) => one.step_time_s), y: front.map((one) => one.peak_bytes / unit),
  };
  const plain = { color: autopar.part(4), size: 7, line: { width: 1, color: autopar.color("--soft") } };
  const traces = [
    line,
    points("tried", all.filter((one) => !one.baseline && !one.chosen), plain),
    points("without a search", all.filter((one) => one.baseline && !one.chosen), { color: autopar.part(1), size: 11, symbol: "square" }),
    points("the plan", all.filter((one) => one.chosen), { color: autopar.part(5), size: 15, symbol: "star" }),
  ].filter((trace) => trace.x.length);
  const capacity = data.capacity_bytes;
  const near = capacity && capacity < 2 * Math.max(...all.map((one) => one.peak_bytes));
  Plotly.react(
    place,
    traces,
    autopar.layout({
      height: 420,
      showlegend: true,
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
      margin: { l: 60, r: 10, t: 40, b: 45 },
      hovermode: "closest",
      xaxis: { title: { text: "seconds a step" }, type: "log", dtick: "D1", tickformat: ".3~s" },
      yaxis: { title: { text: unitName }, rangemode: "tozero" },
      shapes: near
        ? [{ type: "line", x0: 0, x1: 1, xref: "paper", y0: capacity / unit, y1: capacity / unit, line: { dash: "dash", width: 1, color: autopar.color("--ink") } }]
        : [],
    }),
    autopar.CONFIG,
  );
};
