/* The environment, read through the table of env.def, so that `slidedp env` can print every
 * variable there is. An empty value counts as unset. Values are read on each call: none of them is
 * asked for on the step path. */
#include "env.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "log.h"

static const struct slide_env_entry entries[] = {
#define X(name, fallback, meaning) {name, fallback, meaning},
#include "env.def"
#undef X
};

#define COUNT (int)(sizeof entries / sizeof entries[0])

const struct slide_env_entry *slide_env_list(int *count)
{
    *count = COUNT;
    return entries;
}

static const char *fallback_of(const char *name)
{
    for (int i = 0; i < COUNT; i++)
        if (!strcmp(entries[i].name, name))
            return entries[i].fallback;
    return "";
}

const char *slide_env_get(const char *name)
{
    const char *value = getenv(name);
    return value && *value ? value : fallback_of(name);
}

static int parse(const char *text, long *value)
{
    char *end;
    errno = 0;
    *value = strtol(text, &end, 10);
    return errno || end == text || *end ? -1 : 0;
}

long slide_env_int(const char *name)
{
    long value;
    const char *text = slide_env_get(name);
    if (!parse(text, &value))
        return value;
    /* The log asks for its own level here. */
    if (*text && strcmp(name, "SLIDE_LOG"))
        slide_log(-1, SLIDE_LOG_WARN, "%s=%s is not a whole number; the default, \"%s\", is used",
                  name, text, fallback_of(name));
    return parse(fallback_of(name), &value) ? 0 : value;
}
