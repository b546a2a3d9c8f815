/** Score: the surprisal of each token of a text. */

import { el } from "../dom.js";
import { bits, bitText, tint } from "../scale.js";
import { keywords, py } from "../snippets.js";

/** The panel for one of a model's masks. */
export function score(mask) {
  return {
    name: "score",
    title: "Score a text",
    verb: "Score",
    note: "How surprised the model is by each token: the deeper the tint, the more bits it takes.",
    fields: [
      {
        name: "inputs",
        label: "Text",
        kind: "text",
        value: "It is not down in any map; true places never are.",
      },
    ],
    request: ({ inputs }, model) => ({
      path: "/score",
      body: { inputs, model, mask },
      python: `result = client.score(${py(inputs)}, ${keywords({ model, mask })})\nprint(result.log_likelihood, result.perplexity)`,
    }),
    render: ([{ tokens, log_likelihood, perplexity }]) => [
      el(
        "p.written",
        {},
        tokens.map((token) => {
          const surprisal = bits(token.logprob);
          return tint(el("span.piece", { title: bitText(surprisal) }, token.text), surprisal);
        }),
      ),
      el(
        "p.hint",
        {},
        `${bitText(-log_likelihood / Math.LN2)} in all`,
        perplexity == null ? "" : `, perplexity ${perplexity.toFixed(1)}`,
      ),
    ],
  };
}
