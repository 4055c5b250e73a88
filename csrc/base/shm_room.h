/* How much memory is left, and the parts of shm.c that tests call one by one.
 * Threads: any. Blocks: slide_shm_populate_*, while pages are taken. */
#ifndef SLIDE_BASE_SHM_ROOM_H
#define SLIDE_BASE_SHM_ROOM_H

#include <stdbool.h>

#include "shm.h"

/* slide_shm_room with all files looked for below `root` ("" for the machine itself). With `mapped`,
 * the room for pages of a mapping that is there already: RLIMIT_AS has no say in those. */
void slide_shm_room_at(const char *root, bool mapped, uint64_t *free_bytes, char *source,
                       size_t source_size);
/* Sets SLIDE_EMEM with the host's name, what was asked, what is free and who says so. */
int slide_shm_refuse(uint64_t asked, uint64_t free_bytes, const char *source, const char *what,
                     struct slide_err *err);

/* slide_shm_populate with the limits read below `root`. */
int slide_shm_populate_at(const char *root, struct slide_shm *shm, size_t offset, size_t bytes,
                          struct slide_err *err);
/* The two ways to take pages. 1: the kernel lacks this one. [offset, +bytes) in whole pages. */
int slide_shm_populate_madvise(struct slide_shm *shm, size_t offset, size_t bytes,
                               struct slide_err *err);
int slide_shm_populate_fallocate(struct slide_shm *shm, size_t offset, size_t bytes,
                                 struct slide_err *err);

#endif
