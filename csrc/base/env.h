/* The environment variables of env.def, read in one place.
 * Threads: any. Blocks: never. */
#ifndef SLIDE_BASE_ENV_H
#define SLIDE_BASE_ENV_H

struct slide_env_entry {
    const char *name, *fallback, *meaning;
};

const struct slide_env_entry *slide_env_list(int *count);
const char *slide_env_get(const char *name); /* value, or the default; never NULL */
long slide_env_int(const char *name);

#endif
