/** What a chat asks for beside the messages; kept in this browser. */

import { el } from "../dom.js";

const NAME = "maskdial-chat-settings";

export class Settings {
  constructor() {
    const saved = read();
    this.system = el("textarea", { rows: 3, placeholder: "None" });
    this.temperature = el("input", {
      type: "number",
      min: 0,
      step: 0.1,
      placeholder: "the model's own",
    });
    this.limit = el("input", { type: "number", min: 1, placeholder: "the rest of the context" });
    this.tools = el("textarea", { rows: 4, spellcheck: "false", placeholder: "None" });
    const inputs = [
      ["system", "System prompt", this.system],
      ["temperature", "Temperature", this.temperature],
      ["limit", "Most tokens of a reply", this.limit],
      ["tools", "Tools (a JSON list, as OpenAI has them)", this.tools],
    ];
    for (const [name, , input] of inputs) {
      input.value = saved[name] ?? "";
      input.addEventListener("input", () =>
        write(Object.fromEntries(inputs.map(([key, , each]) => [key, each.value]))),
      );
    }
    this.element = el(
      "details.settings",
      {},
      el("summary", {}, "Settings"),
      el(
        "div.settings-fields",
        {},
        inputs.map(([, label, input]) => el("label.field", {}, el("span", {}, label), input)),
      ),
    );
  }

  /**
   * The system prompt, and fields of the request.
   *
   * @throws {Error} the tools are not JSON
   */
  read() {
    return {
      system: this.system.value.trim() || undefined,
      temperature: number(this.temperature),
      max_tokens: number(this.limit),
      tools: this.readTools(),
    };
  }

  readTools() {
    const text = this.tools.value.trim();
    if (!text) return undefined;
    try {
      return JSON.parse(text);
    } catch (error) {
      throw new Error(`Settings: the tools are not JSON: ${error.message}`);
    }
  }
}

function number(input) {
  return input.value === "" ? undefined : Number(input.value);
}

function read() {
  try {
    return JSON.parse(localStorage.getItem(NAME) ?? "{}") ?? {};
  } catch {
    return {};
  }
}

function write(values) {
  try {
    localStorage.setItem(NAME, JSON.stringify(values));
  } catch {
    // a browser that keeps nothing
  }
}
