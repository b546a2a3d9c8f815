/** A reply of `/v1/chat/completions`, read as it is written. */

import { stream } from "../api.js";

/**
 * Asks for a reply.
 *
 * @param {object} body of the request
 * @param {AbortSignal} signal ends it
 * @param {(turn: object) => void} changed is told after each event
 * @returns {Promise<object>} the turn, with a note on how it ended; also where it was stopped
 * @throws {ApiError} nothing of it came
 */
export async function reply(body, signal, changed) {
  const turn = { role: "assistant", content: "", thoughts: "", calls: [] };
  let [first, usage, end] = [null, null, "stopped"];
  try {
    for await (const event of stream("/v1/chat/completions", body, signal)) {
      usage = event.usage ?? usage;
      const [choice] = event.choices;
      if (!choice) continue;
      end = choice.finish_reason ?? end;
      const { content, reasoning_content: thought, tool_calls: calls } = choice.delta;
      if (content || thought || calls) first ??= performance.now();
      turn.content += content ?? "";
      turn.thoughts += thought ?? "";
      for (const call of calls ?? []) add(turn.calls, call);
      changed(turn);
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      if (!turn.content && !turn.calls.length) throw error;
      end = error.message;
    }
  }
  turn.note = note(end, usage, first, body.max_tokens);
  return turn;
}

/** Adds a part of a call to those that have come. */
function add(calls, { index, id, function: part }) {
  calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } };
  calls[index].function.name += part?.name ?? "";
  calls[index].function.arguments += part?.arguments ?? "";
}

function note(end, usage, first, limit) {
  const parts = [];
  if (usage) {
    const { completion_tokens: tokens, prompt_tokens: read } = usage;
    const seconds = (performance.now() - (first ?? performance.now())) / 1e3;
    const rate = seconds > 0 && tokens > 1 && `${((tokens - 1) / seconds).toFixed(0)} tokens/s`;
    parts.push(`${read} tokens read, ${tokens} written`, rate);
  }
  if (end === "length") {
    parts.push(
      limit
        ? `cut at the limit of ${limit} tokens: Settings has it`
        : "cut: the model's context is full",
    );
  } else if (end === "content_filter") parts.push("stopped by a policy");
  else if (end !== "stop" && end !== "tool_calls") parts.push(end);
  return parts.filter(Boolean).join(" · ");
}
