"""The log's own thread: nothing waits for the log's reader, and dropped lines are counted."""

from __future__ import annotations

import asyncio
import logging
import os
import time

import pytest

from cpmrt.server.log import LogWriter, LoopErrors


@pytest.fixture
def pipe():
    """Both ends of a pipe, as files that may be closed more than once."""
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as read_end, open(writer, "wb", buffering=0) as write_end:
        yield read_end, write_end


def logger_of(handler):
    logger = logging.Logger("test")
    logger.addHandler(handler)
    return logger


def test_lines_come_in_their_order_and_the_last_ones_at_the_end(pipe):
    reader, writer = pipe
    handler = LogWriter(writer.fileno())
    logger = logger_of(handler)
    for number in range(100):
        logger.info("line %d of %s", number, "é")
    handler.close()
    writer.close()
    assert reader.read().decode().splitlines() == [f"line {number} of é" for number in range(100)]


def test_a_reader_that_stalls_costs_lines_and_no_time(pipe):
    reader, writer = pipe
    handler = LogWriter(writer.fileno(), max_lines=100)
    logger = logger_of(handler)
    begun = time.monotonic()
    for number in range(5000):
        logger.info("%0200d", number)
    assert time.monotonic() - begun < 5
    handler.close()
    assert time.monotonic() - begun < 10, "closing does not wait for ever"
    os.set_blocking(reader.fileno(), False)
    seen = []
    while handler._thread.is_alive():
        seen.append(reader.read(65536) or b"")
        if not seen[-1]:
            if handler._records.empty():
                handler._records.put(None)
            time.sleep(0.01)
    while rest := reader.read(65536):  # written between the last look and the thread's end
        seen.append(rest)
    lines = b"".join(seen).decode().splitlines()
    dropped = sum(int(line.split()[0]) for line in lines if "dropped" in line)
    assert dropped > 1000
    numbers = [int(line) for line in lines if len(line) == 200]
    assert numbers == sorted(numbers) and len(numbers) + dropped == 5000


def test_a_closed_pipe_is_no_error(pipe):
    reader, writer = pipe
    reader.close()
    handler = LogWriter(writer.fileno())
    logger_of(handler).info("to nobody")
    handler.close()


def test_an_error_that_comes_again_and_again_is_logged_once_a_minute(caplog):
    now = [0.0]
    errors = LoopErrors(lambda: now[0])
    loop = asyncio.new_event_loop()
    try:
        for second in range(120):
            now[0] = float(second)
            for _ in range(1000):
                error = OSError(24, "Too many open files")
                errors.handle(loop, {"message": "socket.accept() out of system resource", "exception": error})
        errors.handle(loop, {"message": "another"})
    finally:
        loop.close()
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 3 and "Too many open files" in texts[0] and texts[2].startswith("another")
    assert caplog.records[0].exc_info is None
