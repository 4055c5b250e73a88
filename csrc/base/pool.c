/* The worker pool. DESIGN: a loop is an index counter behind a gate. The caller opens the gate and
 * wakes workers; each that gets through before it closes takes indices until none is left. The
 * caller takes indices as well, closes the gate, and waits for those inside only: a worker that
 * wakes late finds it closed and sleeps again, so a short loop never waits for a thread to wake.
 *   round  grows by one a loop; idle workers sleep on it
 *   gate   OPEN | number of workers inside; fn, ctx and n are written while it is 0 and read inside
 *   next   the next index to take
 * Entering is an acquire and leaving a release of the gate; the caller's look at an empty gate is
 * an acquire, so what workers wrote is visible when slide_pool_for returns.
 * Called by train/, route/ and cpu/ for every loop over a range. */
#define _GNU_SOURCE 1
#include "pool.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "futex.h"
#include "mem.h"
#include "thread.h"

#define OPEN 0x80000000u
#define SPINS 100
#define MASK_WORDS 256 /* CPUs / 64 that an affinity mask may have */

struct worker {
    struct slide_pool *pool;
    int index;
    pthread_t thread;
};

struct slide_pool {
    int threads, started;
    struct worker *workers; /* [threads - 1]: the caller is number 0 */

    void (*fn)(void *ctx, int64_t i, int worker);
    void *ctx;
    int64_t n;

    _Atomic bool stop;
    _Atomic uint32_t asked, serving; /* turns: the number drawn last, and the one that is on */
    /* On lines of their own: they are written by all threads. */
    _Atomic uint32_t round __attribute__((aligned(64)));
    _Atomic uint32_t gate __attribute__((aligned(64)));
    _Atomic int64_t next __attribute__((aligned(64)));
};

static void take(struct slide_pool *pool, int worker)
{
    for (;;) {
        int64_t i = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed);
        if (i >= pool->n)
            return;
        pool->fn(pool->ctx, i, worker);
    }
}

static bool enter(struct slide_pool *pool)
{
    uint32_t gate = atomic_load_explicit(&pool->gate, memory_order_relaxed);
    while (gate & OPEN)
        if (atomic_compare_exchange_weak_explicit(&pool->gate, &gate, gate + 1,
                                                  memory_order_acquire, memory_order_relaxed))
            return true;
    return false;
}

static void leave(struct slide_pool *pool)
{
    if (atomic_fetch_sub_explicit(&pool->gate, 1, memory_order_release) == 1)
        slide_futex_wake(&pool->gate, 1, FUTEX_PRIVATE_FLAG);
}

/* Waits until *word != old (a few microseconds awake, then asleep), and returns what it is. */
static uint32_t await_change(_Atomic uint32_t *word, uint32_t old)
{
    uint32_t now;
    for (int i = 0; (now = atomic_load_explicit(word, memory_order_acquire)) == old; i++) {
        if (i < SPINS)
            slide_relax();
        else
            slide_futex_wait(word, old, FUTEX_PRIVATE_FLAG, NULL);
    }
    return now;
}

static void *work(void *arg)
{
    struct worker *worker = arg;
    struct slide_pool *pool = worker->pool;
    char name[16];
    snprintf(name, sizeof name, "slide-pool-%d", worker->index);
    pthread_setname_np(pthread_self(), name);

    uint32_t round = 0;
    for (;;) {
        round = await_change(&pool->round, round);
        if (atomic_load_explicit(&pool->stop, memory_order_relaxed))
            return NULL;
        if (enter(pool)) {
            take(pool, worker->index);
            leave(pool);
        }
    }
}

static int start(struct slide_pool *pool, int cpu, struct slide_err *err)
{
    struct worker *worker = &pool->workers[pool->started];
    worker->pool = pool;
    worker->index = pool->started + 1;

    pthread_attr_t attr;
    int rc = pthread_attr_init(&attr);
    if (rc)
        return slide_err_os(err, rc, "cannot start worker thread %d", worker->index);
    if (cpu >= 0) {
        unsigned long mask[MASK_WORDS] = {0};
        mask[cpu / 64] |= 1ul << cpu % 64;
        rc = pthread_attr_setaffinity_np(&attr, sizeof mask, (cpu_set_t *)mask);
    }
    if (!rc)
        rc = pthread_create(&worker->thread, &attr, work, worker);
    pthread_attr_destroy(&attr);
    if (rc && cpu >= 0)
        return slide_err_os(err, rc, "cannot start worker thread %d on CPU %d", worker->index, cpu);
    if (rc)
        return slide_err_os(err, rc, "cannot start worker thread %d", worker->index);
    pool->started++;
    return 0;
}

struct slide_pool *slide_pool_new(int threads, const int *cpus, int cpu_count,
                                  struct slide_err *err)
{
    if (threads < 1 || (cpu_count && !cpus)) {
        slide_err_set(err, SLIDE_EINVAL, "a pool needs at least 1 thread, not %d", threads);
        return NULL;
    }
    for (int i = 0; i < cpu_count; i++)
        if (cpus[i] < 0 || cpus[i] >= MASK_WORDS * 64) {
            slide_err_set(err, SLIDE_EINVAL, "there is no CPU %d", cpus[i]);
            return NULL;
        }

    struct slide_pool *pool = slide_mem_new(sizeof *pool, err);
    if (!pool)
        return NULL;
    pool->threads = threads;
    pool->workers = slide_mem_array((uint64_t)threads - 1, sizeof *pool->workers, err);
    if (!pool->workers)
        goto fail;

    sigset_t before;
    slide_thread_block_signals(&before);
    int rc = 0;
    for (int i = 1; i < threads && !rc; i++)
        rc = start(pool, cpu_count ? cpus[i % cpu_count] : -1, err);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!rc)
        return pool;

fail:
    slide_pool_free(pool);
    return NULL;
}

void slide_pool_free(struct slide_pool *pool)
{
    if (!pool)
        return;
    atomic_store_explicit(&pool->stop, true, memory_order_relaxed);
    atomic_fetch_add_explicit(&pool->round, 1, memory_order_release);
    slide_futex_wake(&pool->round, INT_MAX, FUTEX_PRIVATE_FLAG);
    for (int i = 0; i < pool->started; i++)
        pthread_join(pool->workers[i].thread, NULL);
    slide_mem_free(pool->workers);
    slide_mem_free(pool);
}

int slide_pool_threads(const struct slide_pool *pool)
{
    return pool->threads;
}

void slide_pool_for(struct slide_pool *pool, int64_t n,
                    void (*fn)(void *ctx, int64_t i, int worker), void *ctx)
{
    if (pool->threads == 1 || n <= 1) {
        for (int64_t i = 0; i < n; i++)
            fn(ctx, i, 0);
        return;
    }

    pool->fn = fn;
    pool->ctx = ctx;
    pool->n = n;
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    atomic_store_explicit(&pool->gate, OPEN, memory_order_release);
    atomic_fetch_add_explicit(&pool->round, 1, memory_order_release);
    int wanted = n - 1 < pool->threads - 1 ? (int)(n - 1) : pool->threads - 1;
    slide_futex_wake(&pool->round, wanted, FUTEX_PRIVATE_FLAG);

    take(pool, 0);

    uint32_t inside = atomic_fetch_and_explicit(&pool->gate, ~OPEN, memory_order_acq_rel) & ~OPEN;
    while (inside)
        inside = await_change(&pool->gate, inside);
}

void slide_pool_take(struct slide_pool *pool)
{
    uint32_t turn = atomic_fetch_add_explicit(&pool->asked, 1, memory_order_relaxed);
    uint32_t on = atomic_load_explicit(&pool->serving, memory_order_acquire);
    while (on != turn)
        on = await_change(&pool->serving, on);
}

void slide_pool_give(struct slide_pool *pool)
{
    atomic_fetch_add_explicit(&pool->serving, 1, memory_order_release);
    slide_futex_wake(&pool->serving, INT_MAX, FUTEX_PRIVATE_FLAG);
}

int slide_pool_cpus(int *cpus, int room)
{
    unsigned long mask[MASK_WORDS] = {0};
    if (sched_getaffinity(0, sizeof mask, (cpu_set_t *)mask))
        return 0;
    int count = 0;
    for (int cpu = 0; cpu < MASK_WORDS * 64; cpu++)
        if (mask[cpu / 64] >> cpu % 64 & 1) {
            if (count < room)
                cpus[count] = cpu;
            count++;
        }
    return count;
}
