"""What becomes of memory that training frees on a CPU: every step needs the same again."""

import ctypes

# Parameters of mallopt in glibc's malloc.h, and the most that it takes for a size.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_MOST = 2**31 - 1


def keep_freed_memory() -> None:
    """Have the process keep what it frees, up to 2 GiB, and not ask the system for it again at every step.

    By default glibc gives tensors of some size pages of their own, which the system clears at their first
    use and takes back at the last. Where there is another allocator nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, _MOST)
