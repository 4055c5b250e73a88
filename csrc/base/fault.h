/* Test hooks: faults and sleeps on demand, from the environment, so that the very library that is
 * installed can be tested. SLIDE_FAULT = STAGE:RANK:ACTION[:N] acts when rank RANK passes STAGE
 * for the N-th time (default 1). Stages (and "lane", for sleeps alone): load, fetch, forward,
 * backward, copyout, chunk, reduce, update, save; gather (sharded delivery) and offer (reduction
 * on the devices). Actions: kill (SIGKILL itself), stop (SIGSTOP itself), error (SLIDE_EDEVICE); at
 * chunk, a piece of gradient that has reached the host, also inf and nan, which spoil its first
 * element. SLIDE_JITTER = seed: every passing of a stage sleeps a pseudo-random 0-2 ms first.
 * Threads: any. Blocks: for the sleep. */
#ifndef SLIDE_BASE_FAULT_H
#define SLIDE_BASE_FAULT_H

#include <stdbool.h>

#include "err.h"

/* 0, or -1 when an error was asked for here. Free when neither variable is set. */
int slide_fault(const char *stage, int rank, struct slide_err *err);
/* The same; true with *value where an Inf or NaN was asked for here. */
int slide_fault_value(const char *stage, int rank, bool *spoil, float *value,
                      struct slide_err *err);

#endif
