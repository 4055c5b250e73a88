/* A pool of worker threads for data-parallel loops. The caller works too, so a pool of 1 has no
 * thread of its own. How a loop is cut depends on its arguments only, never on the number of
 * threads: results that depend on the cut are the same for every pool size.
 * Threads: one caller at a time per pool: threads that share one take turns with slide_pool_take.
 * Blocks: slide_pool_for, until every piece has run; take, until it is this thread's turn. */
#ifndef SLIDE_BASE_POOL_H
#define SLIDE_BASE_POOL_H

#include <stdint.h>

#include "err.h"

struct slide_pool;

/* `threads` >= 1 counts the caller. `cpus`: CPUs to bind to, one thread round robin each (but for
 * the caller, which stays as it is), or NULL with 0 for no binding. */
struct slide_pool *slide_pool_new(int threads, const int *cpus, int cpu_count,
                                  struct slide_err *err);
void slide_pool_free(struct slide_pool *pool);
int slide_pool_threads(const struct slide_pool *pool);

/* Runs fn(ctx, i, worker) for every i in [0, n), each exactly once, in any order, and returns when
 * all have returned. `worker` is in [0, threads): an index for scratch memory. */
void slide_pool_for(struct slide_pool *pool, int64_t n,
                    void (*fn)(void *ctx, int64_t i, int worker), void *ctx);

/* A turn of using the pool, in the order of asking; short, for others wait meanwhile. */
void slide_pool_take(struct slide_pool *pool);
void slide_pool_give(struct slide_pool *pool);

/* CPUs that this process may run on (affinity mask). Returns how many, writes at most `room`. */
int slide_pool_cpus(int *cpus, int room);

#endif
