"""The app for Ray Serve on a real Ray: two replicas of the bundled model, one of which is killed in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections import Counter
from types import SimpleNamespace

import httpx
import pytest

pytest.importorskip("ray.serve")

import ray
from ray import serve

from cpmrt.deploy.prefix_router import PrefixRouter
from cpmrt.deploy.ray_serve import Settings, build
from cpmrt.deploy.relay import RoutedRequest

NUM_REQUESTS = 500
CLIENTS = 16
CHAT = "/v1/chat/completions"
NAMES = ("a list", "sys", "None", "os.path", "a set", "re", "a tuple", "int", "str", "dict")


def ask(number: int, **extra) -> dict:
    name, temperature = NAMES[number % len(NAMES)], (0.0, 0.8)[number % 2]
    content = f"What is {name}?"
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": temperature,
            "seed": number % 20} | extra  # fmt: skip


@pytest.fixture(scope="module")
def url():
    """The address of an ingress in front of two replicas."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    ray.init(
        num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20, configure_logging=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.getcwd(), "OPENBLAS_NUM_THREADS": "1"}},
    )  # fmt: skip
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        settings = Settings(
            served_model_name="demo", num_gpus=0, min_replicas=2, max_replicas=2, max_sequences=4,
            llm={"executor": "reference", "max_context": 512},
        )  # fmt: skip
        serve.run(build(settings), name="cpmrt", route_prefix="/")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def replicas() -> list:
    named = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in named]
    ours = sorted(name for name in names if name.startswith("SERVE_REPLICA") and "#Replica#" in name)
    return [ray.get_actor(name, namespace="serve") for name in ours]


def answer_of(response) -> str:
    """Return the text of an answer, whole or streamed, or "" if the server reported a failure."""
    if response.headers["content-type"].startswith("text/event-stream"):
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        if any("error" in event for event in events):
            return ""
        assert response.text.endswith("data: [DONE]\n\n"), "a stream that ends ends with an error or with this"
        return "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    if response.status_code != 200:
        assert response.json()["error"]["message"]
        return ""
    return response.json()["choices"][0]["message"]["content"]


@pytest.mark.all
@pytest.mark.alone
def test_500_requests_while_a_replica_dies_are_answered_alike_or_with_an_error(url):
    async def run():
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
            alone = {}
            for number in range(20):
                alone[number] = answer_of(await client.post(CHAT, json=ask(number)))
                assert alone[number]
            outcomes, waiting = Counter(), iter(range(NUM_REQUESTS))

            async def work():
                for number in waiting:
                    if number == NUM_REQUESTS // 2:
                        ray.kill(replicas()[0], no_restart=True)
                    answer = answer_of(await client.post(CHAT, json=ask(number, stream=number % 3 == 0)))
                    assert answer in ("", alone[number % 20]), number
                    outcomes["right" if answer else "error"] += 1

            await asyncio.gather(*(work() for _ in range(CLIENTS)))
            return outcomes

    outcomes = asyncio.run(run())
    assert sum(outcomes.values()) == NUM_REQUESTS
    assert outcomes["error"] <= 8, "only streams that the dead replica had begun: it has four slots"
    deadline = time.monotonic() + 120
    while len(replicas()) < 2:
        assert time.monotonic() < deadline, "Ray Serve starts another replica"
        time.sleep(0.5)


@pytest.mark.all
@pytest.mark.alone
def test_other_endpoints_errors_and_streams_go_through(url):
    assert httpx.get(url + "/v1/models", timeout=60).json()["data"][0]["id"] == "demo"
    refused = httpx.post(url + CHAT, json=ask(0, temperature=-1), timeout=60)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "temperature"
    assert httpx.post(url + CHAT, content=b"x" * (17 * 2**20), timeout=60).status_code == 413
    asked = ask(1, stream=True, max_tokens=40, ignore_eos=True)
    with httpx.stream("POST", url + CHAT, json=asked, timeout=60) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        times = [time.monotonic() for _ in stream.iter_raw()]
    assert len(times) > 3 and times[-1] - times[0] > 0.01, "it comes while it is written"


@pytest.mark.all
@pytest.mark.alone
def test_prompts_that_begin_alike_go_to_one_replica(url):
    """Each of four long beginnings of prompts is computed once; later prompts find it in their replica's cache."""
    found = []
    for turn in range(3):
        for number in range(4):
            content = f"{number}: " + "import os, sys, re\n" * 40 + f"What is {turn}?"
            answer = httpx.post(url + CHAT, timeout=60, json=ask(0, messages=[{"role": "user", "content": content}]))
            found.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert all(cached >= 64 for cached in found[4:]), found


def router(loads):
    """Return a router that has seen no requests, and replicas with these loads."""
    made = PrefixRouter.__new__(PrefixRouter)
    made.initialize_state(imbalance=2)
    made._replica_queue_len_cache = SimpleNamespace(get=loads.get)
    return made, [SimpleNamespace(replica_id=replica_id) for replica_id in loads]


def chosen(made, candidates, prompt):
    request = RoutedRequest("POST", "/", b"", [], b'"prompt": ' + prompt, None)
    pending = SimpleNamespace(args=[request])
    groups = asyncio.run(made.choose_replicas(candidates, pending))
    return [[replica.replica_id for replica in group] for group in groups], pending


def test_the_router_prefers_who_has_the_beginning_unless_it_is_busier():
    loads = {"a": 0, "b": 0}
    made, candidates = router(loads)
    groups, pending = chosen(made, candidates, b"x" * 2000)
    assert groups == [["a", "b"]], "nobody knows it: the least busy of all"
    made.on_request_routed(pending, "b", None)
    assert chosen(made, candidates, b"x" * 1500 + b"y" * 900)[0] == [["b"], ["a"]]
    assert chosen(made, candidates, b"z" * 2000)[0] == [["a", "b"]]
    assert chosen(made, candidates, b"x" * 100)[0] == [["a", "b"]], "too short to matter"
    loads["b"] = 2
    assert chosen(made, candidates, b"x" * 2000)[0] == [["a"], ["b"]]
    assert chosen(made, candidates[:1], b"x" * 2000)[0] == [["a"]], "a replica that is gone"


def test_the_longest_known_beginning_counts_and_old_ones_are_forgotten(monkeypatch):
    made, candidates = router({"a": 0, "b": 0})
    made.on_request_routed(chosen(made, candidates, b"x" * 600)[1], "a", None)
    made.on_request_routed(chosen(made, candidates, b"x" * 600 + b"y" * 1000)[1], "b", None)
    assert chosen(made, candidates, b"x" * 600 + b"y" * 1500)[0][0] == ["b"]
    monkeypatch.setattr("cpmrt.deploy.prefix_router.MAX_PREFIXES", 3)
    made.on_request_routed(chosen(made, candidates, b"w" * 1100)[1], "a", None)
    assert len(made._owners) == 3 and chosen(made, candidates, b"x" * 2000)[0] == [["a", "b"]]
