/** Spans: entities in a text, what is put in their place, and an answer in its context. */

import { el } from "../dom.js";
import { percent } from "../scale.js";
import { keywords, py } from "../snippets.js";

const LABELS = ["person", "city"];

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

/** Entities of labels that the request brings, for a model that has none of its own. */
export const findEntities = {
  ...tokenClassify,
  title: "Find",
  verb: "Find",
  note: "Names of your own: the model finds them in the text.",
  fields: [
    ...tokenClassify.fields,
    { name: "candidate_labels", label: "Labels, one per line", kind: "lines", value: LABELS },
  ],
  request: ({ inputs, candidate_labels }, model) => ({
    path: "/token-classify",
    body: { inputs, model, parameters: { candidate_labels } },
    python: `for entity in client.token_classify(${py(inputs)}, ${keywords({ candidate_labels, model })}):\n    print(entity)`,
  }),
};

/** `any`: whether the model has no labels of its own, so that those to redact have to be named. */
export const redact = (any) => ({
  name: "redact",
  title: "Redact",
  verb: "Redact",
  note: "Something else in the place of names, places and the like.",
  fields: [
    ...tokenClassify.fields,
    {
      name: "labels",
      label: any ? "Labels, one per line" : "Labels, one per line; all if there are none",
      kind: "lines",
      value: any ? LABELS : [],
    },
    { name: "replacement", label: "What to put in their place", kind: "line", value: "[{label}]" },
  ],
  request({ inputs, labels, replacement }, model) {
    const parameters = { ...(any || labels.length ? { labels } : {}), replacement };
    return {
      path: "/redact",
      body: { inputs, model, parameters },
      python: `print(client.redact(${py(inputs)}, ${keywords({ ...parameters, model })}).text)`,
    };
  },
  render: ({ text, replacements }) =>
    el(
      "p.marked",
      {},
      marked(
        text,
        replacements.map(({ redacted_start, redacted_end, score, label }) => ({
          start: redacted_start,
          end: redacted_end,
          score,
          label,
        })),
      ),
    ),
});

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
export function marked(text, spans) {
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
