/* One shared memory segment: a sealed memfd, handed from rank 0 to the others over an abstract
 * unix socket (SCM_RIGHTS). Nothing has a name in a file system, so nothing is left behind.
 * Threads: any, one a segment. Blocks: slide_shm_serve/_join, until all have met. */
#ifndef SLIDE_BASE_SHM_H
#define SLIDE_BASE_SHM_H

#include <stddef.h>
#include <stdint.h>

#include "err.h"
#include "sync.h"

struct slide_shm {
    int fd;
    size_t bytes;
    unsigned char *base;
};

/* What this process could still take, and who says so ("cgroup limit /sys/fs/cgroup/...",
 * "MemAvailable of /proc/meminfo", "RLIMIT_AS"): the smallest of them. */
void slide_shm_room(uint64_t *free_bytes, char *source, size_t source_size);
/* Creates and seals (shrink, grow) a memfd of `bytes` and maps it. No page is taken yet. Fails with
 * SLIDE_EMEM, before any allocation, when `resident` bytes (what will be populated by all ranks) do
 * not fit: the message has bytes asked, bytes free and the limit's source. */
int slide_shm_create(struct slide_shm *shm, size_t bytes, uint64_t resident, struct slide_err *err);
int slide_shm_map(struct slide_shm *shm, int fd, struct slide_err *err); /* takes fd over */
void slide_shm_close(struct slide_shm *shm);
/* Takes the pages of [offset, offset + bytes): MADV_POPULATE_WRITE, or posix_fallocate where the
 * kernel lacks it. Whole 2 MiB pieces are advised huge first. Not enough memory is an error, never
 * a SIGBUS. Contents stay. */
int slide_shm_populate(struct slide_shm *shm, size_t offset, size_t bytes, struct slide_err *err);

/* The rendezvous. `name` is the abstract socket's, without the leading NUL. `agreement` is text of
 * "key=value\n" lines that must be equal on all ranks; a difference ends the call on every rank
 * with an error that says key, both values and the rank. Peers of another uid are refused.
 * pids: [world], filled on all ranks. */
int slide_shm_serve(struct slide_shm *shm, const char *name, int world, const char *agreement,
                    int *pids, const struct slide_waiter *waiter, struct slide_err *err);
int slide_shm_join(struct slide_shm *shm, const char *name, int rank, int world,
                   const char *agreement, int *pids, const struct slide_waiter *waiter,
                   struct slide_err *err);

#endif
