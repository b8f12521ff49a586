// Talking with a model that understands pictures and paints its own.

import { Refused, call, events } from "./api.js";
import { References } from "./references.js";
import { spoken, word } from "./words.js";

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
        if (!this.running) $("say").requestSubmit();
      }
    });
    $("stop").addEventListener("click", () => this.running?.abort());
    $("again").addEventListener("click", () => {
      this.running?.abort();
      this.busy(null);
      this.say("");
      this.messages = [];
      $("talk").replaceChildren();
      $("silence").hidden = false;
      $("message").focus();
    });
  }

  async ask() {
    if (this.running) return;
    const given = { text: $("message").value, urls: this.references.urls };
    const pictures = given.urls.map((url) => ({ type: "image_url", image_url: { url } }));
    const question = { role: "user", content: [...pictures, { type: "text", text: given.text }] };
    const answer = { role: "assistant", content: [] };
    const body = { messages: [...this.messages, question], stream: true };
    if ($("may-paint").checked) {
      body.modalities = ["text", "image"];
      body.image_config = { partial_images: PREVIEWS };
    }
    const running = new AbortController();
    this.busy(running);
    $("message").value = "";
    this.references.clear();
    const turns = [turn("user"), turn("assistant busy")];
    let ended = false;
    try {
      await show(turns[0], question.content);
      $("talk").scrollTop = $("talk").scrollHeight;
      await this.listen(await call("POST", "/v1/chat/completions", body, running.signal), turns[1], answer.content);
      ended = true;
    } catch (error) {
      if (error instanceof Refused) this.say(error.message);
      else if (error.name !== "AbortError") throw error;
      else if (answer.content.length) append(turns[1], spoken("small", "cancelled"));
    } finally {
      turns[1].classList.remove("busy");
      turns[1].querySelector(".unfinished")?.remove();
      if (this.running === running) {
        if (ended || answer.content.length) this.messages = [...this.messages, question, answer];
        else this.takeBack(turns[0], given);
        this.busy(null);
      }
    }
  }

  /** Show an answer as it comes, and add it to `content`. */
  async listen(response, answer, content) {
    let thought = null;
    for await (const event of events(response)) {
      if (event.error) throw new Refused(event.error.message);
      const delta = event.choices[0]?.delta ?? {};
      if (delta.partial_image) await show(answer, [delta.partial_image], "unfinished");
      if (delta.reasoning_content) {
        thought ??= turn("thought", answer);
        append(thought, delta.reasoning_content);
      }
      const parts = typeof delta.content === "string" ? [{ type: "text", text: delta.content }] : delta.content ?? [];
      for (const part of parts.filter((each) => each.text !== "")) {
        const last = content.at(-1);
        if (part.type === "text" && last?.type === "text") last.text += part.text;
        else content.push(part);
        await show(answer, [part]);
      }
    }
  }

  /** A question without any answer is not part of the dialogue: give it back for another try. */
  takeBack(asked, { text, urls }) {
    while (asked.nextSibling) asked.nextSibling.remove();
    asked.remove();
    $("silence").hidden = this.messages.length > 0;
    $("message").value ||= text;
    this.references.urls = [...urls, ...this.references.urls];
    this.references.show();
  }

  /** Cancel stands where Send does, and takes over its focus. */
  busy(controller) {
    const focused = [$("send"), $("stop")].includes(document.activeElement);
    this.running = controller;
    $("send").hidden = Boolean(controller);
    $("stop").hidden = !controller;
    if (focused) (controller ? $("stop") : $("send")).focus();
    if (controller) this.say("");
  }
}

function turn(kind, before = null) {
  $("silence").hidden = true;
  const element = Object.assign(document.createElement("div"), { className: `turn ${kind}` });
  $("talk").insertBefore(element, before);
  return element;
}

/** Show parts of a message in its turn, in the place of a preview if there is one. */
async function show(element, parts, className = "") {
  const nodes = await Promise.all(parts.map((part) => (part.type === "text" ? part.text : picture(part, className))));
  element.querySelector(".unfinished")?.remove();
  append(element, ...nodes);
}

/** Resolves when the picture is known to be showable or not, so that it has its height when it is put in. */
function picture(part, className) {
  const alt = className ? word("preview", part.index + 1) : word("pictureInChat");
  const image = Object.assign(document.createElement("img"), { alt, className });
  return new Promise((resolve) => {
    image.onload = image.onerror = () => resolve(image);
    image.src = part.image_url.url;
  });
}

/** The end of the dialogue stays in sight, unless the reader looks at what was before. */
function append(element, ...nodes) {
  const talk = $("talk");
  const atEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 40;
  element.append(...nodes);
  if (atEnd) talk.scrollTop = talk.scrollHeight;
}
