/* The host state of one machine: the shared segment, its header, and this rank's view of it. The
 * header has no pointers: magic, layout hash, abort word, a counter a unit, a slot a rank.
 * One instance a rank; ranks may be processes, or threads that map the segment each for itself.
 * Threads: slide_host_post and slide_host_first_error from any; the rest by the rank's driver.
 * Blocks: open, gather, wait_updates. */
#ifndef SLIDE_STATE_HOST_H
#define SLIDE_STATE_HOST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/shm.h"
#include "base/sync.h"
#include "layout.h"

#define SLIDE_RANKS_MAX 64
#define SLIDE_GATHER_MAX 16
#define SLIDE_GATHER_KIND 128 /* bytes of the name of what ranks meet for */
#define SLIDE_RING_MAX 64     /* staging chunks a rank */

/* A rank's page in the header. Only its own rank writes it. */
struct slide_rank_page {
    _Atomic int32_t pid;
    slide_word beat;      /* counts up every 100 ms */
    slide_word left;      /* 1: has closed in good order */
    slide_word published; /* gradient chunks copied out so far, modulo 2^32 */
    /* Units so far, modulo 2^32: this rank's slice of the weights lies in its slot; it has taken
     * the others' slices; its gradient lies in its slot; it has read the others' gradients. */
    slide_word filled, pulled, offered, taken;
    slide_word gathered; /* rounds of slide_host_gather */
    double value[2][SLIDE_GATHER_MAX];
    char kind[2][SLIDE_GATHER_KIND];
    int32_t code, culprit; /* the first error that this rank met */
    char text[SLIDE_ERR_TEXT];
} __attribute__((aligned(2048)));

struct slide_header {
    uint64_t magic;
    uint32_t version, world, units;
    uint64_t layout_hash;
    slide_word abort;                    /* 0, or 1 + the rank whose page has the first error */
    slide_word consumed[SLIDE_RING_MAX]; /* uses of staging place k that are over */
    struct slide_rank_page rank[SLIDE_RANKS_MAX];
    slide_word applied[]; /* [units]: += 1 by each owner whose slice of the unit is updated */
};

struct slide_watch;

struct slide_host {
    struct slide_shm shm;
    struct slide_header *header;
    const struct slide_layout *layout;
    int rank, world;
    uint32_t round; /* of gather */
    double timeout;
    struct slide_watch *watch;
    int (*poll)(void *arg, struct slide_err *err); /* the driver's: signals */
    void *poll_arg;
    /* Waiters: for other ranks and for local work, by the driver and by any other thread. */
    struct slide_waiter peers, local, worker_peers, worker;
};

/* Bytes in front of the planes. */
size_t slide_header_size(int units);

/* Makes (rank 0) or joins the segment and takes the pages of this rank's slices. */
int slide_host_open(struct slide_host *host, const struct slide_layout *layout, int rank,
                    const char *rendezvous, const char *agreement, double timeout,
                    int (*poll)(void *, struct slide_err *), void *poll_arg, struct slide_err *err);
/* Leaves; what was posted before stays. NULL members are fine. */
void slide_host_close(struct slide_host *host);

static inline void *slide_host_at(const struct slide_host *host, size_t offset)
{
    return host->shm.base + offset;
}

/* This rank's ring of staging places; and another's. */
unsigned char *slide_host_staging(const struct slide_host *host, int rank);
/* Its slots, where those lie in the segment. */
unsigned char *slide_host_slots(const struct slide_host *host, int rank);

/* Makes `err` the machine's first error unless there is one, and ends every wait on every rank. */
void slide_host_post(struct slide_host *host, const struct slide_err *err);
/* The first error of any rank as this rank's own: err is overwritten, with the rank. 0: none. */
int slide_host_first_error(struct slide_host *host, struct slide_err *err);

/* values[count] of each rank, in rank order, to all[world * count]. A barrier as well. `kind` says
 * what for: ranks that meet for different things get an error that names both. */
int slide_host_gather(struct slide_host *host, const char *kind, const double *values, int count,
                      double *all, struct slide_err *err);

/* Until every owner has finished `updates` updates of the unit. */
int slide_host_wait_updates(struct slide_host *host, int unit, uint32_t updates,
                            const struct slide_waiter *waiter, struct slide_err *err);

/* watch.c: beats, and looks after the other ranks (pidfd, beats). A rank that died, or that has not
 * moved for SLIDE_STALL seconds of this rank's own running time, becomes the first error; the one
 * that stands still is killed, for it can't end itself. */
int slide_watch_start(struct slide_host *host, const int *pids, struct slide_err *err);
void slide_watch_stop(struct slide_host *host);

#endif
