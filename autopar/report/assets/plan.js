// Draws the charts of a plan report from the JSON object in #plan-data. No state, no network.
"use strict";

(function () {
  const data = JSON.parse(document.getElementById("plan-data").textContent);
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const AXES = Object.keys(data.mesh);
  const NUM_TONES = 6;
  const PARTS = ["#2563eb", "#f59e0b", "#10b981", "#a855f7", "#ef4444", "#64748b", "#06b6d4", "#ec4899", "#84cc16"];
  const GIB = 2 ** 30;

  function seconds(value) {
    if (value >= 1) return `${value.toPrecision(3)} s`;
    if (value >= 1e-3) return `${(value * 1e3).toPrecision(3)} ms`;
    return `${(value * 1e6).toPrecision(3)} µs`;
  }

  const words = (name) => name.replace(/_/g, " ");

  // Everything on one mesh axis has one colour.
  function paintChips() {
    for (const chip of document.querySelectorAll(".chip[data-axis]")) {
      const number = AXES.indexOf(chip.dataset.axis) % NUM_TONES;
      chip.style.setProperty("--tone", `var(--axis-${number})`);
    }
  }

  function layout(extra) {
    return {
      margin: { l: 70, r: 10, t: 10, b: 45 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: color("--soft") },
      hoverlabel: { align: "left" },
      ...extra,
    };
  }

  const CONFIG = { responsive: true, displayModeBar: false };
  const grid = () => ({ gridcolor: color("--line"), zerolinecolor: color("--line") });

  function drawBreakdown() {
    const bar = document.getElementById("breakdown");
    if (!bar) return;
    const parts = Object.entries(data.prediction.breakdown_s).filter(([, value]) => value > 1e-4 * data.prediction.step_time_s);
    const total = parts.reduce((sum, [, value]) => sum + value, 0);
    const legend = document.createElement("div");
    legend.className = "legend";
    parts.forEach(([name, value], number) => {
      const tone = PARTS[number % PARTS.length];
      const piece = document.createElement("div");
      piece.style.background = tone;
      piece.style.flex = String(value / total);
      piece.title = `${words(name)}: ${seconds(value)}`;
      bar.append(piece);
      const entry = document.createElement("span");
      const swatch = document.createElement("i");
      swatch.style.background = tone;
      entry.append(swatch, `${words(name)} ${seconds(value)} (${((100 * value) / total).toFixed(0)} %)`);
      legend.append(entry);
    });
    bar.after(legend);
  }

  // One horizontal bar per pass of a microbatch through a stage. One trace per kind of pass, so that thousands of
  // passes stay quick to draw.
  function drawTimeline() {
    const place = document.getElementById("timeline");
    if (!place) return;
    const kinds = {
      F: { name: "forward", tone: "#2563eb" },
      B: { name: "backward", tone: "#f59e0b" },
      I: { name: "backward, inputs", tone: "#f97316" },
      W: { name: "backward, weights", tone: "#10b981" },
    };
    const total = data.timeline.step_time_s || 1;
    const row = data.timeline.events.length < data.num_stages ? "rank" : "stage";
    const labels = data.num_stages <= 16 && data.batch.num_microbatches <= 16;
    const used = new Set(data.timeline.events.flat().map((event) => event[1]));
    const shown = Object.entries(kinds).filter(([kind]) => used.has(kind));
    const traces = shown.map(([kind, { name, tone }]) => {
      const trace = { x: [], base: [], y: [], text: [], customdata: [] };
      data.timeline.events.forEach((events, rank) => {
        for (const [stage, own, microbatch, start, end] of events) {
          if (own !== kind) continue;
          trace.x.push(end - start);
          trace.base.push(start);
          trace.y.push(`${row} ${rank}`);
          trace.text.push(labels ? String(microbatch) : "");
          trace.customdata.push(`${stage}${kind}${microbatch}: ${seconds(start)} to ${seconds(end)}`);
        }
      });
      return {
        ...trace,
        type: "bar",
        orientation: "h",
        name,
        textposition: "inside",
        insidetextanchor: "middle",
        textangle: 0,
        constraintext: "inside",
        marker: { color: tone, line: { width: labels ? 1 : 0, color: color("--card") } },
        hovertemplate: "%{customdata}<extra></extra>",
      };
    });
    Plotly.newPlot(
      place,
      traces,
      layout({
        barmode: "overlay",
        bargap: 0.15,
        height: 90 + Math.min(data.timeline.events.length, 32) * 34,
        xaxis: { title: { text: "seconds" }, range: [0, total], ...grid() },
        yaxis: { autorange: "reversed", fixedrange: true, ...grid() },
        legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
        margin: { l: 70, r: 10, t: 30, b: 45 },
      }),
      CONFIG,
    );
  }

  function drawMemory() {
    const place = document.getElementById("memory");
    if (!place) return;
    const stages = data.prediction.memory_parts_bytes;
    const names = [...new Set(stages.flatMap((parts) => Object.keys(parts)))];
    const largest = Math.max(...stages.map((parts) => Object.values(parts).reduce((a, b) => a + b, 0)));
    const [unit, name] = largest >= 0.1 * GIB ? [GIB, "GiB"] : [2 ** 20, "MiB"];
    const traces = names.map((part, number) => ({
      type: "bar",
      orientation: "h",
      name: words(part),
      y: stages.map((_, rank) => `${stages.length < data.num_stages ? "rank" : "stage"} ${rank}`),
      x: stages.map((parts) => (parts[part] || 0) / unit),
      marker: { color: PARTS[number % PARTS.length] },
      hovertemplate: `${words(part)}: %{x:.2f} ${name}<extra></extra>`,
    }));
    Plotly.newPlot(
      place,
      traces,
      layout({
        barmode: "stack",
        bargap: 0.3,
        height: 100 + Math.min(data.num_stages, 32) * 36,
        xaxis: { title: { text: name }, ...grid() },
        yaxis: { autorange: "reversed", fixedrange: true, ...grid() },
        legend: { orientation: "h", traceorder: "normal", x: 0, y: 1.02, yanchor: "bottom" },
        margin: { l: 70, r: 10, t: 40, b: 45 },
      }),
      CONFIG,
    );
  }

  paintChips();
  drawBreakdown();
  drawTimeline();
  drawMemory();
})();
