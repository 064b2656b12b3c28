"""Agents of the mesh's benchmark in a process of their own, so that two cores share the work as two machines would.

    python -m tests.bench.mesh_half FOLDER PORT,PORT NAME...

Their identities lie in FOLDER. It is told on its standard input, a word and its arguments a line, and answers each with
a line of JSON: ``root HEX`` when all hold that map, ``seen KEY VERSION`` with the times at which each had that record,
on the clock that all processes of a machine share, ``octets`` with what they wrote, in frames.
"""

import asyncio
import json
import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.mesh import body_of, node_in, until


class Half:
    def __init__(self, folder, ports, names):
        self.arrivals, self.ports = {}, ports
        self.agents = [
            node_in(folder / name, "agent", lambda record, name=name: self.came(name, record)) for name in names
        ]

    def came(self, name, record):
        self.arrivals.setdefault((record.key, record.body.version), {})[name] = time.perf_counter()

    async def answer(self, word, *arguments):
        match word:
            case "root":
                await until(lambda: {agent.registry.root().hex() for agent in self.agents} == {arguments[0]})
                return "all"
            case "seen":
                key = bytes.fromhex(arguments[0]), int(arguments[1])
                await until(lambda: len(self.arrivals.get(key, ())) == len(self.agents))
                return [*self.arrivals.pop(key).values()]
            case "octets":
                return sum(agent.tunnel(peer).sent_octets for agent in self.agents for peer in agent.neighbours)

    async def run(self):
        for agent in self.agents:
            agent.dial([("127.0.0.1", port) for port in self.ports])
            agent.publish(body_of(agent))
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            print(json.dumps(await self.answer(*line.decode().split())), flush=True)
        for agent in self.agents:
            await agent.close()


async def main(folder, ports, names):
    await Half(folder, ports, names).run()


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    asyncio.run(main(Path(sys.argv[1]), [int(port) for port in sys.argv[2].split(",")], sys.argv[3:]))
