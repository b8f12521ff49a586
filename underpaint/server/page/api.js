// Talking with the server: requests, errors as sentences, and server-sent events.

import { word } from "./words.js";

/** An error with a sentence for the reader. */
export class Refused extends Error {}

/** A request to our own API. Asks for the API key if the server wants one. */
export async function call(method, path, body, signal) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  const key = localStorage.getItem("key");
  if (key) headers.Authorization = `Bearer ${key}`;
  const content = body === undefined ? undefined : JSON.stringify(body);
  const response = await fetch(path, { method, headers, body: content, signal }).catch(refuse);
  if (response.status === 401) {
    const given = prompt(word("askKey"));
    if (given) {
      localStorage.setItem("key", given);
      return call(method, path, body, signal);
    }
  }
  if (!response.ok) throw new Refused((await response.json()).error.message);
  return response;
}

function refuse(error) {
  throw error.name === "AbortError" ? error : new Refused(word("lost"));
}

/** The data of each server-sent event of a response, parsed; ends with the stream or at [DONE]. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(refuse);
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const line = block.split("\n").find((each) => each.startsWith("data: "));
      if (line === "data: [DONE]") return;
      if (line) yield JSON.parse(line.slice(6));
    }
  }
}
