"""`/tokenize`, `/detokenize` and `/tokenizer_info` as vLLM has them."""

from typing import Annotated, Any, Self

from fastapi import Request, Response
from pydantic import Field, model_validator

from maskdial.ask.catalogue import TOKENIZE, WRITE
from maskdial.bounds import LARGEST_INT, Size
from maskdial.bundle.manifest import CHAT_TEMPLATE
from maskdial.bundle.texts import check_ids, tokenizing_seconds
from maskdial.causal.chat.request import ChatRequest
from maskdial.causal.model import WritingModel
from maskdial.dialects.body import MAX_MESSAGES, FieldError, TokenId, example
from maskdial.dialects.call import Call, endpoint, tell
from maskdial.dialects.openai.base import OpenAIBody
from maskdial.dialects.openai.messages import Message, check_opening
from maskdial.dialects.openai.replies import (
    ContentTokens,
    PromptReply,
    TokenizerInfo,
    TokensReply,
)
from maskdial.dialects.openai.tools import Tools
from maskdial.dialects.shared_routes import Sharer
from maskdial.engine.limits import check_num_characters
from maskdial.engine.offload import offload
from maskdial.errors import ValidationError, about
from maskdial.http.context import server_context
from maskdial.http.replies import json_reply
from maskdial.http.route import Route
from maskdial.masked.model import MaskedModel
from maskdial.registry.served import ServedModel

_SECONDS_PER_TOKEN = 1e-6


_NULL: dict[str, Any] = {"type": "null"}


class PromptBody(OpenAIBody):
    """A prompt or a conversation to tokenize."""

    spellings = {"texts": "prompt"}  # noqa: RUF012

    model_config = example(
        {"model": "hybrid", "prompt": "The old king"},
        oneOf=[
            {"required": [one], "properties": {one: {"not": _NULL}, other: _NULL}}
            for one, other in (("prompt", "messages"), ("messages", "prompt"))
        ],
    )

    prompt: str | None = None
    messages: Annotated[list[Message], Size(1, MAX_MESSAGES, "messages")] | None = None
    add_special_tokens: bool | None = Field(
        None,
        description="Add the special tokens of the model's inputs. Default: true for a prompt; a "
        "chat template writes them itself.",
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="Open the assistant's next turn after the messages. Default: true, unless "
        "continue_final_message is.",
    )
    continue_final_message: bool | None = Field(
        None, description="End with the content of the final message. Default: false."
    )
    tools: Tools | None = Field(None, description="Functions that the prompt describes.")
    chat_template_kwargs: Annotated[dict[str, Any], Size(0, 64, "variables")] | None = Field(
        None, description="Further variables of the chat template."
    )
    return_token_strs: bool | None = Field(
        None, description="Return the tokens as the vocabulary spells them. Default: false."
    )

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if self.prompt is not None and self.messages is not None:
            raise FieldError("messages", "give either prompt or messages, not both")
        if self.prompt is None and self.messages is None:
            raise FieldError("prompt", "this field is required")
        check_opening(self.add_generation_prompt, self.continue_final_message)
        return self


class ContentBody(OpenAIBody):
    """A text to tokenize, as llama.cpp has it."""

    spellings = {"texts": "content"}  # noqa: RUF012
    habits = OpenAIBody.habits | {"parse_special"}

    model_config = example({"model": "hybrid", "content": "The old king"})

    content: str
    add_special: bool | None = Field(
        None, description="Add the special tokens of the model's inputs. Default: false."
    )
    with_pieces: bool | None = Field(
        None, description="Return each token's text as well. Default: false."
    )


class TokensBody(OpenAIBody):
    """Token ids to turn into text."""

    model_config = example({"model": "hybrid", "tokens": [347, 607, 1588]})

    tokens: Annotated[list[TokenId], Size(0, LARGEST_INT, "token ids")]


async def tokenize(call: Call[PromptBody]) -> Response:
    """The token ids of a prompt or of a conversation."""
    body = call.body
    model = await call.model(TOKENIZE)
    text = body.prompt
    if text is None:
        text = await render(body, model)
    if body.prompt is not None:
        check_num_characters([text])
    add = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
    encoding = await offload(
        lambda: model.tokenizer.encode(text, add_special_tokens=add), tokenizing_seconds([text])
    )
    return await offload(
        lambda: json_reply(
            {
                "count": len(encoding),
                "max_model_len": model.max_length,
                "tokens": encoding.ids,
                "token_strs": encoding.tokens if body.return_token_strs else None,
            }
        ),
        len(encoding) * _SECONDS_PER_TOKEN,
    )


async def tokenize_content(call: Call[ContentBody]) -> Response:
    """The token ids of a text, as llama.cpp gives them."""
    body = call.body
    model = await call.model(TOKENIZE)
    check_num_characters([body.content])
    encoding = await offload(
        lambda: model.tokenizer.encode(body.content, add_special_tokens=bool(body.add_special)),
        tokenizing_seconds([body.content]),
    )
    tokens: list[Any] = encoding.ids
    if body.with_pieces:
        pieces = (model.tokenizer.token_text(each) for each in encoding.ids)
        tokens = [
            {"id": each, "piece": piece} for each, piece in zip(encoding.ids, pieces, strict=True)
        ]
    return await offload(lambda: json_reply({"tokens": tokens}), len(encoding) * _SECONDS_PER_TOKEN)


async def detokenize(call: Call[TokensBody]) -> Response:
    """The text of token ids, special tokens spelled out."""
    body = call.body
    model = await call.model(TOKENIZE)
    with about("tokens"):
        check_ids(body.tokens, model)
    return await offload(
        lambda: json_reply(
            dict.fromkeys(  # vLLM's name, and llama.cpp's
                ("prompt", "content"),
                model.tokenizer.decode(body.tokens, skip_special_tokens=False),
            )
        ),
        len(body.tokens) * _SECONDS_PER_TOKEN,
    )


async def tokenizer_info(request: Request) -> Response:
    """What a client needs to use the tokenizer from afar.

    `?model=` names the model. Default: the only one that generates, or the only one.
    """
    writes = server_context(request).models.does(WRITE)
    task = WRITE if writes and not request.query_params.get("model") else TOKENIZE
    return await tell(request, task, _describe)


def _describe(model: ServedModel) -> TokenizerInfo:
    special = model.manifest.special_tokens

    def spelled(token_id: int | None) -> str | None:
        return None if token_id is None else model.tokenizer.id_to_token(token_id)

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": spelled(special.bos),
        "eos_token": spelled(next(iter(special.eos), None)),
        "pad_token": spelled(special.pad),
        "mask_token": spelled(special.mask),
        "model_max_length": model.max_length,
        "chat_template": _chat_template(model),
    }


def _chat_template(model: ServedModel) -> str | None:
    if CHAT_TEMPLATE not in model.manifest.files:
        return None
    return (model.bundle.path / CHAT_TEMPLATE).read_text(encoding="utf-8")


async def render(body: PromptBody, model: MaskedModel | WritingModel) -> str:
    """A body's conversation as the model's chat template writes it.

    Raises:
        ValidationError: the model has no template, or it fails.
    """
    if isinstance(model, MaskedModel):
        raise ValidationError(f"model {model.name!r} has no chat template", field="messages")
    chat = ChatRequest(
        [each.to_message() for each in body.messages or ()],
        tools=[tool.to_tool() for tool in body.tools or ()],
        template_variables=body.chat_template_kwargs or {},
        **body.given("add_generation_prompt", "continue_final_message"),
    )
    with about("messages"):
        conversation = chat.generation_for(model).conversation
        assert conversation is not None
        return await conversation.render(model)


TOKENIZE_SHARER = Sharer(
    endpoint(tokenize, PromptBody), PromptBody, TokensReply, ("prompt", "messages")
)
CONTENT_SHARER = Sharer(
    endpoint(tokenize_content, ContentBody), ContentBody, ContentTokens, ("content",)
)
DETOKENIZE_SHARER = Sharer(endpoint(detokenize, TokensBody), TokensBody, PromptReply, ("tokens",))
ROUTES = (
    Route(
        "/tokenizer_info",
        tokenizer_info,
        methods=["GET"],
        reply=TokenizerInfo,
        statuses=(404, 422, 503, 504),
        queries=("model",),
        tags=["tokens"],
    ),
)
