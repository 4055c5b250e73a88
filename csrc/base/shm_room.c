/* How much host memory this process may still take. Four parties have a say: the machine, every
 * memory cgroup from ours up to the root (version 1 or 2), and RLIMIT_AS. Past a cgroup's limit the
 * kernel kills instead of failing a call, which is why this is asked first.
 * Called by shm.c before it makes or populates a segment, and by plan/ for its budget. */
#include "shm_room.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#define PATH_SIZE 4096

struct room {
    const char *root;
    uint64_t bytes;
    char *source;
    size_t source_size;
};

static void limit(struct room *room, uint64_t bytes, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The smallest wins. */
static void limit(struct room *room, uint64_t bytes, const char *format, ...)
{
    if (bytes >= room->bytes)
        return;
    room->bytes = bytes;
    va_list list;
    va_start(list, format);
    vsnprintf(room->source, room->source_size, format, list);
    va_end(list);
}

static FILE *open_at(const char *root, const char *path)
{
    char full[PATH_SIZE];
    if (snprintf(full, sizeof full, "%s%s", root, path) >= (int)sizeof full)
        return NULL;
    return fopen(full, "re");
}

/* The number after `key` at the start of a line; an empty key: the first number of the file. */
static int read_number(const char *root, const char *path, const char *key, uint64_t *value)
{
    FILE *file = open_at(root, path);
    if (!file)
        return -1;
    char line[256], *end;
    size_t length = strlen(key);
    int rc = -1;
    while (rc && fgets(line, sizeof line, file))
        if (!strncmp(line, key, length)) {
            *value = strtoull(line + length, &end, 10);
            rc = end == line + length ? -1 : 0; /* "max" is no number */
            if (!*key)
                break;
        }
    fclose(file);
    return rc;
}

/* One directory of a memory cgroup. File pages that nobody uses are given up before the limit
 * hurts, so they count as free. */
static void cgroup_directory(struct room *room, const char *directory, int version)
{
    static const char *const names[3][4] = {
        [1] = {"memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat",
               "total_inactive_file "},
        [2] = {"memory.max", "memory.current", "memory.stat", "inactive_file "},
    };
    const char *const *name = names[version];
    char path[PATH_SIZE];
    uint64_t max, used, cache = 0;

    snprintf(path, sizeof path, "%s/%s", directory, name[1]);
    if (read_number(room->root, path, "", &used))
        return;
    snprintf(path, sizeof path, "%s/%s", directory, name[2]);
    if (read_number(room->root, path, name[3], &cache) || cache > used)
        cache = 0;
    snprintf(path, sizeof path, "%s/%s", directory, name[0]);
    if (read_number(room->root, path, "", &max))
        return;
    used -= cache;
    limit(room, max > used ? max - used : 0, "cgroup limit %s", path);
}

/* Where the hierarchy is mounted, and which of its directories the mount shows: in a container that
 * is often not the root. Finds the last mount, the one on top. */
static int cgroup_mount(const char *root, int version, char *mount, char *shown)
{
    FILE *file = open_at(root, "/proc/self/mountinfo");
    if (!file)
        return -1;
    int rc = -1;
    char *line = NULL;
    size_t room = 0;
    while (getline(&line, &room, file) > 0) {
        char at[PATH_SIZE], top[PATH_SIZE], type[64], options[1024];
        const char *rest = strstr(line, " - ");
        if (!rest || sscanf(line, "%*s %*s %*s %4095s %4095s", top, at) != 2 ||
            sscanf(rest, " - %63s %*s %1023s", type, options) != 2)
            continue;
        if (version == 2 ? strcmp(type, "cgroup2") != 0
                         : strcmp(type, "cgroup") != 0 || !strstr(options, "memory"))
            continue;
        strcpy(mount, at);
        strcpy(shown, top);
        rc = 0;
    }
    free(line);
    fclose(file);
    return rc;
}

/* Does the comma-separated list have "memory"? */
static int has_memory(const char *list, const char *end)
{
    for (const char *at = list; at < end;) {
        const char *comma = memchr(at, ',', (size_t)(end - at));
        size_t length = (size_t)((comma ? comma : end) - at);
        if (length == 6 && !memcmp(at, "memory", 6))
            return 1;
        at += length + 1;
    }
    return 0;
}

/* Our own directory in the hierarchy, from lines such as "0::/a/b" and "4:memory:/a/b". */
static int cgroup_path(const char *root, int version, char *path)
{
    FILE *file = open_at(root, "/proc/self/cgroup");
    if (!file)
        return -1;
    int rc = -1;
    char line[PATH_SIZE];
    while (rc && fgets(line, sizeof line, file)) {
        char *list = strchr(line, ':');
        char *at = list ? strchr(list + 1, ':') : NULL;
        if (!at)
            continue;
        if (version == 2 ? at == list + 1 : has_memory(list + 1, at)) {
            at[strcspn(at, "\n")] = '\0';
            strcpy(path, at + 1);
            rc = 0;
        }
    }
    fclose(file);
    return rc;
}

static void cgroups(struct room *room, int version)
{
    char mount[PATH_SIZE], shown[PATH_SIZE], path[PATH_SIZE], directory[2 * PATH_SIZE];
    if (cgroup_path(room->root, version, path) || cgroup_mount(room->root, version, mount, shown))
        return;

    /* The path counts from the root of the hierarchy, the mount may begin further down. */
    size_t length = strcmp(shown, "/") ? strlen(shown) : 0;
    const char *below = path;
    if (!strncmp(path, shown, length) && (path[length] == '/' || !path[length]))
        below = path + length;
    else if (length)
        below = "";
    if (strstr(below, "/..")) /* we are outside of what our namespace shows */
        below = "";
    snprintf(directory, sizeof directory, "%s%s", mount, below);
    for (size_t end = strlen(directory); end > strlen(mount) && directory[end - 1] == '/';)
        directory[--end] = '\0';

    for (;;) {
        if (strlen(directory) < PATH_SIZE - 64)
            cgroup_directory(room, directory, version);
        char *slash = strrchr(directory, '/');
        if (!slash || strlen(directory) <= strlen(mount))
            return;
        *slash = '\0';
    }
}

void slide_shm_room_at(const char *root, bool mapped, uint64_t *free_bytes, char *source,
                       size_t source_size)
{
    struct room room = {root, UINT64_MAX, source, source_size};
    uint64_t value;
    snprintf(source, source_size, "no limit found");

    if (!read_number(root, "/proc/meminfo", "MemAvailable:", &value))
        limit(&room, value * 1024, "MemAvailable of /proc/meminfo");
    cgroups(&room, 2);
    cgroups(&room, 1);

    struct rlimit space;
    if (!mapped && !getrlimit(RLIMIT_AS, &space) && space.rlim_cur != RLIM_INFINITY &&
        !read_number(root, "/proc/self/statm", "", &value)) {
        value *= (uint64_t)sysconf(_SC_PAGESIZE);
        limit(&room, space.rlim_cur > value ? space.rlim_cur - value : 0, "RLIMIT_AS");
    }
    *free_bytes = room.bytes;
}

void slide_shm_room(uint64_t *free_bytes, char *source, size_t source_size)
{
    slide_shm_room_at("", false, free_bytes, source, source_size);
}

int slide_shm_refuse(uint64_t asked, uint64_t free_bytes, const char *source, const char *what,
                     struct slide_err *err)
{
    char host[65] = "this host";
    gethostname(host, sizeof host - 1);
    const double gib = 1 << 30;
    return slide_err_set(err, SLIDE_EMEM,
                         "host memory of %s does not suffice for %s: %llu bytes asked (%.2f GiB), "
                         "%llu bytes free (%.2f GiB) by %s",
                         host, what, (unsigned long long)asked, (double)asked / gib,
                         (unsigned long long)free_bytes, (double)free_bytes / gib, source);
}
