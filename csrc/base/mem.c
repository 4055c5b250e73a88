/* The heap: aligned for the widest vector, zeroed, counted, and able to fail on demand. Nothing on
 * the step path allocates, so that zeroing costs only when something is opened.
 * Every layer allocates here; the tests of open paths fail each allocation in turn. */
#include "mem.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define ALIGN 64

/* Test hooks. Relaxed: they order nothing. */
static _Atomic int64_t countdown;
static _Atomic uint64_t live;

static int fails_now(void)
{
    return atomic_load_explicit(&countdown, memory_order_relaxed) > 0 &&
           atomic_fetch_sub_explicit(&countdown, 1, memory_order_relaxed) == 1;
}

static void *zeroed(size_t align, size_t size, struct slide_err *err)
{
    void *memory = NULL;
    if (fails_now() || posix_memalign(&memory, align, size)) {
        slide_err_set(err, SLIDE_EMEM, "out of memory: no %zu bytes of heap", size);
        return NULL;
    }
    memset(memory, 0, size);
    atomic_fetch_add_explicit(&live, 1, memory_order_relaxed);
    return memory;
}

void *slide_mem_new(size_t bytes, struct slide_err *err)
{
    return zeroed(ALIGN, bytes ? bytes : 1, err);
}

void *slide_mem_pages(size_t bytes, struct slide_err *err)
{
    return zeroed(SLIDE_PAGE, (bytes / SLIDE_PAGE + 1) * SLIDE_PAGE, err);
}

void *slide_mem_array(uint64_t count, size_t size, struct slide_err *err)
{
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes)) {
        slide_err_set(err, SLIDE_EMEM, "out of memory: %llu elements of %zu bytes",
                      (unsigned long long)count, size);
        return NULL;
    }
    return slide_mem_new(bytes, err);
}

char *slide_mem_text(const char *text, struct slide_err *err)
{
    size_t size = strlen(text) + 1;
    char *copy = slide_mem_new(size, err);
    return copy ? memcpy(copy, text, size) : NULL;
}

void slide_mem_free(void *memory)
{
    if (!memory)
        return;
    free(memory);
    atomic_fetch_sub_explicit(&live, 1, memory_order_relaxed);
}

void *slide_mem_map(size_t bytes, struct slide_err *err)
{
    void *memory = fails_now() ? MAP_FAILED
                               : mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        slide_err_set(err, SLIDE_EMEM, "host: out of memory: no %zu bytes", bytes);
        return NULL;
    }
    madvise(memory, bytes, MADV_HUGEPAGE);
    atomic_fetch_add_explicit(&live, 1, memory_order_relaxed);
    return memory;
}

void slide_mem_unmap(void *memory, size_t bytes)
{
    if (!memory)
        return;
    munmap(memory, bytes);
    atomic_fetch_sub_explicit(&live, 1, memory_order_relaxed);
}

void slide_mem_fail_at(int64_t n)
{
    atomic_store_explicit(&countdown, n, memory_order_relaxed);
}

uint64_t slide_mem_live(void)
{
    return atomic_load_explicit(&live, memory_order_relaxed);
}
