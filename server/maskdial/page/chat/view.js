/** Chat: a conversation with a model that has a chat template, and those that were held before. */

import { el, show } from "../dom.js";
import { keywords, py, snippets } from "../snippets.js";
import { begin, forget, keep, kept, messagesOf, titleOf } from "./conversations.js";
import { reply } from "./reply.js";
import { Settings } from "./settings.js";
import { turnOf, writing } from "./turn.js";

const NEAR = 80; // pixels from the end within which the text is followed

export class Chat {
  /**
   * @param {Element} section is drawn into
   * @param {string[]} models names of those that chat
   */
  constructor(section, models) {
    this.models = models;
    this.settings = new Settings();
    this.model = el(
      "select",
      { "aria-label": "Model", onchange: () => this.choose(this.model.value) },
      models.map((name) => el("option", { value: name }, name)),
    );
    this.list = el("ol.conversations", { "aria-label": "Conversations" });
    this.turns = el("ol.turns");
    this.problem = el("p.error", { role: "alert", hidden: true });
    this.sent = el("div.sent");
    this.message = el("textarea", {
      rows: 1,
      placeholder: "Ask something",
      "aria-label": "Message",
      oninput: () => this.grow(),
      onkeydown: (event) => this.key(event),
    });
    this.button = el("button.primary", {}, "Send");
    this.editing = el("p.hint", { hidden: true });
    this.scroller = el("div.thread", { tabindex: "-1" }, this.turns, this.problem, this.sent);
    this.status = el("p.visually-hidden", { role: "status" });
    show(
      section,
      el(
        "details.sidebar",
        { open: matchMedia("(min-width: 52rem)").matches },
        el("summary", {}, "Conversations"),
        el("button", { type: "button", onclick: () => this.open(null) }, "New chat"),
        this.list,
        el("p.hint", {}, "They are kept in this browser only."),
      ),
      el(
        "div.chat-main",
        {},
        el(
          "header.chat-top",
          {},
          el("h2.visually-hidden", { id: "chat-title" }, "Chat"),
          this.model,
          this.settings.element,
        ),
        this.scroller,
        el(
          "form.composer",
          { onsubmit: (event) => this.submit(event) },
          this.editing,
          this.message,
          this.button,
        ),
        this.status,
      ),
    );
    this.open(null);
  }

  /** Is shown, for a model if there is one. */
  enter(model) {
    if (this.models.includes(model)) {
      this.model.value = model;
      this.choose(model);
    }
    this.message.focus();
  }

  /** Goes on with another model. */
  choose(model) {
    this.conversation.model = model;
  }

  /** Shows a conversation, or a new one. */
  open(conversation) {
    this.stop();
    this.conversation = conversation ?? begin(this.model.value);
    if (this.models.includes(this.conversation.model)) this.model.value = this.conversation.model;
    else this.conversation.model = this.model.value; // it is not served any more
    this.from = null;
    this.editing.hidden = this.problem.hidden = true;
    show(this.sent);
    this.draw();
    this.message.focus();
  }

  /** Ends the reply that is being written; what has come of it stays. */
  stop() {
    this.controller?.abort();
  }

  draw() {
    const { turns } = this.conversation;
    const waits = this.controller !== undefined;
    const last = turns.length - 1;
    const empty = el("li.empty", {}, el("p", {}, "What would you like to know?"));
    show(
      this.turns,
      turns.length ? null : empty,
      turns.map((turn, index) =>
        turnOf(turn, {
          edit: turn.role === "user" && !waits ? () => this.edit(index) : undefined,
          retry:
            turn.role === "assistant" && index === last && !waits
              ? () => this.again(index)
              : undefined,
          answer: waits ? null : (call, content) => this.answer(call, content),
          open: unanswered(turns, index),
        }),
      ),
    );
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.drawList();
  }

  drawList() {
    show(
      this.list,
      kept().map((each) =>
        el(
          "li",
          {},
          el(
            "button",
            {
              type: "button",
              "aria-current": each.id === this.conversation.id && "true",
              onclick: () => this.open(each),
            },
            titleOf(each),
          ),
          el(
            "button.forget",
            {
              type: "button",
              "aria-label": `Delete “${titleOf(each)}”`,
              onclick: () => this.forget(each),
            },
            "×",
          ),
        ),
      ),
    );
  }

  forget(conversation) {
    forget(conversation.id);
    if (conversation.id === this.conversation.id) {
      this.conversation.isForgotten = true; // also if a reply is being written
      this.open(null);
    } else this.drawList();
  }

  key(event) {
    if (event.key === "Escape" && this.from !== null) this.endEdit();
    // While a text is composed, as for Chinese, Enter chooses a word.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!this.controller) this.submit(event);
  }

  grow() {
    this.message.style.height = "auto";
    this.message.style.height = `${this.message.scrollHeight + 2}px`;
  }

  submit(event) {
    event.preventDefault();
    if (this.controller) {
      this.stop();
      return;
    }
    const content = this.message.value;
    if (!content.trim()) return;
    const { turns } = this.conversation;
    const before = [...turns];
    if (this.from !== null) turns.length = this.from;
    this.endEdit();
    turns.push({ role: "user", content });
    this.ask(before, content);
  }

  /** Puts an earlier message into the field; once it is sent, what came after it is dropped. */
  edit(index) {
    this.from = index;
    this.message.value = this.conversation.turns[index].content;
    show(
      this.editing,
      "Sending it drops what came after. ",
      el("button.link", { type: "button", onclick: () => this.endEdit() }, "Do not edit"),
    );
    this.editing.hidden = false;
    this.grow();
    this.message.focus();
  }

  endEdit() {
    this.from = null;
    this.editing.hidden = true;
    this.message.value = "";
    this.grow();
  }

  again(index) {
    const { turns } = this.conversation;
    const before = [...turns];
    turns.length = index;
    this.ask(before);
  }

  /** Takes the result of a tool; the model goes on once it has all that it called for. */
  answer(call, content) {
    const { turns } = this.conversation;
    const before = [...turns];
    const from = turns.findLastIndex((turn) => turn.role === "assistant");
    turns.push({ role: "tool", call: call.id, content });
    if (unanswered(turns, from).length) this.draw();
    else this.ask(before);
  }

  /**
   * Asks for the next turn.
   *
   * @param {object[]} before the turns as they are again if there is no answer at all
   * @param {string} [unsent] goes back into the field then
   */
  async ask(before, unsent) {
    const { conversation } = this;
    this.problem.hidden = true;
    let body;
    try {
      body = this.body();
    } catch (error) {
      this.fail(conversation, before, unsent, error);
      return;
    }
    this.controller = new AbortController();
    const { signal } = this.controller;
    show(this.button, "Stop");
    const written = writing();
    this.draw();
    this.turns.append(written.element);
    this.follow(true);
    try {
      const turn = await reply(body, signal, (so) => {
        const follows = this.isAtEnd();
        written.update(so);
        requestAnimationFrame(() => this.follow(follows));
      });
      conversation.turns.push(turn);
      if (!conversation.isForgotten) keep(conversation);
      this.end(conversation);
      show(this.status, "The reply has ended.");
      if (conversation === this.conversation) show(this.sent, snippets(requestOf(body), false));
    } catch (error) {
      this.end(conversation);
      this.fail(conversation, before, unsent, error);
    }
  }

  end(conversation) {
    this.controller = undefined;
    show(this.button, "Send");
    const follows = this.isAtEnd();
    const { scrollTop } = this.scroller;
    if (conversation === this.conversation) this.draw();
    else this.drawList();
    if (!follows) this.scroller.scrollTop = scrollTop;
  }

  fail(conversation, before, unsent, error) {
    conversation.turns = before;
    if (conversation !== this.conversation) return;
    if (unsent !== undefined && !this.message.value) this.message.value = unsent;
    this.grow();
    this.draw();
    show(this.problem, error.message);
    this.problem.hidden = false;
    this.follow(true);
  }

  body() {
    const { system, ...options } = this.settings.read();
    return {
      model: this.conversation.model,
      messages: messagesOf(this.conversation.turns, system),
      ...options,
      stream: true,
      stream_options: { include_usage: true },
    };
  }

  isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    return scrollHeight - scrollTop - clientHeight < NEAR;
  }

  follow(follows) {
    if (follows) this.scroller.scrollTop = this.scroller.scrollHeight;
  }
}

/** The calls of a turn for which there is no result, if nothing but results came after it. */
function unanswered(turns, index) {
  const later = turns.slice(index + 1);
  if (later.some((turn) => turn.role !== "tool")) return [];
  return (turns[index].calls ?? []).filter((call) => !later.some((turn) => turn.call === call.id));
}

/** The request as it can be copied. */
function requestOf(body) {
  const { model, messages, stream_options: _, stream, max_tokens, tools, ...options } = body;
  const ours = { model, max_new_tokens: max_tokens, tools, ...options };
  const theirs = { model, max_tokens, tools, stream, ...options };
  return {
    path: "/v1/chat/completions",
    body,
    streams: true,
    python: `for token in client.stream(messages=${py(messages)}, ${keywords(given(ours))}):\n    print(token.text, end="", flush=True)`,
    openai: `for chunk in client.chat.completions.create(\n    messages=${py(messages)}, ${keywords(given(theirs))}\n):\n    print(chunk.choices[0].delta.content or "", end="", flush=True)`,
  };
}

function given(values) {
  return Object.fromEntries(Object.entries(values).filter(([, value]) => value !== undefined));
}
