/* Waiting on a 32-bit word in (shared) memory with a futex. Every wait for another rank has a
 * deadline, reads the abort word, and calls the waiter's poll function, so that no
 * wait outlives a dead rank, an error elsewhere, or a Ctrl-C.
 * Threads: any. Blocks: slide_wait_*, until the condition, an abort, the deadline or poll. */
#ifndef SLIDE_BASE_SYNC_H
#define SLIDE_BASE_SYNC_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "err.h"

typedef _Atomic uint32_t slide_word;

struct slide_waiter {
    slide_word *abort; /* != 0: give up with SLIDE_EPEER; NULL: none */
    double deadline;   /* seconds that one wait may last; <= 0: for ever */
    /* Called in the waiting thread about every 50 ms while it waits; -1 ends the wait with what it
     * put into err. NULL: none. */
    int (*poll)(void *arg, struct slide_err *err);
    void *arg;
};

/* Waits until *word has reached `value`: (int32_t)(*word - value) >= 0, so counters may wrap.
 * `what` completes "waiting for ..." in the error. Acquire semantics. */
int slide_wait_reach(slide_word *word, uint32_t value, const struct slide_waiter *waiter,
                     const char *what, struct slide_err *err);
/* Waits until *word differs from `value`. */
int slide_wait_change(slide_word *word, uint32_t value, const struct slide_waiter *waiter,
                      const char *what, struct slide_err *err);
/* Release store / add, then wakes all waiters, in every process. */
void slide_word_set(slide_word *word, uint32_t value);
uint32_t slide_word_add(slide_word *word, uint32_t value); /* returns the new value */
uint32_t slide_word_get(slide_word *word);                 /* acquire load */
void slide_word_wake(slide_word *word);

double slide_time(void); /* CLOCK_MONOTONIC, seconds */

#endif
