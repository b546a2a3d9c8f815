/** Spans: entities in a text, and an answer in its context. */

import { el } from "../dom.js";
import { percent } from "../scale.js";
import { keywords, py } from "../snippets.js";

export const tokenClassify = {
  name: "token-classify",
  title: "Tag words",
  verb: "Tag",
  note: "Names, places and whatever else the model was trained to find.",
  fields: [
    {
      name: "inputs",
      label: "Text",
      kind: "text",
      value: "Alice took the train from Paris to Rome.",
    },
  ],
  request: ({ inputs }, model) => ({
    path: "/token-classify",
    body: { inputs, model },
    python: `for entity in client.token_classify(${py(inputs)}, ${keywords({ model })}):\n    print(entity)`,
  }),
  render(entities, { inputs }) {
    const spans = entities.map((each) => ({ ...each, label: each.entity_group ?? each.entity }));
    if (!spans.length) return el("p.marked", {}, inputs);
    return el("p.marked", {}, marked(inputs, spans));
  },
};

export const questionAnswering = {
  name: "question-answering",
  title: "Answer from a text",
  verb: "Answer",
  note: "The span of the context that answers the question.",
  fields: [
    { name: "question", label: "Question", kind: "line", value: "Who kept the lighthouse?" },
    {
      name: "context",
      label: "Context",
      kind: "text",
      value:
        "The lighthouse stood on a rock. Old Martha kept it for thirty years, and nobody else ever climbed its stairs.",
    },
  ],
  request: ({ question, context }, model) => ({
    path: "/question-answering",
    body: { inputs: { question, context }, model },
    python: `result = client.question_answering(${py({ question, context })}, ${keywords({ model })})\nprint(result.answer, result.score)`,
  }),
  render: ({ answer, score, start, end }, { context }) => [
    el(
      "p.marked",
      {},
      answer ? marked(context, [{ start, end, score, label: "answer" }]) : context,
    ),
    el("p.hint", {}, answer ? `“${answer}”, score ${percent(score)}` : "No answer in this text."),
  ],
};

/** A text in which spans are highlighted, each with its label. Offsets count characters, not UTF-16 units. */
function marked(text, spans) {
  const characters = [...text];
  const parts = [];
  let at = 0;
  for (const { start, end, score, label } of spans.toSorted(
    (one, other) => one.start - other.start,
  )) {
    if (start < at) continue;
    parts.push(characters.slice(at, start).join(""));
    parts.push(
      el(
        "mark",
        { title: percent(score) },
        characters.slice(start, end).join(""),
        el("small", {}, label),
      ),
    );
    at = end;
  }
  return [...parts, characters.slice(at).join("")];
}
