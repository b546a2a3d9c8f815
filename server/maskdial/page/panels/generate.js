/** Generation: a prompt is continued, and watched while it is. */

import { show } from "../dom.js";
import { given } from "../panel.js";
import { keywords, py } from "../snippets.js";
import { Writer } from "../writer.js";

const SAMPLING = ["temperature", "top_p", "min_p", "repetition_penalty"];

/** The panel, with the model's own defaults in its fields, and the policies to choose from. */
export function generate(defaults, policies) {
  const number = (name, label, step, max) => ({
    name,
    label,
    kind: "number",
    value: defaults[name],
    step,
    min: 0,
    max,
  });
  return {
    name: "generate",
    title: "Write on",
    verb: "Write",
    note: "Tokens are tinted by their surprisal; point at one to see what else it could have been.",
    fields: [
      {
        name: "inputs",
        label: "Prompt",
        kind: "text",
        value: "Once upon a time there was a little",
      },
      { name: "max_new_tokens", label: "Tokens", kind: "number", value: 120, min: 1 },
      number("temperature", "Temperature", 0.1, 100),
      number("top_p", "Top p", 0.05, 1),
      number("min_p", "Min p", 0.01, 1),
      number("repetition_penalty", "Repetition penalty", 0.05, 100),
      { name: "seed", label: "Seed", kind: "number", value: "", min: 0 },
      ...(policies.length ? [policyField(policies)] : []),
    ],
    request(values, model) {
      const { inputs, max_new_tokens, seed, policy } = values;
      const sampling = Object.fromEntries(SAMPLING.map((name) => [name, values[name]]));
      const parameters = given({ max_new_tokens, ...sampling, seed });
      const { temperature, top_p } = sampling;
      const openai = given({
        model,
        prompt: inputs,
        max_tokens: max_new_tokens,
        temperature,
        top_p,
        seed,
      });
      return {
        path: "/generate_stream",
        body: { inputs, model, parameters: { ...parameters, top_n_tokens: 5 } },
        streams: true,
        policy,
        python: `for token in client.stream(${py(inputs)}, ${keywords({ model, ...parameters })}):\n    print(token.text, end="", flush=True)`,
        openai: `for chunk in client.completions.create(${keywords(openai)}, ${asked(policy)}stream=True):\n    print(chunk.choices[0].text, end="", flush=True)`,
      };
    },
    start({ body, policy }, out) {
      const writer = new Writer();
      show(out, writer.element);
      return { done: writer.run(body.inputs, body, policy), stop: () => writer.stop() };
    },
  };
}

/** Which policy is asked for beside those that bind the model. */
function policyField(policies) {
  const none = { value: "", label: "as the model is bound" };
  const options = [none, ...policies.map((name) => ({ value: name, label: name }))];
  return { name: "policy", label: "Policy", kind: "choice", value: "", options };
}

function asked(policy) {
  return policy ? `extra_headers=${py({ "x-policy": policy })}, ` : "";
}
