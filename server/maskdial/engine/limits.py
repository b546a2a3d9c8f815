"""How many texts and characters one request may carry."""

from collections.abc import Sequence

from maskdial.config import Config
from maskdial.errors import ValidationError

MAX_TOKENIZE_CHARACTERS = 500_000
"""What one request may have tokenized for its own sake; a token takes 70 bytes of the reply."""


def check_num_texts(num_texts: int, config: Config) -> None:
    """Refuses a request with more texts than one request may carry.

    Raises:
        ValidationError: it does; the message has both numbers.
    """
    if num_texts > config.max_batch_inputs:
        raise ValidationError(
            f"{num_texts} texts; one request may carry at most {config.max_batch_inputs} "
            "(--max-batch-inputs)",
            field="texts",
        )


def check_num_characters(texts: Sequence[str]) -> None:
    """Refuses a request to tokenize more than a reply with every token can hold.

    Raises:
        ValidationError: it does; the message has both numbers.
    """
    num_characters = sum(map(len, texts))
    if num_characters > MAX_TOKENIZE_CHARACTERS:
        raise ValidationError(
            f"{num_characters:,} characters; one request may have at most "
            f"{MAX_TOKENIZE_CHARACTERS:,} of them tokenized; send several",
            field="texts",
        )
