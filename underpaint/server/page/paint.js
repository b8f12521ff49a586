// Painting: the form, a job with its progress and previews, and the gallery.

import { Refused, call, events } from "./api.js";
import { References } from "./references.js";
import { spoken, translate, word } from "./words.js";

const $ = (id) => document.getElementById(id);
const PREVIEWS = 3;
const RATIOS = [[1, 1], [4, 3], [3, 4], [3, 2], [2, 3], [16, 9], [9, 16]];

export class Paint {
  /** `facts`: what the model can do; `say`: shows a sentence to the reader. */
  constructor(facts, say) {
    Object.assign(this, { facts, say, job: null, running: false, unwanted: false });
    this.references = new References($("references"), $("pick"), $("files"), $("drop"), say);
    this.references.limit = facts.max_references;
    this.away = facts.parameters.includes("negative_prompt");
    $("negative-field").hidden = !this.away;
    $("steps").value = facts.default_steps;
    for (const id of ["width", "height"]) {
      Object.assign($(id), { min: facts.side_multiple, max: facts.max_side, step: facts.side_multiple, value: facts.default_side });
    }
    this.fillSizes();
    $("size").addEventListener("change", () => this.showCustom());
    $("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.paint(this.values());
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
    });
    $("cancel").addEventListener("click", () => this.cancel());
  }

  /** Cancel the job; one that the server has not named yet, as soon as it has. */
  cancel() {
    this.unwanted = true;
    if (this.job) call("DELETE", `/v1/jobs/${this.job}`).catch((error) => this.say(error.message));
  }

  /** Sizes of about the model's own area. */
  fillSizes() {
    const { side_multiple: multiple, default_side: side } = this.facts;
    const round = (value) => Math.max(multiple, Math.round(value / multiple) * multiple);
    const sizes = RATIOS.map(([w, h]) => `${round(side * Math.sqrt(w / h))}x${round(side * Math.sqrt(h / w))}`);
    const option = (value, name) => {
      const element = Object.assign(document.createElement("option"), { value, textContent: value.replace("x", " × ") });
      if (name) element.dataset.word = name;
      return element;
    };
    $("size").append(option("auto", "auto"), ...[...new Set(sizes)].map((size) => option(size)), option("custom", "custom"));
    translate($("size"));
  }

  showCustom() {
    for (const field of document.querySelectorAll(".custom")) field.hidden = $("size").value !== "custom";
  }

  /** The body of the request, as the form says. */
  values() {
    const size = $("size").value === "custom" ? `${$("width").value}x${$("height").value}` : $("size").value;
    const body = {
      prompt: $("prompt").value, size, n: Number($("n").value), num_inference_steps: Number($("steps").value),
      partial_images: PREVIEWS, images: this.references.urls.map((url) => ({ image_url: url })),
    };
    if ($("seed").value !== "") body.seed = Number($("seed").value);
    const [scale, negative] = [$("guidance").value, $("negative").value];
    if (scale !== "") body[this.away ? "true_cfg_scale" : "guidance_scale"] = Number(scale);
    if (this.away && (scale !== "" || negative !== "")) body.negative_prompt = negative; // refused without a scale
    return body;
  }

  async paint(body) {
    if (this.running) return;
    Object.assign(this, { running: true, unwanted: false });
    this.busy(true);
    const unfinished = new Map();
    try {
      this.job = (await (await call("POST", "/v1/jobs", body)).json()).id;
      if (this.unwanted) this.cancel();
      for await (const event of events(await call("GET", `/v1/jobs/${this.job}/events`))) this.take(event, body, unfinished);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.say(error.message);
    } finally {
      for (const figure of unfinished.values()) figure.remove();
      Object.assign(this, { job: null, running: false });
      this.busy(false);
    }
  }

  /** One event of the running job. */
  take(event, body, unfinished) {
    if (event.type === "job.progress") this.progress(event.step, event.num_steps);
    if (event.type === "job.partial_image") {
      const figure = unfinished.get(event.index) ?? this.figure();
      unfinished.set(event.index, figure);
      figure.classList.add("unfinished");
      figure.querySelector("img").src = url(event);
      figure.querySelector("img").alt = word("preview", event.index + 1);
    }
    if (event.type === "job.image") {
      const figure = unfinished.get(event.index) ?? this.figure();
      unfinished.delete(event.index);
      this.finish(figure, event, body);
    }
    if (event.type === "job.failed") this.say(event.job.error.message);
    if (event.type === "job.cancelled") this.say(word("cancelled"));
  }

  busy(busy) {
    $("go").disabled = busy;
    $("progress").hidden = !busy;
    if (busy) {
      this.say("");
      // In one column the pictures stand below the form, out of sight.
      $("progress").scrollIntoView({ block: matchMedia("(max-width: 800px)").matches ? "start" : "nearest" });
      $("bar").removeAttribute("value");
      $("state").textContent = word("waiting");
    }
  }

  progress(step, total) {
    $("bar").max = total;
    $("bar").value = step;
    $("state").textContent = step < total ? word("step", step, total) : word("decoding");
  }

  figure() {
    const figure = document.createElement("figure");
    figure.append(document.createElement("img"), document.createElement("figcaption"));
    $("gallery").prepend(figure);
    $("empty").hidden = true;
    return figure;
  }

  /** A finished picture: what it is, and what can be done with it. */
  finish(figure, event, body) {
    figure.classList.remove("unfinished");
    Object.assign(figure.querySelector("img"), { src: url(event), alt: word("picture", body.prompt) });
    const text = Object.assign(document.createElement("span"), { className: "text", textContent: body.prompt, title: body.prompt });
    const facts = document.createElement("span");
    facts.append(spoken("span", "seedIs", event.seed), ` · ${event.size.replace("x", " × ")}`);
    const use = spoken("button", "use");
    use.addEventListener("click", () => this.references.add(url(event)));
    const repeat = spoken("button", "repeat");
    repeat.addEventListener("click", () => this.repeat(body, event.seed));
    const save = spoken("a", "save");
    Object.assign(save, { href: url(event), download: `underpaint-${event.seed}.png`, className: "button" });
    const actions = Object.assign(document.createElement("div"), { className: "actions" });
    actions.append(use, repeat, save);
    figure.querySelector("figcaption").replaceChildren(text, facts, actions);
  }

  /** Put a picture's own request back into the form, with its seed; the reader may change it before painting. */
  repeat(body, seed) {
    $("prompt").value = body.prompt;
    const known = [...$("size").options].some((option) => option.value === body.size);
    $("size").value = known ? body.size : "custom";
    if (!known) [$("width").value, $("height").value] = body.size.split("x");
    this.showCustom();
    $("n").value = 1;
    $("steps").value = body.num_inference_steps;
    $("seed").value = seed;
    $("guidance").value = body.true_cfg_scale ?? body.guidance_scale ?? "";
    $("negative").value = body.negative_prompt ?? "";
    this.references.urls = body.images.map((image) => image.image_url);
    this.references.show();
    $("prompt").focus();
  }
}

const url = (event) => `data:image/${event.output_format};base64,${event.b64_json}`;
