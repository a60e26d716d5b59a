"""The queue of work that only reads prompts: whose client leaves, gives its place back at once."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cpmrt.server.errors import ApiError
from cpmrt.server.json_body import ClientGoneError
from cpmrt.server.prompt_work import _THREADS, PromptWorkers


class Work:
    """Runs until `go` is set, however often it is cancelled."""

    def __init__(self, go, error=None):
        self.go, self.error, self.has_run = go, error, False

    def run(self):
        self.has_run = True
        assert self.go.wait(10)
        if self.error is not None:
            raise self.error

    def cancel(self):
        pass


class Client:
    """A client's connection, until it leaves."""

    def __init__(self):
        self.left = asyncio.Event()

    async def receive(self):
        await self.left.wait()
        return {"type": "http.disconnect"}


class Requests:
    """Requests to workers of which `max_open` may be open, as tasks with their clients and their work."""

    def __init__(self, max_open):
        self.over = asyncio.get_running_loop().create_future()
        self.workers, self.go = PromptWorkers(max_open, self.over), threading.Event()

    async def ask(self, **fields):
        client, work = Client(), Work(self.go, **fields)
        task = asyncio.create_task(self.workers.run(work, client.receive))
        await asyncio.sleep(0.01)
        return task, client, work

    async def occupy(self):
        """Give each thread work that does not end before `go`."""
        return [await self.ask() for _ in range(_THREADS)]


def test_work_that_waits_gives_its_place_back_when_its_client_leaves():
    async def main():
        requests = Requests(_THREADS + 2)
        running = await requests.occupy()
        waiting = [await requests.ask() for _ in range(2)]
        refused, _, _ = await requests.ask()
        with pytest.raises(ApiError, match=rf"\({_THREADS + 2} requests to read prompts run or wait\)") as caught:
            await refused
        assert caught.value.status == 429
        for task, client, _ in waiting:
            client.left.set()
            with pytest.raises(ClientGoneError):
                await task
        others = [await requests.ask() for _ in range(2)]
        requests.go.set()
        for task, _, work in running + others:
            await task
            assert work.has_run
        assert not any(work.has_run for _, _, work in waiting)

    asyncio.run(main())


def test_forgotten_work_is_kept_by_nobody_while_the_threads_are_busy():
    async def main():
        requests = Requests(_THREADS + 1)
        running = await requests.occupy()
        task, client, _ = await requests.ask()
        client.left.set()
        with pytest.raises(ClientGoneError):
            await task
        assert not requests.workers._waiting and requests.workers._threads._work_queue.empty()
        requests.go.set()
        await asyncio.gather(*(task for task, _, _ in running))

    asyncio.run(main())


def test_work_that_runs_keeps_its_place_until_its_thread_is_free():
    async def main():
        requests = Requests(_THREADS)
        running = await requests.occupy()
        for task, client, _ in running:
            client.left.set()
            with pytest.raises(ClientGoneError):
                await task
        refused, _, _ = await requests.ask()
        with pytest.raises(ApiError, match="the queue is full"):
            await refused
        requests.go.set()
        await asyncio.sleep(0.1)
        task, _, work = await requests.ask()
        await task
        assert work.has_run

    asyncio.run(main())


def test_errors_reach_the_request_and_the_next_one_has_its_turn():
    async def main():
        requests = Requests(2 * _THREADS)
        asked = [await requests.ask(error=ValueError("no")) for _ in range(_THREADS)]
        following = [await requests.ask() for _ in range(_THREADS)]
        requests.go.set()
        for task, _, _ in asked:
            with pytest.raises(ValueError, match="no"):
                await task
        for task, _, _ in following:
            await task

    asyncio.run(main())


def test_the_end_of_the_server_ends_work_that_runs_and_work_that_waits():
    async def main():
        requests = Requests(2 * _THREADS)
        asked = [await requests.ask() for _ in range(_THREADS + 2)]
        requests.over.set_result(None)
        for task, _, _ in asked:
            with pytest.raises(ApiError, match="shutting down"):
                await task
        requests.go.set()
        await asyncio.sleep(0.1)
        assert [work.has_run for _, _, work in asked] == [True] * _THREADS + [False] * 2
        requests.workers.close()

    asyncio.run(main())
