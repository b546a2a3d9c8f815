/** Texts against texts: ranking by a query, similarities, and embeddings as a map. */

import { post } from "../api.js";
import { bars } from "../bars.js";
import { el, styled, svg } from "../dom.js";
import { planar } from "../projection.js";
import { keywords, py } from "../snippets.js";

const SENTENCES = [
  "The ship left the harbor at dawn.",
  "A boat sailed out of the port in the morning.",
  "The sailors pulled up the anchor.",
  "She baked a loaf of bread.",
  "The cake was still warm from the oven.",
  "He plays the violin in the evening.",
];

export const rerank = {
  name: "rerank",
  title: "Rank texts",
  verb: "Rank",
  note: "Each text is read together with the query, and scored.",
  fields: [
    { name: "query", label: "Query", kind: "line", value: "Which text is about ships?" },
    { name: "texts", label: "Texts, one per line", kind: "lines", value: SENTENCES.slice(0, 4) },
  ],
  request: ({ query, texts }, model) => ({
    path: "/rerank",
    body: { query, texts, model },
    python: `for rank in client.rerank(${py(query)}, ${py(texts)}, ${keywords({ model })}):\n    print(rank.index, rank.score)`,
  }),
  render: (ranks, { texts }) =>
    bars(ranks.map(({ index, score }) => ({ label: texts[index], score, text: score.toFixed(3) }))),
};

export const similarity = {
  name: "similarity",
  title: "Compare texts",
  verb: "Compare",
  note: "How alike any two texts are. Each row is a request; the first one is shown.",
  fields: [{ name: "sentences", label: "Texts, one per line", kind: "lines", value: SENTENCES }],
  request({ sentences }, model) {
    const [source] = sentences;
    return {
      path: "/similarity",
      body: row(source, sentences, model),
      python: `print(client.similarity(${py(source ?? "")}, ${py(sentences)}, ${keywords({ model })}))`,
    };
  },
  async send({ path, body }) {
    const { sentences } = body.inputs;
    const rows = await Promise.all(
      sentences.map((source) => post(path, row(source, sentences, body.model))),
    );
    return { ...rows[0], content: rows.map(({ content }) => content) };
  },
  render: (rows, { sentences }) => matrix(sentences, rows),
};

function row(source_sentence, sentences, model) {
  return { inputs: { source_sentence: source_sentence ?? "", sentences }, model };
}

export const embed = {
  name: "embed",
  title: "Map texts",
  verb: "Embed",
  note: "The embeddings, projected on the two directions in which they differ most.",
  fields: [{ name: "inputs", label: "Texts, one per line", kind: "lines", value: SENTENCES }],
  request: ({ inputs }, model) => ({
    path: "/embed",
    body: { inputs, model },
    python: `vectors = client.embed(${py(inputs)}, ${keywords({ model })})`,
    openai: openaiEmbeddings(inputs, model),
  }),
  render: (vectors, { inputs }) => [
    map(planar(vectors), inputs),
    el("p.hint", {}, `${vectors.length} vectors of ${vectors[0].length} numbers`),
  ],
};

function openaiEmbeddings(input, model) {
  return `reply = client.embeddings.create(model=${py(model)}, input=${py(input)})\nprint(reply.data[0].embedding)`;
}

function matrix(texts, rows) {
  const apart = rows.flatMap((row, at) => row.filter((_, column) => column !== at));
  const least = Math.min(...apart, 1);
  const span = Math.max(...apart, least) - least || 1;
  const cell = (value, diagonal) =>
    styled(
      el("td", { "data-diagonal": diagonal }, value.toFixed(2)),
      "share",
      Math.max(0, Math.min((value - least) / span, 1)).toFixed(3),
    );
  return el(
    "div.scroll",
    { tabindex: "0", role: "region", "aria-label": "Similarities" },
    el(
      "table.similarities",
      {},
      rows.map((row, at) =>
        el(
          "tr",
          {},
          el("th", { scope: "row", title: texts[at] }, el("b", {}, at + 1), " ", texts[at]),
          row.map((value, column) => cell(value, at === column)),
        ),
      ),
    ),
  );
}

function map(points, texts) {
  const [width, height, margin] = [100, 62, 8];
  const place = (value, least, most, size) =>
    margin + ((value - least) / (most - least || 1)) * (size - 2 * margin);
  const [xs, ys] = [points.map(([x]) => x), points.map(([, y]) => y)];
  const dots = points.map(([x, y], index) => {
    const [left, top] = [
      place(x, Math.min(...xs), Math.max(...xs), width),
      place(y, Math.min(...ys), Math.max(...ys), height),
    ];
    return svg(
      "g",
      { transform: `translate(${left.toFixed(2)} ${top.toFixed(2)})` },
      svg("title", {}, texts[index]),
      svg("circle", { r: 2.6 }),
      svg("text", { dy: 1.05 }, index + 1),
    );
  });
  return el(
    "figure.map",
    {},
    svg(
      "svg",
      { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Map of the texts" },
      dots,
    ),
    el(
      "ol",
      {},
      texts.map((text) => el("li", {}, text)),
    ),
  );
}
