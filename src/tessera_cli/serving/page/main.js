// The page: a chat beside the live view, and which model they are about.

import { apiKey, startChat } from "./chat.js";
import { LiveView } from "./live.js";
import { request } from "./server.js";

let model = null;

async function findModel() {
  try {
    const { data } = await (await request("v1/models", { key: apiKey() })).json();
    model = data[0].id;
    document.getElementById("model").textContent = model;
    document.title = `${model} · Tessera`;
  } catch {
    model = null; // the live view tells what is wrong, and asks again
  }
}

startChat(() => model);
const view = new LiveView(apiKey, findModel);
document.getElementById("api-key").addEventListener("change", () => view.retryNow());
