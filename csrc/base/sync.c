/* Waits on shared words. A waiter sleeps in slices of 50 ms: a wake ends a slice at once, and
 * between slices it looks at what no futex tells it, the abort word, the deadline and the poll
 * function (liveness of the peers, Ctrl-C). The spin before the first sleep is a few microseconds
 * only, because ranks may share their cores with the thread that they wait for.
 * Every layer above waits here and nowhere else. */
#include "sync.h"

#include <time.h>

#include "futex.h"

#define SPINS 100
#define SLICE 0.05

double slide_time(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

uint32_t slide_word_get(slide_word *word)
{
    return atomic_load_explicit(word, memory_order_acquire);
}

void slide_word_wake(slide_word *word)
{
    slide_futex_wake(word, INT_MAX, 0);
}

void slide_word_set(slide_word *word, uint32_t value)
{
    atomic_store_explicit(word, value, memory_order_release);
    slide_word_wake(word);
}

uint32_t slide_word_add(slide_word *word, uint32_t value)
{
    /* Both orders: an adder also publishes what earlier adders have done. */
    uint32_t now = atomic_fetch_add_explicit(word, value, memory_order_acq_rel) + value;
    slide_word_wake(word);
    return now;
}

static bool reached(uint32_t now, uint32_t value, bool change)
{
    return change ? now != value : (int32_t)(now - value) >= 0;
}

static int wait(slide_word *word, uint32_t value, bool change, const struct slide_waiter *waiter,
                const char *what, struct slide_err *err)
{
    for (int i = 0; i < SPINS; i++) {
        if (reached(slide_word_get(word), value, change))
            return 0;
        slide_relax();
    }

    double start = slide_time(), polled = start;
    for (;;) {
        uint32_t now = slide_word_get(word);
        if (reached(now, value, change))
            return 0;

        double slice = SLICE;
        if (waiter) {
            double time = slide_time();
            if (waiter->abort && slide_word_get(waiter->abort))
                return slide_err_set(err, SLIDE_EPEER, "waiting for %s: another rank has failed",
                                     what);
            if (waiter->poll && time - polled >= SLICE) {
                if (waiter->poll(waiter->arg, err)) {
                    /* What a peer did before it went counts. */
                    if (err && err->code == SLIDE_EPEER &&
                        reached(slide_word_get(word), value, change)) {
                        *err = SLIDE_ERR_INIT;
                        return 0;
                    }
                    return slide_err_note(err, "while waiting for %s", what);
                }
                polled = time;
            }
            if (waiter->deadline > 0) {
                double left = start + waiter->deadline - time;
                if (left <= 0)
                    return slide_err_set(err, SLIDE_ETIME, "waiting for %s: not there after %.3g s",
                                         what, waiter->deadline);
                if (left < slice)
                    slice = left;
            }
        }
        /* A nanosecond more than nothing: a wait of zero would spin until the deadline. */
        struct timespec time = {.tv_nsec = (long)(slice * 1e9) + 1};
        slide_futex_wait(word, now, 0, &time);
    }
}

int slide_wait_reach(slide_word *word, uint32_t value, const struct slide_waiter *waiter,
                     const char *what, struct slide_err *err)
{
    return wait(word, value, false, waiter, what, err);
}

int slide_wait_change(slide_word *word, uint32_t value, const struct slide_waiter *waiter,
                      const char *what, struct slide_err *err)
{
    return wait(word, value, true, waiter, what, err);
}
