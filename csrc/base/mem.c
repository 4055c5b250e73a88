/* The heap: aligned for the widest vector, zeroed, counted, and able to fail on demand. Nothing on
 * the step path allocates, so that zeroing costs only when something is opened.
 * Every layer allocates here; the tests of open paths fail each allocation in turn. */
#include "mem.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define ALIGN 64

/* Test hooks. Relaxed: they order nothing. */
static _Atomic int64_t countdown;
static _Atomic uint64_t live;

static int fails_now(void)
{
    return atomic_load_explicit(&countdown, memory_order_relaxed) > 0 &&
           atomic_fetch_sub_explicit(&countdown, 1, memory_order_relaxed) == 1;
}

void *slide_mem_new(size_t bytes, struct slide_err *err)
{
    size_t size = bytes ? bytes : 1;
    void *memory = NULL;
    if (fails_now() || posix_memalign(&memory, ALIGN, size)) {
        slide_err_set(err, SLIDE_EMEM, "out of memory: no %zu bytes of heap", size);
        return NULL;
    }
    memset(memory, 0, size);
    atomic_fetch_add_explicit(&live, 1, memory_order_relaxed);
    return memory;
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

void slide_mem_fail_at(int64_t n)
{
    atomic_store_explicit(&countdown, n, memory_order_relaxed);
}

uint64_t slide_mem_live(void)
{
    return atomic_load_explicit(&live, memory_order_relaxed);
}
