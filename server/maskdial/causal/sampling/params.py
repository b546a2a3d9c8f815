"""SamplingParams: how a text is generated, with the bounds and the defaults of each parameter."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from maskdial.bounds import Range
from maskdial.causal.sampling.dry import Breakers, Dry

CONTROLS = frozenset(
    {
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "top_n_sigma",
        "xtc_probability",
        "dynatemp_range",
        "mirostat",
    }
)
"""The parameters that mean nothing unless tokens are drawn."""

_GREEDY_TEMPERATURE = 1e-5
_NO_XTC = 0.5  # two tokens cannot both have more than half

NewTokens = Annotated[int, Range(1)]
Count = Annotated[int, Range(0)]
Temperature = Annotated[float, Range(0, 100)]
Share = Annotated[float, Range(0, 1)]
PositiveShare = Annotated[float, Range(0, 1, above_low=True)]
RepetitionPenalty = Annotated[float, Range(0.01, 100)]
Penalty = Annotated[float, Range(-2, 2)]
NotNegative = Annotated[float, Range(0, 100)]
OrMinusOne = Annotated[float, Range(-1, 100)]
DryBase = Annotated[float, Range(1, 100)]
DryLength = Annotated[int, Range(0, 1000)]
LastN = Annotated[int, Range(-1)]
MirostatVersion = Literal[0, 2]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSampling:
    """What a model's own files may say of its sampling; the API checks the bounds.

    Attributes:
        do_sample: whether tokens are drawn; otherwise the most likely one is chosen.
        temperature: divides the logits; below 1e-5 the choice is greedy.
        top_k: draw from the k most likely tokens (and those equal to the k-th); 0 disables it.
        top_p: draw from the smallest set of tokens whose probability reaches this; 1 disables it.
        min_p: draw from tokens at least this many times as likely as the likeliest
            (arXiv:2407.01082); 0 disables it.
        typical_p: draw from the tokens whose information is nearest to the distribution's entropy,
            up to this probability (arXiv:2202.00666); 1 disables it.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt
            or the generated text (CTRL, arXiv:1909.05858); 1 disables it.
    """

    do_sample: bool = False
    temperature: Temperature = 1.0
    top_k: Count = 0
    top_p: Share = 1.0
    min_p: Share = 0.0
    typical_p: PositiveShare = 1.0
    repetition_penalty: RepetitionPenalty = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(ModelSampling):
    """How a text is generated. Copies of a text share it, each with a seed of its own.

    Attributes:
        max_new_tokens: maximum number of tokens to generate.
        min_new_tokens: minimum number of tokens: before it, only a full context ends the text.
            End-of-sequence and ``stop_token_ids`` are not drawn, and stop strings do not count.
        frequency_penalty: subtracted from a token's logit once for each time it was generated
            (OpenAI); 0 disables it.
        presence_penalty: subtracted once from the logit of each token that was generated (OpenAI);
            0 disables it.
        penalty_last_n: the repetition, frequency and presence penalties are for so many of the last
            tokens, of the prompt as well, as in llama.cpp; 0 for none, -1 for all. None: as said of
            each.
        no_repeat_ngram_size: no sequence of so many tokens occurs twice; 0 disables it.
        no_source_ngram_size: no sequence of so many tokens of the source text occurs; 0 for any.
        banned: sequences of tokens that are never written; a last token is not drawn after the
            others.
        forced_first: the token that the text begins with; it overrides all other parameters.
        forced_last: the tokens that a text of ``max_new_tokens`` may end with; empty for any.
        dry_multiplier: of the penalty for tokens that would go on with a repetition (DRY, see
            `maskdial.causal.sampling.dry`); 0 disables it.
        dry_base: which that penalty grows by with each token repeated.
        dry_allowed_length: tokens that may be repeated.
        dry_penalty_last_n: tokens to look at for repetitions; 0 for none, -1 for all.
        dry_sequence_breakers: texts that repetitions do not reach beyond.
        dry_breakers: their tokens.
        top_n_sigma: draw from tokens whose logits are at most so many standard deviations below the
            greatest (arXiv:2411.07641); 0 or less disables it.
        xtc_probability: of excluding the top choices (XTC) for a token; 0 disables it.
        xtc_threshold: the probability from which a token is one; above 0.5 disables it.
        dynatemp_range: how far from ``temperature`` it may move with the distribution's entropy; 0
            disables it.
        dynatemp_exponent: of the normalized entropy there.
        mirostat: 2 draws by Mirostat 2.0 (arXiv:2007.14966) in place of top-k, top-p, min-p,
            typical-p, top-n-sigma, XTC and the dynamic temperature; 0 disables it.
        mirostat_tau: the surprise that it keeps to, in bits.
        mirostat_eta: its learning rate.
        logit_bias: pairs of a token id and a number to add to its logit; -inf bans it.
        text_bias: likewise, of a text whose tokens all get the number.
        bad_words: texts that are never written.
        stop: strings that end the text.
        include_stop: whether the stop string is part of the text.
        stop_token_ids: tokens that end the text.
        ignore_eos: whether to continue after the end-of-sequence token.
        top_n_tokens: how many of the likeliest tokens to report beside each chosen one.
        scored_tokens: tokens whose log-probabilities are reported instead of the likeliest ones'.
        prompt_logprobs: whether to report the log-probabilities of the prompt's own tokens, each
            with ``top_n_tokens`` alternatives.
    """

    max_new_tokens: NewTokens = 20
    min_new_tokens: Count = 0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    penalty_last_n: LastN | None = None
    no_repeat_ngram_size: int = 0
    no_source_ngram_size: int = 0
    banned: tuple[tuple[int, ...], ...] = ()
    forced_first: int | None = None
    forced_last: tuple[int, ...] = ()
    dry_multiplier: NotNegative = 0.0
    dry_base: DryBase = 1.75
    dry_allowed_length: DryLength = 2
    dry_penalty_last_n: LastN = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    dry_breakers: Breakers | None = None
    top_n_sigma: OrMinusOne = 0.0
    xtc_probability: Share = 0.0
    xtc_threshold: Share = 0.1
    dynatemp_range: NotNegative = 0.0
    dynatemp_exponent: NotNegative = 1.0
    mirostat: MirostatVersion = 0
    mirostat_tau: NotNegative = 5.0
    mirostat_eta: Share = 0.1
    logit_bias: tuple[tuple[int, float], ...] = ()
    text_bias: tuple[tuple[str, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop: bool = True
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    top_n_tokens: int = 0
    scored_tokens: tuple[int, ...] = ()
    prompt_logprobs: bool = False

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return not self.do_sample or self.temperature < _GREEDY_TEMPERATURE

    @property
    def dry(self) -> Dry | None:
        """How repetitions are penalized, once the breakers' tokens are known; None for not."""
        if not self.penalizes_repetitions or self.dry_breakers is None:
            return None
        return Dry(
            multiplier=self.dry_multiplier,
            base=self.dry_base,
            allowed_length=self.dry_allowed_length,
            last_n=self.dry_penalty_last_n,
            breakers=self.dry_breakers,
        )

    @property
    def penalizes_repetitions(self) -> bool:
        """Whether DRY is on."""
        return self.dry_multiplier > 0.0 and self.dry_penalty_last_n != 0

    @property
    def excludes_top_choices(self) -> bool:
        """Whether XTC may change anything."""
        return self.xtc_probability > 0.0 and self.xtc_threshold <= _NO_XTC

    @property
    def as_llama(self) -> bool:
        """Whether candidates are narrowed down as in llama.cpp, whose samplers these are."""
        return self.top_n_sigma > 0.0 or self.dynatemp_range > 0.0 or self.excludes_top_choices


DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in dataclasses.fields(SamplingParams)
}
"""The parameters' defaults by their names."""
