/** Labels: classification by a model's own labels, or by given ones. */

import { bars } from "../bars.js";
import { keywords, py } from "../snippets.js";

export const classify = {
  name: "classify",
  title: "Classify",
  verb: "Classify",
  note: "The model's own labels, with their probabilities.",
  fields: [
    {
      name: "inputs",
      label: "Text",
      kind: "text",
      value: "A warm, funny and quietly moving film.",
    },
  ],
  request: ({ inputs }, model) => ({
    path: "/classify",
    body: { inputs, model },
    python: `for item in client.classify(${py(inputs)}, model=${py(model)}).labels:\n    print(item.label, item.score)`,
  }),
  render: ([labels]) => bars(labels),
};

export const zeroShot = {
  name: "zero-shot-classify",
  title: "Classify by any labels",
  verb: "Classify",
  note: "Labels of your own: the model says how well each of them fits the text.",
  fields: [
    {
      name: "inputs",
      label: "Text",
      kind: "text",
      value: "The harvest was poor and bread had become dear.",
    },
    {
      name: "candidate_labels",
      label: "Labels, one per line",
      kind: "lines",
      value: ["farming", "music", "the sea"],
    },
  ],
  request({ inputs, candidate_labels }, model) {
    return {
      path: "/zero-shot-classify",
      body: { inputs, model, parameters: { candidate_labels } },
      python: `print(client.zero_shot_classify(${py(inputs)}, ${py(candidate_labels)}, ${keywords({ model })}))`,
    };
  },
  render: (labels) => bars(labels),
};
