"""The fill-in-the-middle tokens of a tokenizer, found by their names as llama.cpp does."""

from collections.abc import Callable, Iterable

from maskdial.bundle.manifest import InfillTokens

# prefix, suffix, middle
_NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, Granite 4
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<PRE>", "<SUF>", "<MID>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM 4.5
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon-H1-Tiny-Coder
)
# Mistral's, which read the suffix first and need no third token (mistral-common, `encode_fim`).
_SUFFIX_FIRST = ("[PREFIX]", "[SUFFIX]")
_REPOSITORY = ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")
_FILE = ("<|file_sep|>",)
_ENDS = (
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "<EOT>", "▁<EOT>", "<|endoftext|>"),
    *("<file_sep>", *_FILE, *_REPOSITORY),
)


def find_infill_tokens(token_to_id: Callable[[str], int | None]) -> InfillTokens | None:
    """The tokens around the parts of an infilling prompt; None if the tokenizer has none.

    Args:
        token_to_id: of the tokenizer.
    """

    def known(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in names if token_to_id(name) is not None)

    def first(names: Iterable[str]) -> str | None:
        return next(iter(known(names)), None)

    ends = known(_ENDS)
    for names in _NAMES:
        if known(names) == names:
            prefix, suffix, middle = names
            return InfillTokens(
                prefix=prefix,
                suffix=suffix,
                middle=middle,
                repository=first(_REPOSITORY),
                file=first(_FILE),
                ends=ends,
            )
    if known(_SUFFIX_FIRST) == _SUFFIX_FIRST:
        prefix, suffix = _SUFFIX_FIRST
        return InfillTokens(prefix=prefix, suffix=suffix, suffix_first=True, ends=ends)
    return None
