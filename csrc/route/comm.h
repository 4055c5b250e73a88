/* What the ranks of a machine read of each other's devices: the slots. A rank's slots are one piece
 * of memory with the same places in it on every rank, so a pointer into one's own says where the
 * same thing lies on another. On the CPU backend ("shm") the slots lie in the segment.
 * A transport copies nothing by itself: the routes wait on words of the segment until the others'
 * bytes are there, and then have their own device read them.
 * Threads: read-only after open. Blocks: slide_comm_reach. */
#ifndef SLIDE_ROUTE_COMM_H
#define SLIDE_ROUTE_COMM_H

#include "device/device.h"
#include "state/host.h"

struct slide_comm {
    struct slide_host *host;
    unsigned char *base[SLIDE_RANKS_MAX]; /* each rank's slots, as this process sees them */
};

/* The slots that lie in the segment. */
void slide_comm_shm(struct slide_comm *comm, struct slide_host *host);

/* The place of `own`, which lies in this rank's slots, in those of `rank`. */
static inline const unsigned char *slide_comm_at(const struct slide_comm *comm, int rank,
                                                 const void *own)
{
    return comm->base[rank] + ((const unsigned char *)own - comm->base[comm->host->rank]);
}

enum slide_comm_word { SLIDE_COMM_FILLED, SLIDE_COMM_PULLED, SLIDE_COMM_OFFERED, SLIDE_COMM_TAKEN };
/* The rank's word in the header. */
slide_word *slide_comm_word(const struct slide_comm *comm, int rank, enum slide_comm_word word);
/* Until the word of every other rank has reached n. */
int slide_comm_reach(const struct slide_comm *comm, enum slide_comm_word word, uint32_t n,
                     const struct slide_waiter *waiter, const char *what, struct slide_err *err);

#endif
