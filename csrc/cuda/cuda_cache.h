/* What was found out about a GPU and is worth keeping between runs: a text file a subject, a line
 * an entry, key and value in hexadecimal. The folder is $SLIDE_CACHE, else $XDG_CACHE_HOME/slidedp,
 * else ~/.cache/slidedp; SLIDE_CACHE=0 switches it off. A line that can't be read is passed over, a
 * folder that can't be written is no error.
 * Threads: any, processes too: a line is one write. Blocks: for the file. */
#ifndef SLIDE_CUDA_CUDA_CACHE_H
#define SLIDE_CUDA_CUDA_CACHE_H

#include <stddef.h>

#define SLIDE_CUDA_CACHE_NAME 192

/* `name`: of the subject, anything printable. 0 when the key was found and `value` is set. */
int slide_cuda_cache_get(const char *name, const void *key, size_t key_bytes, void *value,
                         size_t value_bytes);
void slide_cuda_cache_put(const char *name, const void *key, size_t key_bytes, const void *value,
                          size_t value_bytes);
/* The path of a file of the folder, which is made when it isn't there; -1: there is no cache. */
int slide_cuda_cache_path(const char *name, char *path, size_t size);

#endif
