// A list of pictures that the reader gives: picked, dropped or pasted; each can be removed.

import { word } from "./words.js";

export class References {
  /** `list`: the <ol>; `button` and `input`: the file picker; `zone`: where pictures may be dropped. */
  constructor(list, button, input, zone, say) {
    Object.assign(this, { list, say, urls: [], limit: Infinity });
    input.addEventListener("change", async () => {
      await this.addFiles(input.files);
      input.value = "";
    });
    button.addEventListener("click", () => input.click());
    for (const name of ["dragenter", "dragover"]) {
      zone.addEventListener(name, (event) => {
        event.preventDefault();
        zone.classList.add("over");
      });
    }
    zone.addEventListener("dragleave", () => zone.classList.remove("over"));
    zone.addEventListener("drop", (event) => {
      event.preventDefault();
      zone.classList.remove("over");
      this.addFiles(event.dataTransfer.files);
    });
  }

  async addFiles(files) {
    for (const file of files) {
      if (file.type.startsWith("image/")) this.add(await read(file));
      else this.say(word("notPicture", file.name));
    }
  }

  /** Add a picture by its data URL. */
  add(url) {
    if (this.urls.length >= this.limit) {
      this.say(word("tooMany", this.limit));
      return;
    }
    this.urls.push(url);
    this.show();
  }

  clear() {
    this.urls = [];
    this.show();
  }

  show() {
    this.list.replaceChildren(...this.urls.map((url, i) => {
      const item = document.createElement("li");
      const image = Object.assign(document.createElement("img"), { src: url, alt: "" });
      const index = Object.assign(document.createElement("span"), { className: "index", textContent: i + 1 });
      const remove = Object.assign(document.createElement("button"), { type: "button", textContent: "×" });
      remove.setAttribute("aria-label", word("remove", i + 1));
      remove.addEventListener("click", () => {
        this.urls.splice(i, 1);
        this.show();
      });
      item.append(image, index, remove);
      return item;
    }));
  }
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
