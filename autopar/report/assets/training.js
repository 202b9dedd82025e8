// How long a number of tokens or samples takes.
"use strict";

autopar.drawTraining = function () {
  const form = document.getElementById("training");
  if (!form) return;
  const { data } = autopar;
  const perSecond = data.prediction.tokens_per_s_per_gpu * data.cluster.num_gpus;
  const perStep = perSecond * data.prediction.step_time_s;
  const field = document.getElementById("amount");
  const answer = document.getElementById("training-answer");
  const digits = (value) => Number(value.toPrecision(3)).toLocaleString("en");

  function duration(seconds) {
    if (seconds < 90) return `${digits(seconds)} seconds`;
    if (seconds < 5400) return `${digits(seconds / 60)} minutes`;
    if (seconds < 172800) return `${digits(seconds / 3600)} hours`;
    return `${digits(seconds / 86400)} days`;
  }

  function say() {
    const amount = Number(field.value) * 1e9;
    if (!(amount > 0)) {
      answer.textContent = "";
      return;
    }
    const steps = Math.ceil(amount / perStep);
    const hours = (amount / perSecond / 3600) * data.cluster.num_gpus;
    answer.textContent = `${duration(amount / perSecond)}: ${steps.toLocaleString("en")} steps, ${digits(hours)} GPU-hours`;
  }

  // To begin with, a power of ten that takes some weeks; of samples, an hour or so.
  field.value = String(Number((10 ** Math.round(Math.log10(perSecond * (data.counted === "tokens" ? 2e6 : 4e3))) / 1e9).toPrecision(1)));
  field.addEventListener("input", say);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  say();
};
