"""An OpenAI-shaped server as a process of its own, to be killed, stopped and told to misbehave: ``PORT``.

It reads one word a line from its standard input, how it is to answer from then on: ``ok``, ``503``, ``reset`` (in the
middle of an answer), ``mute`` (takes requests and says nothing). It is no model.
"""

import asyncio
import json
import os
import socket
import struct
import sys

PIECES = 5
PAUSE_S = 0.004
NOW = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
mode = "ok"


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(number):
    delta = {"choices": [{"index": 0, "delta": {"content": f"word {number}"}}]}
    return b"data: " + json.dumps(delta).encode() + b"\n\n"


def reset(writer):
    """RST, not FIN."""
    line = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, line)
    writer.transport.abort()


async def answer(writer, body):
    if mode == "503":
        writer.write(NOW)
    elif b'"stream": true' in body:
        writer.write(STREAM)
        for number in range(PIECES):
            if mode == "reset" and number == PIECES // 2:
                reset(writer)
            if writer.transport.is_closing():
                return False
            writer.write(chunk(event(number)))
            await asyncio.sleep(PAUSE_S)
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    else:
        text = b'{"choices": [{"message": {"content": "whole"}}], "usage": {"completion_tokens": 1}}'
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(text)
        if mode == "reset":
            writer.write(head + text[:20])
            await asyncio.sleep(PAUSE_S)
            reset(writer)
            return False
        writer.write(head + text)
    return True


async def serve(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            body = await reader.readexactly(length)
            while mode == "mute":  # noqa: ASYNC110 - a word on the standard input ends it
                await asyncio.sleep(0.05)
            if not await answer(writer, body):
                return
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


def hear():
    global mode  # noqa: PLW0603 - a process has one
    words = os.read(0, 4096).decode().split()
    if not words:
        os._exit(0)  # who started it is gone
    mode = words[-1]


async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]), backlog=1024)
    asyncio.get_running_loop().add_reader(0, hear)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
