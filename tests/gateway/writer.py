"""``python writer.py FOLDER``: appends records to a spool whose store is away, and says which ones, until killed."""

import asyncio
import sys
from pathlib import Path

from fabrictool.gateway.records import RequestRecord, StoreAwayError
from fabrictool.gateway.spool import RecordSpool


class Away:
    def put(self, fabric, gateway, lines):
        raise StoreAwayError.of("FT8120", "away")


async def write(folder):
    spool = RecordSpool(folder, Away(), fabric="f", gateway="g", segment_octets=16384)
    task = asyncio.create_task(spool.run())
    number = 0
    while True:
        record = RequestRecord(f"r{number}", 1e9 + number, "/v1/completions", 200, "answered", 0.1, prompt_tokens=1)
        if spool.append(record):
            sys.stdout.write(f"{record.id}\n")
            sys.stdout.flush()
        number += 1
        await asyncio.sleep(0.001)
        assert not task.done()


if __name__ == "__main__":
    asyncio.run(write(Path(sys.argv[1])))
