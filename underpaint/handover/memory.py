"""Memory that processes share without a name for it anywhere.

A memfd is reached only through descriptors, which are passed over Unix sockets. The kernel frees it when the last
process that holds one ends, however it ends; there is nothing to clean up in /dev/shm.
"""

import fcntl
import mmap
import os

import torch

from underpaint.errors import BadConfig
from underpaint.handover.faults import BadHandover
from underpaint.host_memory import available_bytes

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device of this process."""


class Memory:
    """This process's mapping of a memfd. ``data``: all of it, (bytes,) uint8; views of it are shared like itself.

    The mapping lasts until ``close`` and until no tensor views it any more.
    """

    def __init__(self, fd: int) -> None:
        """Map all of ``fd``, which belongs to this object from now on. Raises BadHandover for a file that could
        shrink: reading behind its end would kill this process."""
        self.fd = fd
        self.registered = False
        self.data = torch.empty(0, dtype=torch.uint8)
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError:  # not a memfd at all
            sealed = 0
        if not sealed:
            self.close()
            raise BadHandover("shared memory must be a memfd that is sealed against shrinking")
        self.data = torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)

    @classmethod
    def create(cls, num_bytes: int) -> "Memory":
        """New memory, all zero. Raises BadConfig for more than the machine has left."""
        available = available_bytes()
        if num_bytes > available:
            raise BadConfig(f"{num_bytes} bytes of shared memory are needed and {available} are available")
        fd = os.memfd_create("underpaint", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return cls(fd)

    def register(self) -> None:
        """Pin for CUDA, once: copies then run at the speed of the link, and beside compute. ``close`` undoes it."""
        assert not self.registered
        _check(torch.cuda.cudart().cudaHostRegister(self.data.data_ptr(), self.data.nbytes, PORTABLE))
        self.registered = True

    def close(self) -> None:
        """Unpin, and let go of descriptor and mapping. May be called again."""
        if self.registered:
            torch.cuda.synchronize()  # no copy may still be on its way
            _check(torch.cuda.cudart().cudaHostUnregister(self.data.data_ptr()))
            self.registered = False
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.data = torch.empty(0, dtype=torch.uint8)


def _check(status: object) -> None:
    if int(status) != 0:  # type: ignore[call-overload]
        raise RuntimeError(f"CUDA could not pin or unpin shared memory: error {status}")
