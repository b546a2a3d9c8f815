r"""How byte-level BPE tokenizers of GGUF files split texts: by ``tokenizer.ggml.pre``.

The names and expressions are those of llama.cpp (``src/llama-vocab.cpp``), which has them from each
model's tokenizer.json; where it adapts one to its own engine, it is the original here. Several
expressions apply one after the other, each within the parts that the ones before have made.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_TEKKEN = _GPT4O.replace(f"{_ENDINGS}?", "").replace(r"\p{N}{1,3}", r"\p{N}")
_KIMI = r"[\p{Han}]+|" + _GPT4O.replace(_UPPER, rf"[{_UPPER}&&[^\p{{Han}}]]").replace(
    _LOWER, rf"[{_LOWER}&&[^\p{{Han}}]]"
).replace(r"[\r\n/]*", r"[\r\n]*")
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_CJK = "[一-龥\u0800-一가-\ud7ff]+"
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ"
    "-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉ"
    "ⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)


@dataclass(frozen=True, slots=True)
class Split:
    """How texts are split.

    Attributes:
        expressions: applied in order; each match is a part.
        ignores_merges: whether a part that is a token stays one, whatever the merges.
        adds_bos: whether texts begin with the first token unless the file says otherwise.
    """

    expressions: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False


def _alike(names: str, split: Split) -> dict[str, Split]:
    return dict.fromkeys(names.split(), split)


_GROUPS = (
    _alike(
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 jina-es jina-de jina-v2-es "
        "jina-v2-de gigachat a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code roberta-bpe",
        Split((_GPT2,)),
    ),
    _alike(
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        Split((r"\p{N}", _GPT2)),
    ),
    _alike(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        Split((_LLAMA3,), ignores_merges=True, adds_bos=True),
    ),
    _alike("dbrx smaug-bpe chatglm-bpe", Split((_LLAMA3,))),
    _alike("glm4 glm5", Split((_LLAMA3,), ignores_merges=True)),
    _alike(
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan grok-2 solar-open",
        Split((_QWEN2,)),
    ),
    _alike("qwen35", Split((_QWEN35,))),
    _alike("gpt-4o llama4 kanana2 talkie minimax-m2", Split((_GPT4O,))),
    _alike("tekken", Split((_TEKKEN,), ignores_merges=True, adds_bos=True)),
    _alike(
        "deepseek-llm",
        Split(
            (
                r"[\r\n]",
                rf"\s?[{_CASED}]+",
                "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
                r"\s+$",
                _CJK,
                r"\p{N}+",
            )
        ),
    ),
    _alike(
        "deepseek-coder",
        Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    ),
    _alike(
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        Split((r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK3)),
    ),
    _alike("kimi-k2", Split((_KIMI,))),
    _alike(
        "falcon",
        Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    ),
    _alike(
        "default",
        Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    ),
    _alike("bloom poro-chat gpt3-finnish", Split((r" ?[^(\s|.,!?…。，、।۔،)]+",))),
    _alike("viking", Split((r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"))),
    _alike(
        "seed-coder",
        Split(
            (
                rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
                rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",
            )
        ),
    ),
    _alike("minicpm5", Split((r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), ignores_merges=True)),
)

SPLITS: Mapping[str, Split] = {name: each for group in _GROUPS for name, each in group.items()}
"""By name."""
