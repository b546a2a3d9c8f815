"""openai-agents: an agent with two tools, through `/v1/responses` and through chat.

    python use_openai_agents.py http://127.0.0.1:8000 MODEL

Whatever the model writes, its calls satisfy their schemas, and its typed answers their type.
"""

import asyncio
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.models.interface import Model
from openai import AsyncOpenAI
from pydantic import BaseModel

# A run fails when the context cuts an answer off. The stop texts are in none of the calls.
_SHORT_ANSWERS = {"seed": 1, "min_tokens": 4, "stop": [".", "d", "v"]}

_called: list[tuple[str, object]] = []


def weather(city: Literal["Paris", "Rome"]) -> str:
    """Weather."""
    _called.append(("weather", city))
    return f"sunny in {city}"


def clock(utc: bool) -> str:
    """Time."""
    _called.append(("clock", utc))
    return "noon"


class Answer(BaseModel):
    """A typed answer."""

    city: Literal["Paris", "Rome"]
    warm: bool


async def call_each_tool(model: Model) -> None:
    """The agent calls the tool that it has to, is given the result, and answers in words."""
    for name in ("weather", "clock"):
        _called.clear()
        settings = ModelSettings(
            tool_choice=name, parallel_tool_calls=False, extra_body=_SHORT_ANSWERS
        )
        agent = Agent(
            name="a",
            instructions="Help.",
            model=model,
            tools=[function_tool(weather), function_tool(clock)],
            model_settings=settings,
        )
        result = await Runner.run(agent, "Go.", max_turns=5)
        assert [call for call, _ in _called][:1] == [name], _called
        kinds = [item.type for item in result.new_items]
        assert kinds[:2] == ["tool_call_item", "tool_call_output_item"], kinds
        assert isinstance(result.final_output, str)

        _called.clear()
        streamed = Runner.run_streamed(agent, "Go.", max_turns=5)
        deltas = [
            event.data.delta
            async for event in streamed.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        assert [call for call, _ in _called][:1] == [name], _called
        assert streamed.final_output
        assert "".join(deltas).endswith(streamed.final_output)


async def answer_with_a_type(model: Model) -> None:
    """The agent answers with an object of its output type: at once, or after a call or two.

    The second turn chooses freely. A model that calls in all of them would fill its context, so the
    third is offered no tool.
    """
    agent = Agent(name="a", model=model, output_type=Answer)
    result = await Runner.run(agent, "Go.")
    assert isinstance(result.final_output, Answer), result.final_output

    _called.clear()
    settings = ModelSettings(tool_choice="weather", parallel_tool_calls=False, temperature=0)
    tool = function_tool(weather, is_enabled=lambda _context, _agent: len(_called) < 2)
    calling = agent.clone(tools=[tool], model_settings=settings)
    result = await Runner.run(calling, "Go.", max_turns=3)
    assert _called
    assert isinstance(result.final_output, Answer), result.final_output


async def main(url: str, model_name: str) -> None:
    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
            model = kind(model_name, openai_client=client)
            await call_each_tool(model)
            await answer_with_a_type(model)
            print(f"{kind.__name__}: two tools and a typed answer")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
