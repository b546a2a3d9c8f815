"""openai-agents, streamed.

python run_openai_agents.py responses|chat URL MODEL TASK
"""

import asyncio
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from file_tools import edit_file, read_file
from openai import AsyncOpenAI

_KINDS = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}


async def main(kind: str, url: str, model: str, task: str) -> None:
    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        agent = Agent(
            name="fixer",
            instructions="You fix programs.",
            model=_KINDS[kind](model, openai_client=client),
            tools=[function_tool(read_file), function_tool(edit_file)],
        )
        run = Runner.run_streamed(agent, task)
        async for _ in run.stream_events():
            pass
        print(run.final_output)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
