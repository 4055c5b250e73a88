/* Where the other ranks' slots are, and the words that say how far each rank has come. Called by
 * deliver_shard.c and reduce.c. */
#include "route/comm.h"

#include <stdio.h>

void slide_comm_shm(struct slide_comm *comm, struct slide_host *host)
{
    *comm = (struct slide_comm){.host = host};
    for (int r = 0; r < host->world; r++)
        comm->base[r] = slide_host_slots(host, r);
}

slide_word *slide_comm_word(const struct slide_comm *comm, int rank, enum slide_comm_word word)
{
    struct slide_rank_page *page = &comm->host->header->rank[rank];
    slide_word *const words[] = {[SLIDE_COMM_FILLED] = &page->filled,
                                 [SLIDE_COMM_PULLED] = &page->pulled,
                                 [SLIDE_COMM_OFFERED] = &page->offered,
                                 [SLIDE_COMM_TAKEN] = &page->taken};
    return words[word];
}

int slide_comm_reach(const struct slide_comm *comm, enum slide_comm_word word, uint32_t n,
                     const struct slide_waiter *waiter, const char *what, struct slide_err *err)
{
    const struct slide_host *host = comm->host;
    for (int r = 0; r < host->world; r++) {
        char text[64];
        snprintf(text, sizeof text, "%s of rank %d", what, r);
        if (r != host->rank &&
            slide_wait_reach(slide_comm_word(comm, r, word), n, waiter, text, err))
            return -1;
    }
    return 0;
}
