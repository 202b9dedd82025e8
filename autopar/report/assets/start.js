// Unpacks the step and draws everything; again when the reader's colours change.
"use strict";

(async function () {
  autopar.paintChips();
  autopar.drawTraining();
  autopar.drawCluster();
  autopar.drawSequence();
  autopar.drawTime();
  const packed = Uint8Array.from(atob(document.getElementById("step-data").textContent), (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const step = await new Response(unpacked).json();

  autopar.drawTimeline(step.streams);
  autopar.drawMemory(step);
  autopar.drawCandidates();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    autopar.repaintCluster();
    autopar.drawSequence();
    autopar.drawTime();
    autopar.redrawTimeline();
    autopar.drawMemory(step);
    autopar.drawCandidates();
  });
  document.documentElement.dataset.drawn = "true";
})();
