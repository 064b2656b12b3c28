"""Loopback links with the faults of real ones."""

import socket
import threading


class Relay:
    """A loopback link that can fall silent, end after some bytes, or speak for itself."""

    def __init__(self, port, greeting=b""):
        self.target, self.greeting, self.limit = port, greeting, None
        self.silent, self.over = threading.Event(), threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.open = []
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def accept(self):
        self.listener.settimeout(0.1)
        while not self.over.is_set():
            try:
                here, _ = self.listener.accept()
            except TimeoutError:
                continue
            there = socket.create_connection(("127.0.0.1", self.target))
            self.open += [here, there]
            if self.greeting:
                here.sendall(self.greeting)
                here.shutdown(socket.SHUT_WR)
                continue
            for pair in ((here, there), (there, here)):
                self.threads.append(threading.Thread(target=self.pump, args=pair))
                self.threads[-1].start()

    def pump(self, source, sink):
        source.settimeout(0.1)
        while not self.over.is_set():
            try:
                data = source.recv(1 << 14)
                if self.silent.is_set():
                    continue
                sink.sendall(data)
            except TimeoutError:
                continue
            except OSError:
                break
            if self.limit is not None:
                self.limit -= len(data)
            if not data or (self.limit is not None and self.limit < 0):
                break
        if self.limit is not None and self.limit < 0:
            for end in (source, sink):
                end.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.over.set()
        for thread in self.threads:
            thread.join()
        for end in (self.listener, *self.open):
            end.close()


class Echo(Relay):
    """Sends back what comes."""

    def __init__(self):
        super().__init__(0)

    def accept(self):
        self.listener.settimeout(0.1)
        while not self.over.is_set():
            try:
                here, _ = self.listener.accept()
            except TimeoutError:
                continue
            self.open.append(here)
            here.settimeout(10)
            while data := here.recv(1 << 14):
                here.sendall(data)
            here.close()
