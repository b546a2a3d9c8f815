/** Conversations: kept in this browser only, and told to no server but as the messages of a request. */

const NAME = "maskdial-conversations";
const MOST = 100; // beyond them, and beyond what the browser keeps, the oldest are forgotten

/**
 * @typedef {object} Turn
 * @property {"user"|"assistant"|"tool"} role
 * @property {string} content
 * @property {string} [thoughts] what the model thought; it is not sent again
 * @property {object[]} [calls] of tools, as OpenAI has them
 * @property {string} [call] the id of the call that a tool's turn answers
 * @property {string} [note] how the reply ended, and how fast it came
 *
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} model
 * @property {Turn[]} turns
 * @property {number} changed milliseconds
 */

/** All that are kept, the one that changed last first. */
export function kept() {
  try {
    const found = JSON.parse(localStorage.getItem(NAME) ?? "[]");
    return Array.isArray(found) ? found.filter(isConversation) : [];
  } catch {
    return []; // a browser that keeps nothing, or text of another page
  }
}

function isConversation(each) {
  return Array.isArray(each?.turns) && each.turns.every((turn) => typeof turn?.content === "string");
}

/** A conversation without turns, which is not kept before it has some. */
export function begin(model) {
  return { id: `${Date.now()}-${Math.random()}`, model, turns: [], changed: 0 };
}

/** Keeps a conversation, also beside those that another tab has kept since. */
export function keep(conversation) {
  conversation.changed = Date.now();
  const others = kept().filter((each) => each.id !== conversation.id);
  write([conversation, ...others].slice(0, MOST));
}

/** Forgets a conversation. */
export function forget(id) {
  write(kept().filter((each) => each.id !== id));
}

/** What a list calls it: how it began. */
export function titleOf(conversation) {
  const asked = conversation.turns.find((turn) => turn.role === "user");
  return asked?.content.trim().split("\n")[0].slice(0, 60) || "New chat";
}

/** The messages of a request. */
export function messagesOf(turns, system) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const { role, content, calls, call } of turns) {
    if (role === "tool") messages.push({ role, tool_call_id: call, content });
    else messages.push({ role, content, ...(calls?.length && { tool_calls: calls }) });
  }
  return messages;
}

function write(conversations) {
  for (let number = conversations.length; number >= 0; number--) {
    try {
      localStorage.setItem(NAME, JSON.stringify(conversations.slice(0, number)));
      return;
    } catch {
      // The browser's quota is used up: once more, without the oldest.
    }
  }
}
