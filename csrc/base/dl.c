/* Opening a library by a list of candidates. A library that opens but lacks a symbol is passed
 * over, and no target is touched before a library has them all, so that a table is never half of
 * one library and half of another.
 * Called by cuda/ (driver, cuBLASLt, NCCL, cuDNN) and cpu/ (BLAS). */
#include "dl.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static void why(char *tried, size_t size, const char *candidate, const char *reason)
{
    size_t used = strlen(tried);
    int n = snprintf(tried + used, size - used, "%s%s (%s)", used ? "; " : "", candidate, reason);
    if (n > 0 && (size_t)n >= size - used)
        memcpy(tried + size - 4, "...", 4);
}

static const char *lacking(void *handle, const struct slide_dl_symbol *symbols, int count)
{
    for (int i = 0; i < count; i++)
        if (!dlsym(handle, symbols[i].name))
            return symbols[i].name;
    return NULL;
}

void *slide_dl_open(const char *const *candidates, const struct slide_dl_symbol *symbols, int count,
                    char *found, size_t found_size, struct slide_err *err)
{
    char tried[SLIDE_ERR_TEXT - 64] = "", reason[256];
    for (; *candidates; candidates++) {
        if (!**candidates)
            continue;
        void *handle = dlopen(*candidates, RTLD_NOW | RTLD_LOCAL);
        if (!handle) {
            const char *message = dlerror();
            snprintf(reason, sizeof reason, "%s", message ? message : "unknown error");
            why(tried, sizeof tried, *candidates, reason);
            continue;
        }
        const char *symbol = lacking(handle, symbols, count);
        if (symbol) {
            dlclose(handle);
            snprintf(reason, sizeof reason, "it has no symbol %s", symbol);
            why(tried, sizeof tried, *candidates, reason);
            continue;
        }
        for (int i = 0; i < count; i++)
            *symbols[i].target = dlsym(handle, symbols[i].name);
        if (found && found_size)
            snprintf(found, found_size, "%s", *candidates);
        return handle;
    }
    slide_err_set(err, SLIDE_EIO, "no library could be opened; tried: %s",
                  *tried ? tried : "nothing");
    return NULL;
}

void slide_dl_close(void *handle)
{
    if (handle)
        dlclose(handle);
}
