"""Takes a Python program's freedoms, then lets it run; a script of :mod:`grpo.system.sandbox`.

    python -I -S sandbox_child.py '{"folder": ..., "seconds": ..., ...}' PROGRAM
    python -I -S sandbox_child.py            # prints what of it this system can do

Only the standard library's modules without compiled dependencies are imported, because it is
started for each test of each program.
"""

import ctypes
import json
import os
import resource
import signal
import sys

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWNET, _NEWIPC, _NEWUSER, _NEWPID, _THREAD = (
    0x40000000, 0x08000000, 0x10000000, 0x20000000, 0x10000)
_PDEATHSIG, _SECCOMP, _NO_NEW_PRIVS, _FILTER = 1, 22, 38, 2
#: Rights of Landlock (linux/landlock.h): to run, read and list; all others up to truncating, but
#: linking elsewhere, which is refused anyway.
_READ = 1 << 0 | 1 << 2 | 1 << 3
_WRITE = 1 << 1 | sum(1 << bit for bit in range(4, 13)) | 1 << 14
_ON_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14  # of them, those that a plain file can have
#: What Python needs to see besides itself.
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/dev/null", "/dev/zero",
           "/dev/urandom")
#: Numbers of system calls: clone, socket and socketpair; and of those that no program has: fork and
#: vfork where they exist, and what changes a file's mode, owner, times or attributes by its path,
#: of which Landlock knows nothing.
_CALLS = {
    "x86_64": (0xC000003E, 56, 41, 53,
               (57, 58, *range(90, 95), 132, *range(188, 200), 235, 260, 261, 268, 280)),
    "aarch64": (0xC00000B7, 220, 198, 199, (*range(5, 17), 52, 53, 54, 55, 88))}
#: On both: io_uring, which makes calls that no filter sees; fchmodat2; the newer of attributes.
_NEW_CALLS = (425, 426, 427, 452, *range(463, 467), 468, 469)
_CLONE3 = 435

def _done(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def leave_network() -> None:
    """Namespaces of users, processes, network and messages of its own; children are in them."""
    _done(_LIBC.unshare(_NEWUSER | _NEWPID | _NEWNET | _NEWIPC), "unshare")


def restrict_files(folder: str) -> None:
    """By Landlock: read what Python is made of, and read and write below a folder."""
    version = _done(_LIBC.syscall(444, None, 0, 1), "landlock_create_ruleset")
    if version < 3:
        raise OSError(0, f"Landlock has version {version}, before 3 files may be emptied")
    handled = ctypes.c_uint64(_READ | _WRITE)
    rules = _done(_LIBC.syscall(444, ctypes.byref(handled), 8, 0), "landlock_create_ruleset")
    prefixes = {os.path.realpath(path) for path in (
        sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable)),
        os.path.dirname(os.path.dirname(sys.executable)), *_SYSTEM)}
    for path, rights in [*((path, _READ) for path in prefixes), (folder, _READ | _WRITE),
                         ("/dev/null", _READ | _WRITE)]:
        if not os.path.exists(path):
            continue
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rights &= -1 if os.path.isdir(path) else _ON_FILES
        rule = rights.to_bytes(8, sys.byteorder) + opened.to_bytes(4, sys.byteorder)
        _done(_LIBC.syscall(445, rules, 1, rule, 0), f"landlock_add_rule of {path}")
        os.close(opened)
    _done(_LIBC.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    _done(_LIBC.syscall(446, rules, 0), "landlock_restrict_self")


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def forbid_processes() -> None:
    """By a filter of system calls: threads may be started, processes may not; nor are there Unix
    sockets with a path, or changes to what the system knows of a file."""
    machine = os.uname().machine
    if machine not in _CALLS:
        raise OSError(0, f"the numbers of system calls of {machine} are not known")
    architecture, clone, socket, pair, others = _CALLS[machine]
    # Codes: load a word of the call's data; jump if equal, greater or equal, has a bit; return.
    load, equal, above, has, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allowed, refused, unknown = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38
    lines = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, refused), (load, 0, 0, 0),
             (above, 0, 1, 0x40000000), (give, 0, 0, refused), (equal, 0, 1, _CLONE3),
             (give, 0, 0, unknown)]
    for number in (*others, *_NEW_CALLS):
        lines += [(equal, 0, 1, number), (give, 0, 0, refused)]
    # A thread; no socket of family 1, Unix; a pair, but of datagrams, which may be sent elsewhere.
    for number, word, *jump in ((clone, 16, has, 1, 0, _THREAD), (socket, 16, equal, 0, 1, 1),
                                (pair, 24, has, 0, 1, 2)):
        lines += [(equal, 0, 4, number), (load, 0, 0, word), tuple(jump), (give, 0, 0, refused),
                  (give, 0, 0, allowed)]
    lines += [(give, 0, 0, allowed)]
    code = b"".join(code.to_bytes(2, sys.byteorder) + bytes((yes, no)) + k.to_bytes(
        4, sys.byteorder) for code, yes, no, k in lines)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(lines), ctypes.addressof(buffer))
    _done(_LIBC.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    _done(_LIBC.prctl(_SECCOMP, _FILTER, ctypes.byref(program), 0, 0), "seccomp")


def limit(seconds: int, memory: int, file_size: int) -> None:
    """Resource limits, in seconds and bytes."""
    for what, value in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory),
                        (resource.RLIMIT_FSIZE, file_size), (resource.RLIMIT_CORE, 0),
                        (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_NPROC, 64)):
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))


def _in_child(fn, *args) -> int:
    """The exit code of a process that calls a function and does not come back from it; asked to
    end, this one ends that, whatever session it has gone to."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        _LIBC.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        fn(*args)
        os._exit(0)
    it = os.pidfd_open(pid)
    signal.signal(signal.SIGTERM, lambda *_: signal.pidfd_send_signal(it, signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


def _run(options: dict, program: str) -> None:
    try:
        if "files" in options["isolate"]:
            restrict_files(options["folder"])
        limit(options["seconds"], options["memory"], options["file_size"])
        if "processes" in options["isolate"]:
            forbid_processes()
        os.execv(sys.executable, [sys.executable, "-I", "-B", "-X", "utf8", program])
    except OSError as error:
        os.write(options["status"], str(error).encode())
    os._exit(1)


def _main() -> None:
    if len(sys.argv) == 1:
        print(json.dumps({name: _problem(fn, *args) for name, fn, *args in (
            ("network", leave_network), ("files", restrict_files, os.getcwd()),
            ("processes", forbid_processes))}))
        return
    options = json.loads(sys.argv[1])
    os.set_inheritable(options["status"], False)
    try:
        if "network" in options["isolate"]:
            leave_network()
    except OSError as error:
        os.write(options["status"], str(error).encode())
        os._exit(1)
    os._exit(_in_child(_run, options, sys.argv[2]))


def _problem(fn, *args) -> str:
    """Why a function cannot do what it is for; empty if it can."""
    reader, writer = os.pipe()

    def attempt() -> None:
        try:
            fn(*args)
        except OSError as error:
            os.write(writer, str(error).encode() or b"it fails")

    _in_child(attempt)
    os.close(writer)
    return os.read(reader, 1000).decode()


if __name__ == "__main__":
    _main()
