/* Populates pages of memory before they are first written. */
#define _DEFAULT_SOURCE
#include "core.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

/* The kernel locks the process's memory map during a step: a thread that maps or unmaps memory waits for its end. */
enum { STEP_BYTES = 2 << 20 };

int wc_populate(uint64_t address, uint64_t size) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), end = address + size;
    address -= address % page;
    while (address < end) {
        uint64_t step = end - address < STEP_BYTES ? end - address : STEP_BYTES;
        if (!madvise((void *)(uintptr_t)address, step, MADV_POPULATE_WRITE))
            address += STEP_BYTES;
        else if (errno != EINTR && errno != EAGAIN)
            return errno;
    }
    return 0;
}
