// Talking with a model that understands pictures and paints its own.

import { Refused, call, events } from "./api.js";
import { References } from "./references.js";
import { word } from "./words.js";

const $ = (id) => document.getElementById(id);
const PREVIEWS = 2;

export class Talk {
  constructor(say) {
    Object.assign(this, { say, messages: [], running: null });
    this.references = new References($("chat-references"), $("chat-pick"), $("chat-files"), $("say"), say);
    $("say").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    $("message").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        $("say").requestSubmit();
      }
    });
    $("stop").addEventListener("click", () => this.running?.abort());
    $("again").addEventListener("click", () => {
      this.running?.abort();
      this.messages = [];
      $("talk").replaceChildren();
      $("silence").hidden = false;
      $("message").focus();
    });
  }

  async ask() {
    if (this.running) return;
    const pictures = this.references.urls.map((url) => ({ type: "image_url", image_url: { url } }));
    const question = { role: "user", content: [...pictures, { type: "text", text: $("message").value }] };
    show(turn("user"), question.content);
    const before = this.messages;
    const body = { messages: [...before, question], stream: true };
    if ($("may-paint").checked) {
      body.modalities = ["text", "image"];
      body.image_config = { partial_images: PREVIEWS };
    }
    this.busy(new AbortController());
    $("message").value = "";
    this.references.clear();
    try {
      const content = await this.listen(await call("POST", "/v1/chat/completions", body, this.running.signal));
      this.messages = [...before, question, { role: "assistant", content }];
    } catch (error) {
      if (error instanceof Refused) this.say(error.message);
      else if (error.name !== "AbortError") throw error;
    } finally {
      this.busy(null);
    }
  }

  /** Show an answer as it comes; returns its content, for the next question. */
  async listen(response) {
    const content = [];
    let thought = null;
    const answer = turn("assistant");
    const preview = document.createElement("img");
    for await (const event of events(response)) {
      preview.remove();
      if (event.error) throw new Refused(event.error.message);
      const delta = event.choices[0]?.delta ?? {};
      if (delta.partial_image) {
        const { image_url, index } = delta.partial_image;
        answer.append(Object.assign(preview, { src: image_url.url, alt: word("preview", index + 1) }));
      }
      if (delta.reasoning_content) {
        thought ??= turn("thought", answer);
        thought.append(delta.reasoning_content);
      }
      const parts = typeof delta.content === "string" ? [{ type: "text", text: delta.content }] : delta.content ?? [];
      show(answer, parts);
      for (const part of parts) {
        const last = content.at(-1);
        if (part.type === "text" && last?.type === "text") last.text += part.text;
        else content.push(part);
      }
    }
    return content;
  }

  busy(controller) {
    this.running = controller;
    $("send").disabled = Boolean(controller);
    $("stop").hidden = !controller;
    if (controller) this.say("");
  }
}

function turn(kind, before = null) {
  $("silence").hidden = true;
  const element = Object.assign(document.createElement("div"), { className: `turn ${kind}` });
  $("talk").insertBefore(element, before);
  return element;
}

function show(element, parts) {
  for (const part of parts) {
    if (part.type === "text") element.append(part.text);
    else element.append(Object.assign(document.createElement("img"), { src: part.image_url.url, alt: word("pictureInChat") }));
  }
  element.scrollIntoView({ block: "nearest" });
}
