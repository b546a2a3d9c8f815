/** How probabilities are shown: as bits of surprisal, as a share of the accent color, as text. */

import { styled } from "./dom.js";

/** Bits at which bars are full and tints are deepest. */
export const MOST_BITS = 12;

/** The surprisal of a natural log-probability; null for a token that nothing precedes. */
export function bits(logprob) {
  return logprob == null ? null : Math.max(0, -logprob / Math.LN2);
}

/** Tints an element by surprisal: the likelier, the paler. Lightness alone tells the order. */
export function tint(element, surprisal) {
  return styled(element, "share", Math.min((surprisal ?? 0) / MOST_BITS, 1).toFixed(3));
}

export function bitText(surprisal) {
  return surprisal == null ? "no score" : `${surprisal.toFixed(1)} bits`;
}

export function percent(share) {
  if (share >= 0.1) return `${(share * 100).toFixed(0)}%`;
  return share >= 0.001 ? `${(share * 100).toFixed(1)}%` : "<0.1%";
}

/** A token as it is read: white space made visible where it is all there is. */
export function shown(token) {
  return token.trim() === ""
    ? token.replaceAll("\n", "⏎").replaceAll(" ", "␣") || "·"
    : token.trim();
}
