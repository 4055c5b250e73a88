/* Libraries that are opened at run time, through tables of symbols.
 * Threads: any. Blocks: while the loader reads files. */
#ifndef SLIDE_BASE_DL_H
#define SLIDE_BASE_DL_H

#include <stddef.h>

#include "err.h"

struct slide_dl_symbol {
    const char *name;
    void **target;
};

/* Tries `candidates` (paths or sonames, NULL-terminated, NULL or "" entries at the front are
 * skipped by the caller) in order; the first that opens and has all `symbols` wins. Returns the
 * handle; `found` gets its name. The error lists what was tried and why each failed. */
void *slide_dl_open(const char *const *candidates, const struct slide_dl_symbol *symbols, int count,
                    char *found, size_t found_size, struct slide_err *err);
void slide_dl_close(void *handle);

#endif
