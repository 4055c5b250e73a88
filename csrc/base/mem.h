/* Heap memory of the library. Every allocation goes through here, so that a test can make the n-th
 * one fail and find what open paths leak.
 * Threads: any. Blocks: never. */
#ifndef SLIDE_BASE_MEM_H
#define SLIDE_BASE_MEM_H

#include <stddef.h>
#include <stdint.h>

#include "err.h"

#define SLIDE_PAGE 4096u

/* Zeroed memory, 64-byte aligned. NULL and SLIDE_EMEM when there is none (bytes == 0 is 1 byte). */
void *slide_mem_new(size_t bytes, struct slide_err *err);
/* count * size with the product checked. */
void *slide_mem_array(uint64_t count, size_t size, struct slide_err *err);
char *slide_mem_text(const char *text, struct slide_err *err); /* a copy of a string */
void slide_mem_free(void *memory);                             /* NULL is fine */
/* Zeroed pages that nothing else shares, for what is pinned: `bytes` is rounded up to pages. */
void *slide_mem_pages(size_t bytes, struct slide_err *err);
/* Zeroed pages that are taken when they are first touched, for gigabytes. */
void *slide_mem_map(size_t bytes, struct slide_err *err);
void slide_mem_unmap(void *memory, size_t bytes); /* NULL is fine */

/* Test hook: the n-th allocation from now on fails, 1 is the next one, 0 switches it off. */
void slide_mem_fail_at(int64_t n);
uint64_t slide_mem_live(void); /* allocations that have not been freed */

#endif
