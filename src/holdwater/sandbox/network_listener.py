"""Runs beside a worker: opens a listening socket in the network of a sandbox, and hands it to the worker.

Runs as a script: `python -I -S network_listener.py PORT`, with a socket as standard input; it must not import
holdwater. A request is one byte with a descriptor of a process of the sandbox; a reply is an error number,
and the listening socket if that is 0. `gateway_listeners.py` has the other end. It uses `_socket`, as
`forwarder.py` does.
"""

from __future__ import annotations

import _socket
import ctypes
import errno
import os
import sys

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
IP_FREEBIND = 15  # binds before the network's loopback has its address
BACKLOG = 128
DESCRIPTOR = 4  # bytes

libc = ctypes.CDLL(None, use_errno=True)


def main(port: int) -> None:
    near = _socket.socket(fileno=0)
    own = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    while True:
        request, ancillary, _, _ = near.recvmsg(1, _socket.CMSG_SPACE(DESCRIPTOR))
        if not request:
            return  # the worker has ended
        process = int.from_bytes(ancillary[0][2][:DESCRIPTOR], sys.byteorder)
        try:
            answer(near, process, port, own)
        finally:
            os.close(process)


def answer(near: _socket.socket, process: int, port: int, own: int) -> None:
    try:
        enter(process, CLONE_NEWNET)
    except PermissionError:
        answer_from_child(near, process, port)
        return
    except OSError as e:
        near.send(bytes([e.errno or errno.EINVAL]))
        return
    try:
        listener = listen(port)
    finally:
        enter(own, CLONE_NEWNET)
    hand_over(near, listener)


def answer_from_child(near: _socket.socket, process: int, port: int) -> None:
    """Enter the sandbox's user namespace too, which has the privilege: a process cannot leave it again."""
    child = os.fork()
    if child == 0:
        number = errno.EINVAL
        try:
            enter(process, CLONE_NEWUSER | CLONE_NEWNET)
            hand_over(near, listen(port))
            number = 0
        except OSError as e:
            number = e.errno or errno.EINVAL
        finally:
            os._exit(number)
    number = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if number:
        near.send(bytes([number if number > 0 else errno.EINVAL]))


def enter(namespaces: int, kinds: int) -> None:
    if libc.setns(namespaces, kinds):
        raise OSError(ctypes.get_errno(), "setns")


def listen(port: int) -> _socket.socket:
    listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    listener.setsockopt(_socket.IPPROTO_IP, IP_FREEBIND, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(BACKLOG)
    return listener


def hand_over(near: _socket.socket, listener: _socket.socket) -> None:
    content = listener.fileno().to_bytes(DESCRIPTOR, sys.byteorder)
    near.sendmsg([b"\0"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, content)])
    listener.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
