// Memory of the ranks of each place in the pipeline: at its peak, and over a step.
"use strict";

autopar.drawMemory = function (step) {
  const section = document.getElementById("memory-section");
  const { data, words } = autopar;
  const places = section ? data.prediction.memory_parts_bytes : [];
  if (!places.length) return;
  const names = [...new Set(places.flatMap((parts) => Object.keys(parts)))];
  const sums = places.map((parts) => Object.values(parts).reduce((a, b) => a + b, 0));
  const capacity = data.capacity_bytes || 0;
  const largest = Math.max(...sums);
  const [unit, unitName] = autopar.unitOf(largest);
  // The limit is drawn where it is near.
  const limit = capacity && capacity < 4 * largest ? capacity : 0;
  const line = (axis) =>
    limit
      ? [{
          type: "line", line: { color: autopar.color("--ink"), dash: "dash", width: 1 },
          ...(axis === "x"
            ? { x0: limit / unit, x1: limit / unit, y0: 0, y1: 1, yref: "paper" }
            : { y0: limit / unit, y1: limit / unit, x0: 0, x1: 1, xref: "paper" }),
        }]
      : [];

  function drawFullest() {
    const upright = places.length > 24;
    const labels = places.map((_, place) => autopar.placeName(place));
    const traces = names.map((name, number) => {
      const sizes = places.map((parts) => (parts[name] || 0) / unit);
      return {
        type: "bar",
        ...(upright ? { x: labels, y: sizes } : { orientation: "h", y: labels, x: sizes }),
        name: words(name),
        marker: { color: autopar.part(number) },
        hovertemplate: `${words(name)}: %{${upright ? "y" : "x"}:.2f} ${unitName}<extra></extra>`,
      };
    });
    const sizes = { title: { text: unitName }, range: [0, (1.05 * Math.max(largest, limit)) / unit] };
    const kinds = { automargin: true, fixedrange: true };
    Plotly.react(
      document.getElementById("memory"),
      traces,
      autopar.layout({
        barmode: "stack",
        bargap: 0.25,
        height: upright ? 320 : 70 + places.length * 32,
        xaxis: upright ? kinds : sizes,
        yaxis: upright ? sizes : { ...kinds, autorange: "reversed" },
        shapes: line(upright ? "y" : "x"),
      }),
      autopar.CONFIG,
    );
  }

  function drawOverStep(place) {
    const { ticks, passes, mib } = step.memory[place];
    const tick = step.streams.step_time_s / 1e6;
    const x = [0, ...ticks.map((own) => own * tick)];
    const traces = names.map((name, number) => {
      const sizes = mib[name].map((own) => (own * 2 ** 20) / unit);
      return {
        type: "scatter", mode: "lines", stackgroup: "all", line: { shape: "vh", width: 0.5, color: autopar.part(number) },
        fillcolor: autopar.part(number), x, y: [sizes[0], ...sizes], text: ["start", ...passes],
        hovertemplate: `${words(name)}: %{y:.2f} ${unitName}<br>%{text}<extra></extra>`,
      };
    });
    Plotly.react(
      document.getElementById("memory-time"),
      traces,
      autopar.layout({
        height: 320,
        xaxis: { title: { text: "seconds" }, range: [0, step.streams.step_time_s] },
        yaxis: { title: { text: unitName }, rangemode: "tozero" },
        shapes: line("y"),
      }),
      autopar.CONFIG,
    );
  }

  autopar.legend(document.getElementById("memory-legend"), [
    ...names.map((name, number) => [words(name), autopar.part(number)]),
    ...(limit ? [["what a plan may take (dashed)", autopar.color("--ink")]] : []),
  ]);
  section.hidden = false;
  drawFullest();
  if (!step.memory.length) return;
  const chosen = document.getElementById("memory-rank");
  if (!chosen.options.length) {
    places.forEach((_, place) => chosen.append(new Option(autopar.placeName(place), place)));
    chosen.value = String(sums.indexOf(largest));
    chosen.addEventListener("change", () => drawOverStep(Number(chosen.value)));
  }
  document.getElementById("memory-step").hidden = false;
  drawOverStep(Number(chosen.value));
};
