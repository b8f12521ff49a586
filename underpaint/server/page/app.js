// The page: asks what the model can do, and brings up painting and, where the model talks, the chat.

import { Refused, call } from "./api.js";
import { Paint } from "./paint.js";
import { Talk } from "./chat.js";
import { switchLanguage, translate } from "./words.js";

const $ = (id) => document.getElementById(id);

function say(sentence) {
  $("notice").textContent = sentence;
  $("notice").hidden = !sentence;
}

function choose(name) {
  for (const each of ["paint", "chat"]) {
    $(each).hidden = each !== name;
    $(`tab-${each}`).setAttribute("aria-selected", String(each === name));
  }
}

async function begin() {
  translate();
  $("language").addEventListener("click", switchLanguage);
  const [model] = (await (await call("GET", "/v1/models")).json()).data;
  $("model").textContent = model.id;
  const paint = new Paint(model.underpaint, say);
  const talk = model.underpaint.talks ? new Talk(say) : null;
  $("tabs").hidden = !talk;
  for (const name of ["paint", "chat"]) $(`tab-${name}`).addEventListener("click", () => choose(name));
  document.addEventListener("paste", (event) => {
    if (event.clipboardData.files.length) {
      event.preventDefault();
      ($("chat").hidden ? paint : talk).references.addFiles(event.clipboardData.files);
    }
  });
}

begin().catch((error) => {
  if (!(error instanceof Refused)) throw error;
  say(error.message);
});
