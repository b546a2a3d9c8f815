/** Fill-mask: bars of the candidates for each blank. */

import { bars } from "../bars.js";
import { el } from "../dom.js";
import { given } from "../panel.js";
import { shown } from "../scale.js";
import { keywords, py } from "../snippets.js";

export const fillMask = {
  name: "fill-mask",
  title: "Fill blanks",
  verb: "Fill",
  note: "Write [MASK] for each word that the model should guess from both sides.",
  fields: [
    {
      name: "inputs",
      label: "Text",
      kind: "text",
      value: "The old [MASK] lived in a house by the [MASK].",
    },
    { name: "top_k", label: "Candidates", kind: "number", value: 5, min: 1, max: 50 },
  ],
  request({ inputs, top_k }, model) {
    const parameters = given({ top_k });
    return {
      path: "/fill-mask",
      body: { inputs, model, parameters },
      python: `result = client.fill_mask(${py(inputs)}, ${keywords({ model, ...parameters })})\nfor fills in result.masks:\n    print([(fill.token_str, fill.score) for fill in fills])`,
    };
  },
  render(content) {
    const masks = Array.isArray(content[0]) ? content : [content];
    return el(
      "div.columns",
      {},
      masks.map((fills, index) =>
        el(
          "section",
          {},
          masks.length > 1 && el("h4", {}, `Blank ${index + 1}`),
          bars(fills.map((fill) => ({ label: shown(fill.token_str), score: fill.score }))),
        ),
      ),
    );
  },
};
