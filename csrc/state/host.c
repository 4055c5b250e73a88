/* The segment's life on one rank, the first-error protocol and the gather that ranks meet in.
 *
 * First error: a rank writes its own page first (once: whoever sets its code), then tries to set
 * the abort word from 0 to 1 + rank. Whoever wins is what every rank reports. Readers look at the
 * page only after they saw the word, so the text is whole. */
#include "state/host.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define MAGIC 0x736c696465647031ull /* "slidedp1" */
#define VERSION 1u

size_t slide_header_size(int units)
{
    return sizeof(struct slide_header) + (size_t)units * sizeof(slide_word);
}

unsigned char *slide_host_staging(const struct slide_host *host, int rank)
{
    return host->shm.base + host->layout->staging + host->layout->staging_bytes * (size_t)rank;
}

unsigned char *slide_host_slots(const struct slide_host *host, int rank)
{
    return host->shm.base + host->layout->slots + host->layout->slots_bytes * (size_t)rank;
}

/* A peer that has closed will never answer: a wait for it ends instead of lasting the timeout. The
 * wait looks at its condition once more after this. */
static int left_check(struct slide_host *host, struct slide_err *err)
{
    for (int r = 0; r < host->world; r++)
        if (r != host->rank && slide_word_get(&host->header->rank[r].left))
            return slide_err_set(err, SLIDE_EPEER,
                                 "rank %d has closed its trainer while rank %d waits for it", r,
                                 host->rank);
    return 0;
}

static int poll_driver(void *arg, struct slide_err *err)
{
    struct slide_host *host = arg;
    return host->poll ? host->poll(host->poll_arg, err) : 0;
}

static int poll_peers(void *arg, struct slide_err *err)
{
    return left_check(arg, err) ? -1 : poll_driver(arg, err);
}

static int poll_worker_peers(void *arg, struct slide_err *err)
{
    return left_check(arg, err);
}

static int populate(struct slide_host *host, struct slide_err *err)
{
    const struct slide_layout *layout = host->layout;
    for (int p = 0; p < SLIDE_PLANES; p++) {
        size_t size = slide_layout_plane_size(layout, (enum slide_plane)p);
        for (int u = 0; size && u < layout->units; u++) {
            uint64_t first, end;
            slide_layout_slice(layout, u, host->rank, &first, &end);
            if (end > first &&
                slide_shm_populate(&host->shm, layout->unit[u].plane[p] + first * size,
                                   (end - first) * size, err))
                return -1;
        }
    }
    size_t rank = (size_t)host->rank, size = layout->staging_bytes;
    if (size && slide_shm_populate(&host->shm, layout->staging + size * rank, size, err))
        return -1;
    size = layout->slots_bytes;
    return size ? slide_shm_populate(&host->shm, layout->slots + size * rank, size, err) : 0;
}

int slide_host_open(struct slide_host *host, const struct slide_layout *layout, int rank,
                    const char *rendezvous, const char *agreement, double timeout,
                    int (*poll)(void *, struct slide_err *), void *poll_arg, struct slide_err *err)
{
    int pids[SLIDE_RANKS_MAX] = {0};
    int world = layout->world;
    *host = (struct slide_host){.shm = {.fd = -1},
                                .layout = layout,
                                .rank = rank,
                                .world = world,
                                .timeout = timeout,
                                .poll = poll,
                                .poll_arg = poll_arg};
    struct slide_waiter meet = {.deadline = timeout, .poll = poll_driver, .arg = host};
    char text[1024];
    pids[rank] = (int)getpid();
    if (rank == 0) {
        if (slide_shm_create(&host->shm, layout->bytes, layout->resident, err) ||
            slide_shm_populate(&host->shm, 0, slide_header_size(layout->units), err))
            goto fail;
        host->header = (struct slide_header *)host->shm.base;
        host->header->version = VERSION;
        host->header->world = (uint32_t)world;
        host->header->units = (uint32_t)layout->units;
        host->header->layout_hash = layout->hash;
        host->header->magic = MAGIC;
        if (world > 1 &&
            slide_shm_serve(&host->shm, rendezvous, world, agreement, pids, &meet, err))
            goto fail;
    } else {
        if (slide_shm_join(&host->shm, rendezvous, rank, world, agreement, pids, &meet, err))
            goto fail;
        host->header = (struct slide_header *)host->shm.base;
        if (host->shm.bytes != layout->bytes || host->header->magic != MAGIC ||
            host->header->version != VERSION || host->header->layout_hash != layout->hash) {
            snprintf(text, sizeof text,
                     "rank %d: the shared segment does not have this rank's layout", rank);
            slide_err_set(err, SLIDE_EPEER, "%s", text);
            goto fail;
        }
    }
    slide_word *abort_word = &host->header->abort;
    host->peers = (struct slide_waiter){abort_word, timeout, poll_peers, host};
    host->local = (struct slide_waiter){abort_word, 0, poll_driver, host};
    host->worker_peers = (struct slide_waiter){abort_word, timeout, poll_worker_peers, host};
    host->worker = (struct slide_waiter){abort_word, 0, NULL, NULL};
    atomic_store(&host->header->rank[rank].pid, (int32_t)getpid());
    if (slide_watch_start(host, pids, err))
        goto fail;
    if (populate(host, err) || slide_host_gather(host, "open", NULL, 0, NULL, err))
        goto fail;
    return 0;
fail:
    slide_host_post(host, err); /* nothing when the error came from there */
    slide_host_first_error(host, err);
    slide_host_close(host);
    return -1;
}

void slide_host_close(struct slide_host *host)
{
    if (host->watch && host->header)
        slide_word_set(&host->header->rank[host->rank].left, 1);
    slide_watch_stop(host);
    slide_shm_close(&host->shm);
    host->header = NULL;
}

void slide_host_post(struct slide_host *host, const struct slide_err *err)
{
    struct slide_header *header = host->header;
    if (!header || slide_word_get(&header->abort))
        return;
    struct slide_rank_page *page = &header->rank[host->rank];
    /* Threads of one rank may post at once: the first one takes the page. */
    int32_t none = 0;
    if (!__atomic_compare_exchange_n(&page->code, &none, (int32_t)err->code, false,
                                     __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return;
    page->culprit = err->rank >= 0 ? err->rank : host->rank;
    memcpy(page->text, err->text, sizeof page->text);
    page->text[sizeof page->text - 1] = 0;
    uint32_t zero = 0;
    atomic_compare_exchange_strong(&header->abort, &zero, (uint32_t)host->rank + 1);
    slide_word_wake(&header->abort);
}

int slide_host_first_error(struct slide_host *host, struct slide_err *err)
{
    uint32_t word = host->header ? slide_word_get(&host->header->abort) : 0;
    if (word == 0 || word > SLIDE_RANKS_MAX)
        return 0;
    const struct slide_rank_page *page = &host->header->rank[word - 1];
    if (page->culprit == host->rank && err->code && err->code != SLIDE_EPEER)
        return 0; /* our own, told with more detail already */
    *err = SLIDE_ERR_INIT;
    slide_err_set(err, page->culprit == host->rank ? (enum slide_code)page->code : SLIDE_EPEER,
                  "%.*s", (int)sizeof page->text - 1, page->text);
    err->rank = page->culprit;
    return -1;
}

int slide_host_gather(struct slide_host *host, const char *kind, const double *values, int count,
                      double *all, struct slide_err *err)
{
    if (count < 0 || count > SLIDE_GATHER_MAX)
        return slide_err_set(err, SLIDE_EINVAL, "gather of %d values, at most %d", count,
                             SLIDE_GATHER_MAX);
    /* Two sets of values suffice: a rank comes to round r + 2 only when all have left round r. */
    uint32_t round = ++host->round;
    struct slide_rank_page *page = host->header->rank;
    if (count)
        memcpy(page[host->rank].value[round % 2], values, (size_t)count * sizeof *values);
    snprintf(page[host->rank].kind[round % 2], SLIDE_GATHER_KIND, "%s", kind);
    slide_word_set(&page[host->rank].gathered, round);
    for (int r = 0; r < host->world; r++) {
        char what[48];
        snprintf(what, sizeof what, "rank %d", r);
        if (slide_wait_reach(&page[r].gathered, round, &host->peers, what, err))
            return -1;
        /* Compared with rank 0's, so that all ranks tell the same story. */
        if (strncmp(page[r].kind[round % 2], page[0].kind[round % 2], SLIDE_GATHER_KIND) != 0)
            return slide_err_set(err, SLIDE_EPEER,
                                 "ranks are at different calls: rank %d at %.*s, rank 0 at %.*s", r,
                                 SLIDE_GATHER_KIND, page[r].kind[round % 2], SLIDE_GATHER_KIND,
                                 page[0].kind[round % 2]);
        if (count)
            memcpy(all + (size_t)r * (size_t)count, page[r].value[round % 2],
                   (size_t)count * sizeof *all);
    }
    return 0;
}

int slide_host_wait_updates(struct slide_host *host, int unit, uint32_t updates,
                            const struct slide_waiter *waiter, struct slide_err *err)
{
    char what[64];
    snprintf(what, sizeof what, "the update of unit %d", unit);
    /* Each owner counts once an update; the product may wrap, as the counter does. */
    return slide_wait_reach(&host->header->applied[unit], updates * (uint32_t)host->world, waiter,
                            what, err);
}
