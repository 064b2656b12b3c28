"""``python holder.py FILE``: opens a store in a process of its own, says that one's pid, and waits to be killed."""

import sys
import time

from fabrictool.gateway.storeprocess import StoreProcess

if __name__ == "__main__":
    store = StoreProcess(lambda: sys.argv[1])
    store.put("f", "g", b"")
    sys.stdout.write(f"{store._process.pid}\n")
    sys.stdout.flush()
    time.sleep(60)
