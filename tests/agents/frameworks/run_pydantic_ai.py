"""pydantic-ai, streamed.

python run_pydantic_ai.py chat|responses|anthropic|ollama URL MODEL TASK
"""

import asyncio
import sys

from file_tools import edit_file, read_file
from pydantic_ai import Agent
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.ollama import OllamaProvider
from pydantic_ai.providers.openai import OpenAIProvider


def _model(kind: str, url: str, name: str) -> Model:
    if kind == "anthropic":
        return AnthropicModel(name, provider=AnthropicProvider(base_url=url, api_key="none"))
    if kind == "ollama":
        return OpenAIChatModel(name, provider=OllamaProvider(base_url=f"{url}/v1"))
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    if kind == "responses":
        return OpenAIResponsesModel(name, provider=provider)
    return OpenAIChatModel(name, provider=provider)


async def main(kind: str, url: str, name: str, task: str) -> None:
    agent = Agent(
        _model(kind, url, name), instructions="You fix programs.", tools=[read_file, edit_file]
    )
    async with agent.run_stream(task) as result:
        print(await result.get_output())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
