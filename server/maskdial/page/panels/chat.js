/** Chat: a conversation with a model that has a chat template. */

import { stream } from "../api.js";
import { el, show } from "../dom.js";
import { keywords, py } from "../snippets.js";

/** The panel; each keeps its own conversation. */
export function chat() {
  const turns = [];
  const log = el("ol.turns");
  return {
    name: "chat",
    title: "Chat",
    verb: "Send",
    clears: "message",
    note: "The conversation so far goes along with each message.",
    fields: [
      { name: "message", label: "Message", kind: "text", value: "Where does the king live?" },
    ],
    request({ message }, model) {
      turns.push({ role: "user", content: message });
      const messages = turns.map((turn) => ({ ...turn }));
      const body = { model, messages, max_tokens: 80, stream: true };
      return {
        path: "/v1/chat/completions",
        body,
        streams: true,
        python: `for token in client.stream(messages=${py(messages)}, ${keywords({ model, max_new_tokens: 80 })}):\n    print(token.text, end="", flush=True)`,
        openai: `for chunk in client.chat.completions.create(\n    model=${py(model)}, messages=${py(messages)}, max_tokens=80, stream=True\n):\n    print(chunk.choices[0].delta.content or "", end="", flush=True)`,
      };
    },
    start({ body }, out) {
      const controller = new AbortController();
      show(out, log);
      const stop = () => controller.abort();
      return { done: answer(body, turns, log, controller, stop), stop };
    },
  };
}

async function answer(body, turns, log, controller, stop) {
  const [thoughts, text] = [el("p.thoughts"), el("p")];
  const button = el("button.stop", { type: "button", onclick: stop }, "Stop");
  const turn = el("li", { "data-role": "assistant" }, thoughts, text, button);
  const asked = el("li", { "data-role": "user" }, el("p", {}, turns.at(-1).content));
  log.append(asked, turn);
  let reply = "";
  try {
    for await (const chunk of stream("/v1/chat/completions", body, controller.signal)) {
      const { content, reasoning_content: thought } = chunk.choices[0]?.delta ?? {};
      thoughts.append(thought ?? "");
      reply += content ?? "";
      show(text, reply.trim());
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      turns.pop(); // what was not answered is not part of the conversation
      asked.remove();
      turn.remove();
      throw error;
    }
  } finally {
    button.remove();
  }
  turns.push({ role: "assistant", content: reply });
}
