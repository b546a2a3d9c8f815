/** Extract: what a schema names in a text, which are entities, records, relations and labels. */

import { bars } from "../bars.js";
import { el } from "../dom.js";
import { percent } from "../scale.js";
import { keywords, py } from "../snippets.js";
import { marked } from "./spans.js";

const TASK = "label";

export const extract = {
  name: "extract",
  title: "Extract",
  verb: "Extract",
  note: "A schema of your own: the model reads it with the text, in one pass.",
  fields: [
    {
      name: "inputs",
      label: "Text",
      kind: "text",
      value: "Alice took the train from Paris to Rome.",
    },
    { name: "entities", label: "Entities, one per line", kind: "lines", value: ["person", "city"] },
    {
      name: "record",
      label: "A record: its name, then its fields, one per line",
      kind: "lines",
      value: ["trip", "from", "to"],
    },
    { name: "relations", label: "Relations, one per line", kind: "lines", value: ["visits"] },
    {
      name: "labels",
      label: "Labels of the text, one per line",
      kind: "lines",
      value: ["travel", "sport"],
    },
  ],
  request({ inputs, entities, record, relations, labels }, model) {
    const [name, ...fields] = record;
    const schema = {
      ...(entities.length && { entities }),
      ...(name && { structures: { [name]: { fields: fields.map((each) => ({ name: each })) } } }),
      ...(relations.length && { relations }),
      ...(labels.length && { classifications: [{ task: TASK, labels }] }),
    };
    const shown = { include_confidence: true, include_spans: true };
    return {
      path: "/extract",
      body: { inputs, model, parameters: { schema, ...shown } },
      python: `print(client.extract(${py(inputs)}, ${py(schema)}, ${keywords({ model, ...shown })}))`,
    };
  },
  render(found, { inputs, record: [name, ...fields], labels }) {
    const spans = Object.entries(found.entities ?? {}).flatMap(([label, values]) =>
      values.map(({ start, end, confidence }) => ({ start, end, score: confidence, label })),
    );
    return [
      el("p.marked", {}, marked(inputs, spans)),
      el(
        "div.columns",
        {},
        name && section(name, table(fields, found[name])),
        Object.entries(found.relation_extraction ?? {}).map(([relation, pairs]) =>
          section(relation, pairs.length ? el("ul", {}, pairs.map(pair)) : nothing()),
        ),
        labels.length > 0 &&
          section(TASK, bars([{ label: found[TASK].label, score: found[TASK].confidence }])),
      ),
    ];
  },
};

function section(title, content) {
  return el("section", {}, el("h4", {}, title), content);
}

/** Records, a row each. */
function table(fields, records) {
  if (!records.length) return nothing();
  return el(
    "div.scroll",
    { tabindex: "0", role: "region", "aria-label": "Records" },
    el(
      "table.records",
      {},
      el(
        "tr",
        {},
        fields.map((field) => el("th", { scope: "col" }, field)),
      ),
      records.map((record) =>
        el(
          "tr",
          {},
          fields.map((field) => el("td", {}, values(record[field]))),
        ),
      ),
    ),
  );
}

function values(found) {
  return found.flatMap((each, index) => [index > 0 && ", ", value(each)]);
}

function value({ text, confidence }) {
  return el("span", { title: percent(confidence) }, text);
}

function pair({ head, tail }) {
  return el("li", {}, value(head), " → ", value(tail));
}

function nothing() {
  return el("p.hint", {}, "Nothing in this text.");
}
