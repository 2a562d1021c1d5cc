"""Runs inside a sandbox: forwards 127.0.0.1:PORT to the gateway's unix socket, then execs the command.

Runs as a script: `python -I -S forwarder.py SOCKET PORT -- argv...`; it must not import holdwater. It uses
`_socket` and `_signal`: `socket` and `signal` import `enum`, which doubles the start-up time.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _socket
import os
import select
import sys

CHUNK = 64 * 1024  # bytes held for each direction of a connection, at most
BACKLOG = 128
CONNECT = 10.0  # seconds
MISSING = 127  # a shell's exit status for a missing program


def main(socket: str, port: int, argv: list[str]) -> None:
    listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(BACKLOG)
    serve_detached(listener, socket)
    _signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)  # Python ignores it, and exec would pass that on
    try:
        os.execvp(argv[0], argv)
    except OSError as e:
        os.write(2, f"{argv[0]}: {e.strerror}\n".encode())
        os._exit(MISSING)


def serve_detached(listener: _socket.socket, socket: str) -> None:
    """Serve in a grandchild: the command must not see a child that it never started."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    if os.fork():
        os._exit(0)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    try:
        GatewayForwarder(listener, socket).serve()
    finally:
        os._exit(1)


class SocketFlow:
    """One direction of a connection: holds bytes read from `source` that `target` has not accepted yet."""

    __slots__ = ("done", "held", "source", "target")

    def __init__(self, source: _socket.socket, target: _socket.socket) -> None:
        self.source = source
        self.target = target
        self.held = b""
        self.done = False

    def pull(self) -> None:
        try:
            self.held = os.read(self.source.fileno(), CHUNK)
        except BlockingIOError:
            return
        if self.held:
            self.push()
        else:
            self.finish()

    def push(self) -> None:
        try:
            self.held = self.held[os.write(self.target.fileno(), self.held) :]
        except BlockingIOError:
            pass  # epoll reports when the target can take more

    def finish(self) -> None:
        self.done = True
        try:
            self.target.shutdown(_socket.SHUT_WR)
        except OSError:
            pass  # the peer is gone already


class GatewayForwarder:
    def __init__(self, listener: _socket.socket, socket: str) -> None:
        self.listener = listener
        self.socket = socket
        self.epoll = select.epoll()
        self.flows: dict[
            int, tuple[SocketFlow, SocketFlow]
        ] = {}  # fd -> (out of it, into it); bound: open files
        self.paused = False
        listener.setblocking(False)
        self.epoll.register(listener.fileno(), select.EPOLLIN)

    def serve(self) -> None:
        while True:
            for fd, events in self.epoll.poll():
                if fd == self.listener.fileno():
                    self.accept()
                elif fd in self.flows:
                    self.move(fd, events)

    def accept(self) -> None:
        try:
            fd, _ = self.listener._accept()  # type: ignore[attr-defined]
        except BlockingIOError:
            return
        except OSError:  # out of descriptors: new connections wait until one closes
            self.epoll.modify(self.listener.fileno(), 0)
            self.paused = True
            return
        near = _socket.socket(fileno=fd)
        try:
            far = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
            far.settimeout(CONNECT)
            far.connect(self.socket)
        except OSError:
            near.close()  # no gateway: the client's connection is closed
            return
        out, back = SocketFlow(near, far), SocketFlow(far, near)
        for end, flows in ((near, (out, back)), (far, (back, out))):
            end.setblocking(False)
            self.flows[end.fileno()] = flows
            self.epoll.register(end.fileno(), select.EPOLLIN | select.EPOLLONESHOT)

    def move(self, fd: int, events: int) -> None:
        outgoing, incoming = self.flows[fd]
        try:
            if events & select.EPOLLOUT and incoming.held:
                incoming.push()
            if events & ~select.EPOLLOUT and not outgoing.held and not outgoing.done:
                outgoing.pull()
        except OSError:
            self.close(outgoing)
            return
        if (outgoing.done and incoming.done) or (events & select.EPOLLHUP and outgoing.done):
            self.close(outgoing)
        else:
            self.watch(outgoing, incoming)

    def watch(self, outgoing: SocketFlow, incoming: SocketFlow) -> None:
        """Read an end once its last data is delivered; write to it while data for it is held.

        An end that waits for neither stays disarmed (ONESHOT): otherwise its hang-up would be reported
        endlessly.
        """
        for end, out, into in ((outgoing.source, outgoing, incoming), (outgoing.target, incoming, outgoing)):
            reads = 0 if out.held or out.done else select.EPOLLIN
            writes = select.EPOLLOUT if into.held else 0
            if reads or writes:
                self.epoll.modify(end.fileno(), reads | writes | select.EPOLLONESHOT)

    def close(self, flow: SocketFlow) -> None:
        for end in (flow.source, flow.target):
            del self.flows[end.fileno()]
            self.epoll.unregister(end.fileno())
            end.close()
        if self.paused:
            self.epoll.modify(self.listener.fileno(), select.EPOLLIN)
            self.paused = False


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[4:])
