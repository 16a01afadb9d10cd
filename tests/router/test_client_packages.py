"""Packages that people build agents with, the packages themselves, hold conversations with tools.

Those that are not installed are skipped: `pip install -c constraints.txt -e .[clients]`. The engine is scripted:
it calls a tool when it is asked something, and answers with a text when it has the result.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from pydantic import BaseModel
from router.fake_controller import FakeController, prompt_of
from router.harness import EOS, RunningRouter, running, wait_until

from trunkline.controller.messages import Submit
from trunkline.router.text.conversation_memory import common_length
from trunkline.router.text.tokenizer import Tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Some packages leave their connections open."""
CONTEXT: Final = 32_768
TURNS: Final = 10
SAID: Final = "It is 17 degrees in Bonn."
RULES: Final = "You tell people the weather. " * 40
CALL: Final = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


class Script:
    """An engine that calls a tool when it is asked something, and keeps what was computed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: list[int] = []
        self.calls = 0
        self.shares: list[float] = []
        """For each prompt but the first, the part of the ideal with which it begins: of the prompt before it, with
        its answer."""

    def __call__(self, submit: Submit) -> list[int]:
        prompt = prompt_of(submit)
        end = self._tokenizer.decode(prompt, skip_special_tokens=False).rpartition("<|user|>")[2]
        asked = "17 degrees" not in end and "tool_response" not in end
        self.calls += asked
        if self._known:
            self.shares.append(common_length(self._known, prompt) / len(self._known))
        answer = [*self._tokenizer.encode(CALL if asked else SAID, add_special_tokens=False), EOS]
        self._known = [*prompt, *answer]
        return answer


@pytest.fixture(scope="module")
def served(module_place: Path, tokenizer: Tokenizer) -> Iterator[tuple[RunningRouter, FakeController]]:
    """A router of a model whose context holds ten turns."""
    with running(module_place, tokenizer, max_context=CONTEXT, wait=False) as (router, [fake]):
        fake.behaviour.max_context = CONTEXT
        fake.start()
        wait_until(lambda: router.ready == 1)
        yield router, fake
        fake.stop()


@pytest.fixture
def script(served: tuple[RunningRouter, FakeController], tokenizer: Tokenizer) -> Script:
    made = Script(tokenizer)
    served[1].behaviour.script = made
    return made


@pytest.fixture
def url(served: tuple[RunningRouter, FakeController]) -> str:
    return served[0].url


def get_weather(city: str) -> str:
    """Tell the weather in a city."""
    return f"{city}: 17 degrees"


def weather_tool() -> dict[str, Any]:
    """The tool in OpenAI's form."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"type": "function", "function": {"name": "get_weather", "description": "", "parameters": parameters}}


def check(script: Script, answers: list[str], least: float = 0.99) -> None:
    """Check what ten turns brought: each a call and an answer. `least`: part of the ideal in each prompt."""
    assert answers == [SAID] * TURNS
    assert script.calls == TURNS
    assert len(script.shares) == 2 * TURNS - 1
    assert min(script.shares) >= least, script.shares


def questions() -> Iterator[str]:
    """What is asked in each turn."""
    return (f"Turn {turn}: what is the weather in Bonn?" for turn in range(TURNS))


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_openai_agents(script: Script, url: str, api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A benchmark of this project has the package's name.
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.endswith("benchmarks")])
    monkeypatch.delitem(sys.modules, "agents", raising=False)
    agents: Any = pytest.importorskip("agents", reason="openai-agents is not installed")
    agents.set_tracing_disabled(True)

    async def talk() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            kind = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
            agent = agents.Agent(
                name="Weather",
                instructions=RULES,
                tools=[agents.function_tool(get_weather)],
                model=kind(model="demo", openai_client=client),
            )
            answers: list[str] = []
            items: list[Any] = []
            for question in questions():
                result = await agents.Runner.run(agent, [*items, {"role": "user", "content": question}])
                answers.append(result.final_output)
                items = result.to_input_list()
            return answers

    check(script, asyncio.run(talk()))


@pytest.mark.parametrize("streaming", [False, True])
def test_langgraph(script: Script, url: str, streaming: bool) -> None:
    langchain: Any = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    graph: Any = pytest.importorskip("langgraph.graph", reason="langgraph is not installed")
    prebuilt: Any = pytest.importorskip("langgraph.prebuilt", reason="langgraph is not installed")
    memory: Any = pytest.importorskip("langgraph.checkpoint.memory", reason="langgraph is not installed")
    tools: Any = pytest.importorskip("langchain_core.tools", reason="langchain-core is not installed")
    messages: Any = pytest.importorskip("langchain_core.messages", reason="langchain-core is not installed")
    model = langchain.ChatOpenAI(
        model="demo", base_url=f"{url}/v1", api_key="none", max_retries=0, streaming=streaming
    ).bind_tools([tools.tool(get_weather)])

    def answer(state: Any) -> dict[str, list[Any]]:
        return {"messages": [model.invoke([messages.SystemMessage(RULES), *state["messages"]])]}

    built = graph.StateGraph(graph.MessagesState)
    built.add_node("model", answer)
    built.add_node("tools", prebuilt.ToolNode([tools.tool(get_weather)]))
    built.add_edge(graph.START, "model")
    built.add_conditional_edges("model", prebuilt.tools_condition)
    built.add_edge("tools", "model")
    app = built.compile(checkpointer=memory.InMemorySaver())
    thread = {"configurable": {"thread_id": "one"}}
    answers = []
    for question in questions():
        state = app.invoke({"messages": [messages.HumanMessage(question)]}, thread)
        answers.append(state["messages"][-1].content)
    check(script, answers)


@pytest.mark.parametrize("model", ["openai/demo", "anthropic/demo", "ollama_chat/demo"])
def test_litellm(script: Script, url: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm: Any = pytest.importorskip("litellm", reason="litellm is not installed")
    base = f"{url}/v1" if model.startswith("openai") else url
    kept: list[Any] = [{"role": "system", "content": RULES}]
    answers = []

    def ask() -> Any:
        made = litellm.completion(
            model=model, messages=kept, tools=[weather_tool()], api_base=base, api_key="none", max_tokens=200
        )
        kept.append(made.choices[0].message.model_dump())
        return made.choices[0].message

    for question in questions():
        kept.append({"role": "user", "content": question})
        for call in ask().tool_calls:
            result = get_weather(**json.loads(call.function.arguments))
            kept.append({"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": result})
        answers.append(ask().content)
    check(script, answers, 0.9 if model == "ollama_chat/demo" else 0.99)  # it leaves out calls that were made


@pytest.mark.parametrize("streaming", [False, True])
def test_ollama(script: Script, url: str, streaming: bool) -> None:
    ollama: Any = pytest.importorskip("ollama", reason="ollama is not installed")
    with ollama.Client(host=url) as client:
        check(script, _ask_ollama(ollama, client, streaming))
        assert "demo:latest" in [model.model for model in client.list().models]
        assert client.show("demo").modelinfo


def _ask_ollama(ollama: Any, client: Any, streaming: bool) -> list[str]:
    """Ask all questions, with the tool; return the answers."""
    kept: list[Any] = [{"role": "system", "content": RULES}]
    answers = []

    def ask() -> Any:
        made = client.chat(model="demo", messages=kept, tools=[get_weather], stream=streaming)
        if not streaming:
            kept.append(made.message)
            return made.message
        parts = list(made)
        text = "".join(part.message.content or "" for part in parts)
        calls = [call for part in parts for call in part.message.tool_calls or []]
        kept.append(ollama.Message(role="assistant", content=text, tool_calls=calls or None))
        return kept[-1]

    for question in questions():
        kept.append({"role": "user", "content": question})
        for call in ask().tool_calls:
            kept.append(
                {
                    "role": "tool",
                    "tool_name": call.function.name,
                    "content": get_weather(**call.function.arguments),
                }
            )
        answers.append(ask().content)
    return answers


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_pydantic_ai(script: Script, url: str, api: str) -> None:
    pydantic_ai: Any = pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed")
    models: Any = pytest.importorskip("pydantic_ai.models.openai", reason="pydantic-ai has no openai extra")
    providers: Any = pytest.importorskip("pydantic_ai.providers.openai", reason="pydantic-ai has no openai extra")

    async def talk() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            provider = providers.OpenAIProvider(openai_client=client)
            kind = models.OpenAIResponsesModel if api == "responses" else models.OpenAIChatModel
            agent = pydantic_ai.Agent(kind("demo", provider=provider), instructions=RULES, tools=[get_weather])
            answers, history = [], None
            for question in questions():
                result = await agent.run(question, message_history=history)
                answers.append(result.output)
                history = result.all_messages()
            return answers

    check(script, asyncio.run(talk()))


class City(BaseModel):
    """A city, for structured output."""

    name: str
    inhabitants: int


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "JSON"])
def test_instructor(served: tuple[RunningRouter, FakeController], tokenizer: Tokenizer, mode: str) -> None:
    instructor: Any = pytest.importorskip("instructor", reason="instructor is not installed")
    router, fake = served
    text = '{"name": "Bonn", "inhabitants": 340000}'
    if mode == "TOOLS":
        text = f'<tool_call>\n{{"name": "City", "arguments": {text}}}\n</tool_call>'
    grammars: list[Any] = []

    def answer(submit: Submit) -> list[int]:
        grammars.append(submit.grammar)
        return [*tokenizer.encode(text, add_special_tokens=False), EOS]

    fake.behaviour.script = answer
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode[mode])
        for _ in range(2):
            city = client.chat.completions.create(
                model="demo", response_model=City, messages=[{"role": "user", "content": "Describe Bonn."}]
            )
            assert (city.name, city.inhabitants) == ("Bonn", 340_000)
    assert None not in grammars
