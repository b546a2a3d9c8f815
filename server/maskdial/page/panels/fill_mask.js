/** Fill-mask: bars of the candidates for each blank; several blanks are also filled in place. */

import { post } from "../api.js";
import { bars } from "../bars.js";
import { el, styled } from "../dom.js";
import { given } from "../panel.js";
import { percent, shown } from "../scale.js";
import { keywords, py } from "../snippets.js";

const MASKS = /\[MASK\]|<mask>/;

export const fillMask = {
  name: "fill-mask",
  title: "Fill blanks",
  verb: "Fill",
  note: "Write [MASK] for each word that the model should guess from both sides. Several are filled one pass after the other, the surest first.",
  fields: [
    {
      name: "inputs",
      label: "Text",
      kind: "text",
      value: "The old [MASK] lived in a house by the [MASK].",
    },
    { name: "top_k", label: "Candidates", kind: "number", value: 5, min: 1, max: 50 },
    { name: "per_pass", label: "Blanks per pass", kind: "range", value: 1, min: 1, max: 8 },
  ],
  request({ inputs, top_k, per_pass }, model) {
    const numBlanks = inputs.split(MASKS).length - 1;
    const each = given({ top_k });
    const alone = { inputs, model, parameters: each };
    if (numBlanks < 2) {
      return {
        path: "/fill-mask",
        body: alone,
        python: `result = client.fill_mask(${py(inputs)}, ${keywords({ model, ...each })})\nfor fills in result.masks:\n    print([(fill.token_str, fill.score) for fill in fills])`,
      };
    }
    const steps = Math.ceil(numBlanks / per_pass);
    return {
      path: "/fill-mask",
      body: { inputs, model, parameters: { joint: true, steps } },
      python: `for text in client.fill_jointly(${py(inputs)}, ${keywords({ model, steps })}):\n    print(text.sequence, [(token.token_str, token.step) for token in text.tokens])`,
      alone,
    };
  },
  /** Asks for the candidates of each blank as well. */
  async send({ path, body, alone }) {
    const reply = await post(path, body);
    if (!alone) return { ...reply, content: { candidates: reply.content } };
    const { content: candidates } = await post(path, alone);
    return { ...reply, content: { filling: reply.content[0], candidates } };
  },
  render({ filling, candidates }, { inputs }) {
    const masks = Array.isArray(candidates[0]) ? candidates : [candidates];
    const columns = masks.map((fills, index) =>
      el(
        "section",
        {},
        masks.length > 1 && el("h4", {}, `Blank ${index + 1} alone`),
        bars(fills.map((fill) => ({ label: shown(fill.token_str), score: fill.score }))),
      ),
    );
    return [filling && filled(inputs, filling), el("div.columns", {}, columns)];
  },
};

/** A text with its blanks filled, each with the pass that filled it and its probability there. */
function filled(text, { score, tokens }) {
  const [first, ...parts] = text.split(MASKS);
  const passes = Math.max(...tokens.map((token) => token.step)) + 1;
  return [
    el(
      "p.marked.unmasked",
      {},
      first,
      tokens.map((token, index) => {
        const confidence = percent(token.score);
        const word = el(
          "span.filled",
          { title: `filled in pass ${token.step + 1} of ${passes}, ${confidence} sure` },
          token.token_str.replace(/^##/, "").trim(),
          el("small", {}, `${token.step + 1}, ${confidence}`),
        );
        styled(styled(word, "share", token.score.toFixed(3)), "step", token.step);
        return [word, parts[index]];
      }),
    ),
    el(
      "p.hint",
      {},
      `Filled together in ${passes} ${passes > 1 ? "passes" : "pass"}; ${percent(score)} a word once all are known.`,
    ),
  ];
}
