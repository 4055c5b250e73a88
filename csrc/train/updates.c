/* The thread that applies waiting gradients.
 *
 * DESIGN. `step[unit]` says whose gradient stands in the plane: 0 none, else 1 + the parity of its
 * step. Two sets of numbers are enough: a step's gradients come only after its forward, which has
 * waited for all updates of the step before, so two steps meet here only where the first one is
 * still being applied and the second has not computed anything. The thread takes the lowest unit
 * that may go, cuts this rank's slice into pieces and hands them to the pool in turns with the
 * reduction. AdamW sees the same numbers whenever a unit's turn comes, so nothing of this shows in
 * the result. */
#include "train/updates.h"

#include <pthread.h>
#include <string.h>

#include "base/fault.h"
#include "base/mem.h"
#include "base/thread.h"
#include "optim/vec.h"
#include "train/rank.h"

#define BLOCK 8192u /* elements that are scaled and applied at a time: fits the caches */
#define TURN 8      /* blocks a thread in a turn of the pool: some hundred microseconds */

struct numbers { /* of a step */
    struct slide_adamw adam[2];
    float scale;
    bool open; /* its updates may run */
};

struct slide_updates {
    struct slide_train *train;
    bool gated;
    float *scratch;       /* [threads, BLOCK] */
    pthread_mutex_t lock; /* guards what follows, but for the words */
    uint8_t *step;        /* [units] */
    struct numbers numbers[2];
    int parity;      /* of the step under way */
    uint32_t wanted; /* updates to do, of all steps; grows as gradients come */
    slide_word done; /* of them */
    slide_word news; /* changes: what the thread sleeps on */
    slide_word stop;
    struct slide_thread thread;
};

struct block_work {
    struct slide_updates *u;
    const struct numbers *numbers;
    int unit;
    uint64_t first, end; /* of this turn */
};

static void update_block(void *ctx, int64_t i, int worker)
{
    const struct block_work *work = ctx;
    struct slide_train *train = work->u->train;
    const struct slide_layout *layout = &train->layout;
    uint64_t first = work->first + (uint64_t)i * BLOCK;
    uint64_t n = work->end - first < BLOCK ? work->end - first : BLOCK;
    const unsigned char *plane =
        slide_host_at(&train->host, layout->unit[work->unit].plane[SLIDE_PLANE_GRAD]);
    const void *from = plane + first * (size_t)layout->grad_bytes;
    float *wide = work->u->scratch + (size_t)worker * BLOCK;
    const float *grad = from;
    if (layout->grad_bytes == 2) {
        slide_vec_convert(train->isa, wide, SLIDE_F32, from, SLIDE_BF16, n);
        grad = wide;
    }
    if (work->numbers->scale != 1.0f) {
        slide_vec_scale(train->isa, wide, grad, work->numbers->scale, n);
        grad = wide;
    }
    slide_train_update(train, work->numbers->adam, work->unit, first, grad, n);
}

static int update_unit(struct slide_updates *u, int unit, const struct numbers *numbers,
                       struct slide_err *err)
{
    struct slide_train *train = u->train;
    uint64_t first, end;
    slide_layout_slice(&train->layout, unit, train->spec.rank, &first, &end);
    uint64_t turn = (uint64_t)slide_pool_threads(train->pool) * TURN * BLOCK;
    for (uint64_t at = first; at < end; at += turn) {
        struct block_work work = {u, numbers, unit, at, end - at < turn ? end : at + turn};
        slide_pool_take(train->pool);
        slide_pool_for(train->pool, (int64_t)((work.end - at + BLOCK - 1) / BLOCK), update_block,
                       &work);
        slide_pool_give(train->pool);
        if (slide_word_get(&u->stop))
            return 0;
    }
    if (slide_fault("update", train->spec.rank, err))
        return -1;
    slide_word_add(&train->host.header->applied[unit], 1);
    return 0;
}

/* The lowest unit that may go, with its step's numbers; -1: none. */
static int next_unit(struct slide_updates *u, struct numbers *numbers)
{
    int unit = -1;
    pthread_mutex_lock(&u->lock);
    for (int k = 0; k < u->train->layout.units && unit < 0; k++)
        if (u->step[k] && u->numbers[u->step[k] - 1].open) {
            *numbers = u->numbers[u->step[k] - 1];
            u->step[k] = 0;
            unit = k;
        }
    pthread_mutex_unlock(&u->lock);
    return unit;
}

static void *updates_main(void *arg)
{
    struct slide_updates *u = arg;
    struct slide_host *host = &u->train->host;
    struct slide_err err = SLIDE_ERR_INIT;
    for (;;) {
        struct numbers numbers;
        uint32_t news = slide_word_get(&u->news);
        if (slide_word_get(&u->stop))
            return NULL;
        int unit = next_unit(u, &numbers);
        if (unit < 0) {
            if (slide_wait_reach(&u->news, news + 1, &host->worker, "an update", &err))
                return NULL;
            continue;
        }
        if (update_unit(u, unit, &numbers, &err)) {
            slide_host_post(host, &err);
            return NULL;
        }
        slide_word_add(&u->done, 1);
    }
}

int slide_updates_open(struct slide_updates **updates, struct slide_train *train, bool gated,
                       struct slide_err *err)
{
    struct slide_updates *u = slide_mem_new(sizeof *u, err);
    *updates = u;
    if (!u)
        return -1;
    u->train = train;
    u->gated = gated;
    pthread_mutex_init(&u->lock, NULL);
    u->step = slide_mem_array((uint64_t)train->layout.units, 1, err);
    u->scratch =
        slide_mem_array((uint64_t)slide_pool_threads(train->pool) * BLOCK, sizeof *u->scratch, err);
    if (!u->step || !u->scratch)
        goto fail;
    if (!slide_thread_start(&u->thread, updates_main, u, "the thread of the updates", err))
        return 0;
fail:
    slide_updates_close(u);
    *updates = NULL;
    return -1;
}

void slide_updates_close(struct slide_updates *u)
{
    if (!u)
        return;
    slide_word_set(&u->stop, 1);
    slide_word_add(&u->news, 1);
    slide_thread_join(&u->thread);
    slide_mem_free(u->scratch);
    slide_mem_free(u->step);
    pthread_mutex_destroy(&u->lock);
    slide_mem_free(u);
}

void slide_updates_begin(struct slide_updates *u, const struct slide_adamw adam[2])
{
    pthread_mutex_lock(&u->lock);
    u->parity ^= 1;
    u->numbers[u->parity] = (struct numbers){{adam[0], adam[1]}, 1.0f, !u->gated};
    pthread_mutex_unlock(&u->lock);
}

void slide_updates_add(struct slide_updates *u, int unit)
{
    pthread_mutex_lock(&u->lock);
    u->step[unit] = (uint8_t)(1 + u->parity);
    u->wanted++;
    pthread_mutex_unlock(&u->lock);
    slide_word_add(&u->news, 1);
}

void slide_updates_release(struct slide_updates *u, float scale)
{
    pthread_mutex_lock(&u->lock);
    if (u->gated) {
        u->numbers[u->parity].scale = scale;
        u->numbers[u->parity].open = true;
    }
    pthread_mutex_unlock(&u->lock);
    slide_word_add(&u->news, 1);
}

void slide_updates_drop(struct slide_updates *u)
{
    pthread_mutex_lock(&u->lock);
    for (int k = 0; k < u->train->layout.units; k++)
        if (u->step[k] == 1 + u->parity) {
            u->step[k] = 0;
            u->wanted--;
        }
    u->parity ^= 1; /* the next step may take its place */
    pthread_mutex_unlock(&u->lock);
}

int slide_updates_drain(struct slide_updates *u, struct slide_err *err)
{
    pthread_mutex_lock(&u->lock);
    uint32_t wanted = u->wanted;
    pthread_mutex_unlock(&u->lock);
    return slide_wait_reach(&u->done, wanted, &u->train->host.local, "the updates of this rank",
                            err);
}
