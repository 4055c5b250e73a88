/* The cache folder. Entries are few and asked for once each, so a file is read through for every
 * question; the last line with a key counts.
 * Called by cuda_gemm.c and cuda_cudnn.c. */
#define _GNU_SOURCE 1
#include "cuda/cuda_cache.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/env.h"

#define LINE 1024

int slide_cuda_cache_path(const char *name, char *path, size_t size)
{
    const char *folder = slide_env_get("SLIDE_CACHE"), *home = getenv("HOME");
    const char *xdg = getenv("XDG_CACHE_HOME");
    char file[SLIDE_CUDA_CACHE_NAME];
    int n;
    if (!strcmp(folder, "0"))
        return -1;
    snprintf(file, sizeof file, "%s", name);
    for (char *c = file; *c; c++)
        if (*c <= ' ' || *c == '/' || *c > '~')
            *c = '_';
    if (*folder)
        n = snprintf(path, size, "%s/", folder);
    else if (xdg && *xdg)
        n = snprintf(path, size, "%s/slidedp/", xdg);
    else if (home && *home)
        n = snprintf(path, size, "%s/.cache/slidedp/", home);
    else
        return -1;
    if (n < 0 || (size_t)n + strlen(file) >= size)
        return -1;
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        int failed = mkdir(path, 0777) && errno != EEXIST;
        *slash = '/';
        if (failed)
            return -1;
    }
    memcpy(path + n, file, strlen(file) + 1);
    return 0;
}

static void to_hex(char *out, const void *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        snprintf(out + 2 * i, 3, "%02x", ((const unsigned char *)bytes)[i]);
}

static int digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static int from_hex(void *out, const char *text, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        int high = digit(text[2 * i]), low = high < 0 ? -1 : digit(text[2 * i + 1]);
        if (low < 0)
            return -1;
        ((unsigned char *)out)[i] = (unsigned char)(high << 4 | low);
    }
    return text[2 * n] == '\n' ? 0 : -1;
}

int slide_cuda_cache_get(const char *name, const void *key, size_t key_bytes, void *value,
                         size_t value_bytes)
{
    char path[1024], line[LINE], want[LINE];
    unsigned char read[LINE / 2];
    int found = -1;
    if (2 * (key_bytes + value_bytes) + 2 >= LINE || slide_cuda_cache_path(name, path, sizeof path))
        return -1;
    FILE *file = fopen(path, "re");
    if (!file)
        return -1;
    to_hex(want, key, key_bytes);
    while (fgets(line, sizeof line, file)) {
        size_t n = 2 * key_bytes;
        if (strlen(line) > n && !memcmp(line, want, n) && line[n] == ' ' &&
            !from_hex(read, line + n + 1, value_bytes)) {
            memcpy(value, read, value_bytes);
            found = 0;
        }
    }
    fclose(file);
    return found;
}

void slide_cuda_cache_put(const char *name, const void *key, size_t key_bytes, const void *value,
                          size_t value_bytes)
{
    char path[1024], line[LINE];
    size_t n = 2 * (key_bytes + value_bytes) + 2;
    if (n >= LINE || slide_cuda_cache_path(name, path, sizeof path))
        return;
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd < 0)
        return;
    to_hex(line, key, key_bytes);
    line[2 * key_bytes] = ' ';
    to_hex(line + 2 * key_bytes + 1, value, value_bytes);
    line[n - 1] = '\n';
    /* A line cut short by a full disk is passed over by whoever reads it. */
    ssize_t written = write(fd, line, n);
    (void)written;
    close(fd);
}
